"""Charts as inline SVG, with the few marks that a report needs. All text is escaped (markupsafe).

Colours are classes of the page's style sheet, so that charts work on light and dark backgrounds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from markupsafe import Markup, escape

Point = tuple[float, float]

MOST_POINTS = 400
"""Most points of a line; a screen cannot show more."""


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """Return an element. Plain strings are escaped; the attribute `class_` becomes `class`, and `_` becomes `-`."""
    written = ""
    for key, value in attributes.items():
        if value is not None:
            shown = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
            written += f' {key.rstrip("_").replace("_", "-")}="{escape(shown)}"'
    return Markup(f"<{name}{written}>{''.join(escape(child) for child in children)}</{name}>")


def picture(name: str, title: str, description: str, size: tuple[float, float], marks: Sequence[str]) -> Markup:
    """Return an SVG picture, `name` unique in the page, with a description for screen readers."""
    name = quote(name, safe="")  # a space would end an id
    return tag(
        "svg",
        tag("title", title, id=f"{name}-title"),
        tag("desc", description, id=f"{name}-desc"),
        *marks,
        viewBox=f"0 0 {size[0]:g} {size[1]:g}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )


@dataclass(frozen=True)
class Frame:
    """Coordinates with axes: data from `low` to `high` in both directions, drawn inside margins."""

    low: Point
    high: Point
    width: float = 560.0
    height: float = 300.0
    left: float = 50.0
    right: float = 14.0
    top: float = 34.0
    bottom: float = 52.0

    def at(self, x: float, y: float) -> Point:
        """Return the position of a data point."""
        (low_x, low_y), (high_x, high_y) = self.low, self.high
        across = (x - low_x) / ((high_x - low_x) or 1)
        up = (y - low_y) / ((high_y - low_y) or 1)
        return (
            self.left + across * (self.width - self.left - self.right),
            self.height - self.bottom - up * (self.height - self.top - self.bottom),
        )

    def axes(self, below: str, unit: str, whole: bool = True, counts: bool = False) -> list[Markup]:
        """Return grid lines with numbers, `whole` ones below, `counts` beside, and the labels of both axes."""
        marks = []
        for value in nice_ticks(self.low[1], self.high[1], counts):
            x, y = self.at(self.low[0], value)
            marks.append(tag("path", d=f"M{x:.1f} {y:.1f}H{self.width - self.right:.1f}", class_="grid"))
            marks.append(tag("text", f"{value:,.10g}", x=x - 7, y=y + 4.5, class_="tick end"))
        for value in nice_ticks(self.low[0], self.high[0], whole):
            x, y = self.at(value, self.low[1])
            marks.append(tag("text", f"{value:,.10g}", x=x, y=y + 20, class_="tick middle"))
        middle = (self.left + self.width - self.right) / 2
        marks.append(tag("text", below, x=middle, y=self.height - 8, class_="label middle"))
        marks.append(tag("text", unit, x=2.0, y=14.0, class_="label"))
        return marks

    def line(self, points: Sequence[Point], style: str) -> Markup:
        """Return a line through points."""
        return tag("path", d=f"M{_path(self, points)}", class_=f"line {style}")

    def band(self, upper: Sequence[Point], lower: Sequence[Point], style: str) -> Markup:
        """Return the area between two lines."""
        return tag("path", d=f"M{_path(self, [*upper, *reversed(lower)])}Z", class_=f"band {style}")


def _path(frame: Frame, points: Sequence[Point]) -> str:
    return "L".join("{:.1f} {:.1f}".format(*frame.at(*point)) for point in points)


def nice_ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Return about four to seven round numbers from `low` to `high`."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    power = 10 ** math.floor(math.log10(span / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= 6)
    step = max(step, 1) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 10) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def thin(points: Sequence[Point]) -> list[Point]:
    """Return at most `MOST_POINTS` points: the means of runs of neighbours."""
    size = math.ceil(len(points) / MOST_POINTS)
    if size <= 1:
        return list(points)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
