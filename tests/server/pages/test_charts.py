"""What stands before what in a chart, and what the numbers become."""

import re

import numpy as np

from hyperbloom.common.metrics import scale_of
from hyperbloom.server.pages.charts import SHADES, Series, lines, plane, style_of
from hyperbloom.server.runs.recorded import Member


def test_areas_lie_behind_lines_and_points_before_them() -> None:
    points = [(1.0, 60.0), (2.0, 80.0)]
    band = ([(1.0, 55.0), (2.0, 70.0)], [(1.0, 65.0), (2.0, 90.0)])
    series = [Series(name, points, [band], [((2.0, 80.0), name)]) for name in ("one", "two")]
    drawn = re.findall(r'class="(band|line|dot)[^"]*(s\d)', lines("c", "t", "%", series, percent=True))
    assert drawn == [
        *(("band", "s0"), ("band", "s1")),
        *(("line", "s1"), ("line", "s0")),  # the first line on top
        *(("dot", "s0"), ("dot", "s1")),
    ]


def test_an_axis_of_percent_begins_below_all_that_is_shown() -> None:
    def lowest(least: float) -> str:
        chart = lines("c", "t", "%", [Series("one", [(1.0, 90.0)], dots=[((1.0, least), "")])], percent=True)
        return re.findall(r'class="tick end">([\d.]+)<', chart)[0]

    assert [lowest(value) for value in (76.0, 49.0, 100.0)] == ["70", "0", "90"]


def test_colours_come_again_after_the_last() -> None:
    assert [style_of(index) for index in (0, 7, 8)] == ["s0", "s7", "s0"]


def test_lines_below_zero_and_no_points_stay_in_the_frame() -> None:
    def heights(*values: float) -> list[float]:
        chart = lines("c", "t", "R2", [Series("one", list(enumerate(values, start=1)))])
        return [
            float(y)
            for _, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", re.findall(r'd="(M[^"]*)" class="line', chart)[0])
        ]

    low, high = heights(-5.0, -4.5)
    assert 34 <= high < low <= 188
    assert "no points" in lines("c", "no points", "%", [Series("one")])


def test_shades_are_found_without_a_look_at_all_clients_for_each() -> None:
    compared = 0

    class Score(float):
        def __lt__(self, other: float) -> bool:
            nonlocal compared
            compared += 1
            return float(self) < float(other)

    members = [Member(f"client-{n}", n, 60, "M", ()) for n in range(100)]
    accuracy = {member.name: Score(member.row) for member in members}
    points = np.random.default_rng(1).normal(size=(100, 2))
    drawn = plane("p", "t", points, members, accuracy, ("x", "y"), scale_of("accuracy"))
    shades = [int(shade) for shade in re.findall(r'class="point q(\d)"', drawn)]
    assert (shades[0], shades[50], shades[-1]) == (0, SHADES // 2, SHADES - 1) and compared <= 2 * len(members)
