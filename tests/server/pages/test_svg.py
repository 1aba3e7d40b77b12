"""Marks on a chart."""

import pytest
from markupsafe import Markup

from hyperbloom.server.pages.svg import MOST_POINTS, Frame, nice_ticks, tag, thin


def test_text_is_escaped_wherever_it_stands() -> None:
    made = tag("text", "<b>&", tag("title", "x"), class_='a"b', stroke_width=1.0, x=1.26, fill=None)
    assert made == '<text class="a&#34;b" stroke-width="1" x="1.3">&lt;b&gt;&amp;<title>x</title></text>'
    assert isinstance(made, Markup)


@pytest.mark.parametrize(
    ("low", "high", "whole", "expected"),
    [
        (0, 100, False, [0, 20, 40, 60, 80, 100]),
        (1, 30, True, [5, 10, 15, 20, 25, 30]),
        (0, 3, True, [0, 1, 2, 3]),
        (0, 0.9, False, [0, 0.2, 0.4, 0.6, 0.8]),
        (5, 5, False, [5]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, whole: bool, expected: list[float]) -> None:
    assert nice_ticks(low, high, whole) == pytest.approx(expected)


def test_points_lie_between_the_margins() -> None:
    frame = Frame((0.0, 0.0), (10.0, 100.0), 200, 100, left=20, right=10, top=5, bottom=15)
    assert frame.at(0, 0) == (20, 85)
    assert frame.at(10, 100) == (190, 5)
    assert frame.at(5, 50) == (105, 45)


def test_long_lines_are_thinned_to_means() -> None:
    points = [(float(index), float(index % 2)) for index in range(10 * MOST_POINTS)]
    thinned = thin(points)
    assert len(thinned) == MOST_POINTS
    assert thinned[0] == (4.5, 0.5)
    assert thin(points[:5]) == points[:5]
