"""The table of what newcomers get: which runs of a row count, and what its cells are."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from figures.newcomers import STUDIES, STUDY, table


def line(method: str, seed: int, novel: float, share: float = 0.5, **changes: object) -> dict[str, object]:
    mine = {"share": share, "by_share": [70.0, 71.0, 72.0 + seed, 73.0, 74.0], "trained": 6, "held_out": 2}
    found = {
        "study": "heart",
        "clients": 8,
        "method": method,
        "seed": seed,
        "test_mean": 80.0,
        "novel_test_mean": novel,
    }
    return found | (mine if method != "fedavg" else {}) | changes


def test_a_row_has_the_seeds_that_both_sides_have() -> None:
    lines = [
        line("odpfl-faster", 0, 74.0),
        line("odpfl-faster", 1, 74.0),
        line("odpfl-faster", 2, 10.0),
        line("odpfl-common", 1, 74.0, 1.0),
    ]
    rows = table([*lines, line("fedavg", 0, 60.0), line("fedavg", 1, 62.0)]).splitlines()
    assert rows[2:] == [
        "| heart disease, Dirichlet 0.5 | 6 | 1 | `common` | 70.0 | 74.0 | 74.0 | 1 | 62.0 | 80.0 |",
        "| heart disease, Dirichlet 0.5 | 6 | 2 | `common`, rate 0.01 | 70.0 | 74.0 | 72.5 | 0.5, 0.5 | 61.0 | 80.0 |",
    ]
    assert (
        len(table([line("odpfl-faster", 0, 74.0)]).splitlines()) == 2
    )  # without FedAvg there is nothing to compare with


def test_a_small_run_is_a_line_and_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"data.name": "digits", "data.split": "shards", "local.steps": 1, "rounds": 20}
    monkeypatch.setitem(STUDIES, "heart", (small, (4,)))
    keys = {"study": "heart", "clients": 4, "seed": 0}
    study = replace(STUDY, wanted=[keys | {"method": method} for method in ("odpfl-faster", "odpfl-common", "fedavg")])
    results = tmp_path / "results.jsonl"
    for method in ("odpfl-common", "fedavg", "fedavg"):
        study.main("", ["--results", str(results), "--only", "seed=0", f"method={method}"])
    found = [json.loads(text) for text in results.read_text().splitlines()]
    assert [each["method"] for each in found] == ["odpfl-common", "fedavg"]
    assert (found[0]["trained"], found[0]["held_out"]) == (3, 1)
    assert found[0]["by_share"][-1] == pytest.approx(found[0]["novel_test_mean"], abs=0.01)
    assert table(found).count("| heart disease, Dirichlet 0.5 | 3 | 1 |") == 1
