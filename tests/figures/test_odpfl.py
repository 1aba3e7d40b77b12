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
    capfd.readouterr()
    run("odpfl", "--table")
    shown = capfd.readouterr().out.splitlines()
    assert shown[2].startswith("| `odpfl` | ") and shown[2].endswith(" (59.5) |  |  |  |")
