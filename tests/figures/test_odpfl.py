"""The study of novel clients goes on where it was stopped, and prints a table."""

import json
import sys
from pathlib import Path

import pytest

from figures import odpfl


def test_the_comparison_for_novel_clients_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    words = f"--data digits --clients 10 --rounds 2 --every 1 --splits pathological --results {results}"
    words += f" --work {tmp_path / 'work'} --set local.steps=2 --set novel=20 --methods "

    def run(*more: str) -> list[dict[str, object]]:
        monkeypatch.setattr(sys, "argv", ["odpfl", *words.split(), *more])
        odpfl.main()
        return [json.loads(line) for line in results.read_text().splitlines()]

    run("pfl-nearest")
    found = run("odpfl,pfl-nearest")
    assert [line["method"] for line in found] == ["pfedhn", "pfl-nearest", "odpfl"]  # each once
    assert all(0 <= line["novel_test_mean"] <= 100 for line in found)
    pfedhn, nearest, _ = found
    assert nearest["test_mean"] == pytest.approx(pfedhn["test_mean"], abs=0.01)  # of the same trained run
    *_, other = run("odpfl", "--set", "local.learning_rate=0.5")
    assert other["set"] != found[-1]["set"] and other["losses"] != found[-1]["losses"]  # not the earlier run's
    capfd.readouterr()
    run("odpfl", "--table")
    shown = capfd.readouterr().out.splitlines()
    assert shown[0] == "digits, 2 rounds, accuracy on novel clients in percent:"
    assert shown[4].startswith("| `odpfl`, local.steps=2, novel=20 | ") and shown[4].endswith(" |  |  |  |")


def line(method: str, seed: int, novel: float, own: list[str], rounds: int = 500) -> dict[str, object]:
    """Return a result on the split by Dirichlet 1."""
    about = {"data": "cifar10", "clients": 100, "rounds": rounds, "split": "dirichlet-1", "method": method}
    numbers = {
        "val_mean": novel - 1,
        "test_mean": 70.0,
        "test_std": 3.0,
        "novel_test_mean": novel,
        "novel_test_std": 3.0,
    }
    return {**about, "seed": seed, "set": own, **numbers}


def test_the_table_has_a_row_for_each_setting_and_the_error_of_the_mean() -> None:
    rate = "local.learning_rate=0.01"
    lines = [line("odpfl", 0, 60.0, [rate]), line("odpfl", 1, 64.0, [rate]), line("fedavg", 0, 50.0, [])]
    tried = line("odpfl", 0, 40.0, [rate, "local.steps=65"], rounds=100) | {"search": True}
    shown = odpfl.tables([*lines, tried])
    assert f"| `odpfl`, {rate} |  |  | 62.0 +- 2.8 (2 seeds) (62.9) |  |" in shown
    # The recorded 3.0 is the deviation of ten novel clients divided by their number, so 3 over the root of nine.
    assert "| `fedavg` |  |  | 50.0 +- 1.0 (48.4) |  |" in shown
    assert "| `fedavg` |  |  | 70.0 +- 0.3 |  |" in shown  # the other 90 clients, for whom the paper has no number
    alone = odpfl.tables([lines[2] | {"clients": 10}])
    assert "| `fedavg` |  |  | 50.0 (48.4) |  |" in alone and "70.0 +- 1.1 |" in alone  # one of ten is novel
    assert f"| dirichlet-1 | 100 | `odpfl` | {rate}, local.steps=65 | 0 | 39.0 |" in shown
    assert "100 rounds, accuracy on novel clients" not in shown  # a search is judged on validation alone
    assert "CIFAR-100" not in shown and "CIFAR-10, 500 rounds, accuracy on novel clients" in shown
    other = odpfl.tables([*lines, lines[2] | {"data": "cifar100"}])
    assert "CIFAR-100, 500 rounds, accuracy on novel clients" in other
    assert (
        "| `fedavg` |  |  | 50.0 +- 1.0 (13.5) |  |" in other and "(48.4)" in other
    )  # beside the data set's own number
