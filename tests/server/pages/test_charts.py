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
        *(("line", "s0"), ("line", "s1")),  # the first line is the widest, and no other hides behind it
        *(("dot", "s0"), ("dot", "s1")),
    ]


def test_an_axis_of_percent_begins_below_all_that_is_shown() -> None:
    def lowest(least: float) -> str:
        chart = lines("c", "t", "%", [Series("one", [(1.0, 90.0)], dots=[((1.0, least), "")])], percent=True)
        return re.findall(r'class="tick end">([\d.]+)<', chart)[0]

    assert [lowest(value) for value in (76.0, 49.0, 100.0)] == ["70", "0", "90"]


def test_colours_come_again_after_the_last() -> None:
    assert [style_of(index) for index in (0, 8, 11, 12)] == ["s0", "s8", "s11", "s0"]


def test_a_line_of_one_point_is_a_dot_and_hides_no_other() -> None:
    chart = lines("c", "t", "kB", [Series(name, [(1.0, 7.0)]) for name in ("down", "up")])
    radii = [float(radius) for radius in re.findall(r'<circle [^>]*r="([\d.]+)"', chart)]
    assert len(radii) == 2 and radii[0] > radii[1]
    assert "<circle" not in lines("c", "t", "kB", [Series("down", [(1.0, 7.0), (2.0, 8.0)])])


def test_counts_have_whole_numbers_beside_them() -> None:
    charts = [lines("c", "t", "", [Series("left out", [(1.0, 0.0), (2.0, most)])]) for most in (1.0, 0.9)]
    beside = [re.findall(r'class="tick end">([\d.]+)<', chart) for chart in charts]
    assert beside[0] == ["0", "1"] and "0.2" in beside[1]


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


def test_names_cover_neither_points_nor_each_other() -> None:
    members = [Member(f"hospital-of-the-city-{n:02d}-ward-{n}", n, 60, "M", ()) for n in range(9)]
    points = np.random.default_rng(2).normal(size=(9, 2)) * (1, 0.2)
    drawn = plane("p", "t", points, members, {}, ("40 % of the variance →", "↑ 20 %"), scale_of("accuracy"))
    spots = [(float(x), float(y), 10.0, 10.0) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawn)]
    named = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" class="tick ?([a-z]*)">([^<]+)<', drawn)
    sides = {"": 1, "middle": 0, "end": -1}
    boxes = [(float(x) + sides[at] * 3.5 * len(it), float(y) - 4.5, 3.5 * len(it), 6.0) for x, y, at, it in named]
    assert len(named) >= 5 and len({text for *_, text in named}) == len(named)
    for index, (x, y, wide, high) in enumerate(boxes):
        for a, b, c, d in [*spots, *boxes[:index]]:
            assert abs(x - a) >= wide + c or abs(y - b) >= high + d


def test_long_names_are_cut_in_the_middle() -> None:
    names = [*(f"hospital-heidelberg-radiology-{number}" for number in (1, 2)), "ward-7"]
    members = [Member(name, row, 60, "M", ()) for row, name in enumerate(names)]
    drawn = plane("p", "t", np.eye(3)[:, :2], members, {}, (), scale_of("accuracy"))
    assert re.findall(r'class="tick[^"]*">([^<]+)<', drawn) == ["hospita…iology-1", "hospita…iology-2", "ward-7"]
