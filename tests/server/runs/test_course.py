"""How a strategy fared, from the lines of its folder."""

import json
from pathlib import Path

import pytest

from hyperbloom.server.loop.listener import Selection
from hyperbloom.server.runs.course import read_course

LINES = [
    {"round": 1, "seconds": 1.0, "clients": 2, "bytes_down": 300, "bytes_up": 100},
    {"round": 2, "seconds": 2.0, "clients": 2, "asked": 3, "left_out": 2, "bytes_down": 700, "bytes_up": 400},
    # In asynchronous mode an evaluation is a line of its own, later than rounds that came after it.
    {"round": 1, "seconds": 9.0, "clients": 0, "bytes_down": 0, "bytes_up": 0, "test_mean": 50.0},
]


def test_an_evaluation_beside_the_rounds_counts_for_the_curve_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    selection = Selection(1, {"test_mean": 50.0}, {"a": 40.0, "b": 60.0, "new": 10.0})
    course = read_course("pfedhn", tmp_path, selection, novel={"new"})
    assert [line["round"] for line in course.rounds] == [1, 2]
    assert (course.seconds, course.trained, course.curve) == (3.0, 4, {1: 50.0})
    assert course.bytes_each("down") == pytest.approx(200)
    assert course.bytes_each("up") == pytest.approx(100)
    assert (course.selected, course.accuracy) == (1, {"a": 40.0, "b": 60.0})


def test_before_the_first_evaluation_nothing_is_selected(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(LINES[0]) + "\n")
    course = read_course("pfedhn", tmp_path, None)
    assert (course.selected, course.metrics, course.accuracy, course.curve) == (None, {}, {}, {})
