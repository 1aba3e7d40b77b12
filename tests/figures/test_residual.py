"""The tables of a correction of the default: they compare the same sets and seeds."""

import json
from pathlib import Path

import pytest

from figures.residual import federations_table, main, newcomers_table


def test_only_seeds_that_both_rules_have_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, pays = tmp_path / "residual.jsonl", tmp_path / "pays.jsonl"
    run = {"set": "heart", "rounds": 40, "strategy": "pfedhn", "val": 80.0, "test": [70.0, 90.0]}
    lines = [{**run, "seed": 0}, {**run, "seed": 1, "val": 20.0}, {**run, "seed": 0, "rounds": 200, "val": 1.0}]
    pays.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {**run, "seed": 0, "strategy": "fedavg"}]))
    main(["--rule", "earlier", "--pays", str(pays), "--results", str(results)])
    pays.write_text(json.dumps({**run, "seed": 0, "val": 82.0, "test": [71.0, 93.0]}) + "\n")
    main(["--pays", str(pays), "--results", str(results)])
    assert "| heart | 1 | 80.0 | 82.0 | 80.0 | 82.0 |" in capsys.readouterr().out
    assert len(results.read_text().splitlines()) == 3


def test_what_newcomers_are_given_is_that_of_the_last_round(tmp_path: Path) -> None:
    scores = [{"round": n, "test_mean": 80.0 + n, "novel_test_mean": 70.0 - n, "novel_test_loss": n} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in scores))
    (tmp_path / "config.yaml").write_text("strategy: pfedhn\nseed: 5\n")
    main(["--newcomers", str(tmp_path), "--rule", "earlier", "--results", str(tmp_path / "out.jsonl")])
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert "| earlier | 5 | 82.0 | 68.0 | 2.00 |" in newcomers_table(found)
    assert federations_table(found).count("\n") == 1
