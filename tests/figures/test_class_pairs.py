"""What remains of a size when clients are compared with others of the same classes."""

import json
from itertools import product
from pathlib import Path

import pytest

from figures.class_pairs import by_seed, by_size, lines_of, main, of_same_classes
from hyperbloom.common.config import make_run_config
from hyperbloom.server.library import run


def test_a_client_is_compared_with_all_others_of_its_classes() -> None:
    tests = {(0, 1): [60.0, 70.0, 80.0], (2, 3): [90.0, 100.0], (4, 5): [50.0]}
    lines = [{"classes": list(pair), "test": test} for pair, group in tests.items() for test in group]
    assert of_same_classes(lines) == [75.0, 70.0, 65.0, 100.0, 90.0, None]


def test_a_size_with_hard_classes_is_not_said_to_be_worse() -> None:
    """Size L has 3 points more than S, and its clients mostly have the hard pair of classes, 30 points below."""
    drawn = [*product(["L"], [0, 0, 0, 1]), *product(["S"], [0, 1, 1, 1])]
    lines = [
        {"seed": seed, "size": size, "classes": [pair, 9], "test": 60.0 + 30 * pair + 3 * (size == "L") + seed}
        for seed in range(4)
        for size, pair in drawn
    ]
    assert "| 0 | 82.5, " in by_seed(lines) and ", " in by_seed(lines).splitlines()[2]
    rows = by_size(lines).splitlines()[2:]
    above = {row.split(" | ")[0].strip("| "): float(row.split(" | ")[4].split()[0]) for row in rows}
    assert above["L"] == pytest.approx(-above["S"], abs=0.05) and 1.0 < above["L"] < 2.0  # each is in the others' mean


def test_lines_have_the_classes_that_clients_trained_on(tmp_path: Path) -> None:
    data = {"name": "digits", "split": "shares", "classes_per_client": 2}
    values = {"strategy": "local", "rounds": 1, "clients": 4, "cohort": 4, "sizes": ["S", "M"], "data": data}
    run(make_run_config({**values, "gains": False}, {}, "test"), run_dir=tmp_path / "run")
    lines = list(lines_of(tmp_path / "run", "data"))
    assert [(line["client"], line["size"]) for line in lines] == [(0, "S"), (1, "M"), (2, "S"), (3, "M")]
    assert all(len(line["classes"]) == 2 for line in lines)
    (selected,) = json.loads((tmp_path / "run" / "summary.json").read_text()).values()
    assert [line["test"] for line in lines] == [round(selected["test_accuracy"][f"client-{n}"], 2) for n in range(4)]
    results = tmp_path / "results.jsonl"
    for _ in range(2):  # a run that is added again takes the place of its lines
        main([str(tmp_path / "run"), "--results", str(results)])
    assert [json.loads(line) for line in results.read_text().splitlines()] == lines
