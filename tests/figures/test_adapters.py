"""The table of adapters: which rate counts, and what its cells say."""

import json
from pathlib import Path

import pytest

from figures.adapters import chosen, main, newcomers, table


def line(method: str, rate: float, seed: int, val: float, test: float, **more: object) -> dict[str, object]:
    """Return a line of the results."""
    about = {"task": "tweets", "method": method, "rate": rate, "seed": seed, "rounds": 60, "novel": False}
    figures = {"val_mean": val, "test_mean": test, "test_worst": test - 10, "bytes": 4000, "seconds_a_round": 0.5}
    return about | figures | more


def test_the_rate_is_chosen_on_validation_with_the_first_seed_alone() -> None:
    lines = [line("FedPer, LoRA", 0.1, 0, 70, 95), line("FedPer, LoRA", 0.02, 0, 80, 60)]
    lines += [line("FedPer, LoRA", 0.02, 1, 10, 64), line("FedPer, LoRA", 0.1, 1, 99, 99)]
    assert [each["test_mean"] for each in chosen(lines)] == [60, 64]
    assert chosen([]) == []


def test_a_row_has_mean_and_deviation_over_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line("local, head", 0.02, seed, 50, 60 + seed) for seed in range(3)]
    lines.append(line("ODPFL-HN, LoRA", 0.02, 0, 50, 60, novel=True, novel_test_mean=40.0, novel_test_worst=20.0))
    text = table(lines, "tweets")
    assert "| local, head | 3 | 0.02 | 61.0 ± 1.0 | 51.0 ± 1.0 | 4.0 | 0.50 |" in text
    assert "| ODPFL-HN, LoRA | 1 | 0.02 | 60.0 | 40.0 | 20.0 |" in newcomers(lines)
    (tmp_path / "results.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    assert main(["table", "--results", str(tmp_path / "results.jsonl")]) == 0
    assert text in capsys.readouterr().out
