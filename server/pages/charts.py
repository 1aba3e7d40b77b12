"""The charts of reports and comparisons as inline SVG. Nothing here reads files."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product

import numpy as np
from markupsafe import Markup

from hyperbloom.common.metrics import Scale, axis_of, title_of
from hyperbloom.server.pages.embedding_map import Points
from hyperbloom.server.pages.svg import Frame, Point, picture, tag, thin
from hyperbloom.server.runs.course import Course
from hyperbloom.server.runs.recorded import Member

SHADES = 9
"""Number of shades from low to high."""
STYLES = 12
"""Number of strategy colours; the thirteenth strategy has the first colour again."""
NAMED = 12
"""Most clients whose points have names beside them."""

SIZE, LETTER = 420.0, 3.9
"""A map's width, and half the width of a letter of its names, where they are largest."""

Box = tuple[float, float, float, float]
Scores = Mapping[str, float]
Texts = Sequence[str]

PIES = 300
"""Most clients whose points are pies of their classes."""


def style_of(index: int) -> str:
    """Return the CSS class of the strategy at this index."""
    return f"s{index % STYLES}"


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        points: `x` and value, such as a round and its accuracy.
        bands: lower and upper edges of areas behind the line, widest first.
        dots: highlighted points, each with a tooltip.
    """

    name: str
    points: Sequence[Point] = ()
    bands: Sequence[tuple[Sequence[Point], Sequence[Point]]] = ()
    dots: Sequence[tuple[Point, str]] = ()


def lines(
    name: str, title: str, unit: str, series: Sequence[Series], percent: bool = False, below: str = "round"
) -> Markup:
    """Return a line chart, `name` unique in the page; the first line is bold, and the index decides the colour.

    With `percent`, the axis ends at 100 and starts at a round number; otherwise it starts at 0. It has whole
    numbers if all values are. A line of a single point is a dot.
    """
    drawn = ((each.points, *chain(*each.bands), [point for point, _ in each.dots]) for each in series)
    every = [point for points in chain(*drawn) for point in points]
    first, last = min([1, *(x for x, _ in every)]), max([1, *(x for x, _ in every)])
    values = [value for _, value in every] or [0.0]
    low, high, least = min(0.0, *values), max(0.0, 1.08 * max(values)), min(values)
    if percent:
        low, high = 0.0 if least < 50 else 10.0 * math.floor(min(least, 99) / 10), 100.0
    frame = Frame((first, low), (max(last, first + 1), high if high > low else 1.0), height=350.0 if percent else 240.0)
    areas, curves, points = [], [], []
    for index, each in enumerate(series):
        style, single = style_of(index), [(point, each.name) for point in each.points if len(each.points) == 1]
        marked = each.dots or single
        radius = 2.5 if len(marked) > 1 else 3.5 if index else 5.0  # those of others lie on it, and do not hide it
        for width, (lower, upper) in zip(("wide", "narrow"), each.bands, strict=False):
            areas.append(frame.band(thin(upper), thin(lower), f"{style} {width}"))
        if each.points:
            curves.append(frame.line(thin(each.points), f"{style} {'other' if index else 'main'}"))
        for point, note in marked:
            x, y = frame.at(*point)
            points.append(tag("circle", tag("title", note), cx=x, cy=y, r=radius, class_=f"dot {style}"))
    marks = [*frame.axes(below, unit, counts=all(map(float.is_integer, map(float, values)))), *areas, *curves, *points]
    cell, told = Scale(percent=percent).cell, [each for each in series if each.points]
    said = "; ".join(f"{each.name} goes from {cell(each.points[0][1])} to {cell(each.points[-1][1])}" for each in told)
    return picture(name, title, f"{said} ({unit})", (frame.width, frame.height), marks)


def clients_in_order(courses: Sequence[Course]) -> Markup:
    """Return the chart of all clients' accuracy, ordered by that of the first strategy, with the other strategies."""
    main, scale, metric = courses[0].accuracy, courses[0].scale, title_of(courses[0].metric)
    order = sorted(main, key=lambda name: main[name], reverse=not scale.rises)
    places = {name: place for place, name in enumerate(order, start=1)}
    series = []
    for course in courses:
        of = {name: course.accuracy[name] for name in places if name in course.accuracy}
        dots = [((places[name], value), f"{name}: {course.name} {scale.show(value)}") for name, value in of.items()]
        line = [point for point, _ in dots] if course is courses[0] else []
        series.append(Series(course.name, line, dots=dots))
    below = "clients, from the worst to the best"
    return lines("clients", f"Test {metric} of each client", axis_of(courses[0].metric), series, scale.percent, below)


def plane(
    name: str, title: str, points: Points, members: Sequence[Member], accuracy: Scores, axes: Texts, scale: Scale
) -> Markup:
    """Return clients as `points` `(clients, 2)` in a plane, coloured by their disclosed classes, else by accuracy.

    `members` are in the same order; `accuracy` is the selecting metric on test examples by name, `axes` both labels.
    """
    size, margin, count = SIZE, 34.0, len(members)
    low, high = points.min(axis=0), points.max(axis=0)
    middle, reach = (low + high) / 2, max(float((high - low).max()), 1e-12)  # one scale for both axes
    radius = float(np.clip(90 / math.sqrt(count), 2.5, 10))
    values = [accuracy[member.name] for member in members if member.name in accuracy] or [0.0]
    least, most = min(values), max(values)
    spots = [(size / 2 + float(x), size / 2 - float(y)) for x, y in (points - middle) / reach * (size - 2 * margin)]
    marks = [tag("rect", x=1, y=1, width=size - 2, height=size - 2, rx=8, class_="ground")]
    for member, at in zip(members, spots, strict=True):
        share = (accuracy.get(member.name, most) - least) / (most - least) if most > least else 1.0
        shade = f"q{min(SHADES - 1, int(SHADES * share))}" if member.name in accuracy else "none"
        marks.append(tag("g", tag("title", _told(member, accuracy, scale)), *_point(member, at, radius, shade, count)))
    boxes = [(x, y, radius, radius) for x, y in spots]
    for text, (x, y, side) in zip(axes, ((size - 10, size - 12, -1), (12, 22, 1)), strict=False):
        marks.append(tag("text", text, x=x, y=y, class_="label" if side > 0 else "label end"))
        boxes.append((x + side * LETTER * len(text), y - 4.5, LETTER * len(text), 7.0))
    if count <= NAMED:
        marks.extend(_names([member.name for member in members], spots, radius, boxes))
    said = f"{count} clients; those whose embeddings are alike lie close together"
    return picture(name, title, said, (size, size), marks)


def _names(names: Texts, spots: Sequence[Point], radius: float, boxes: list[Box]) -> Iterator[Markup]:
    """Yield names beside points, but none that would cover one of `boxes`: middles, half widths and half heights."""
    for name, (x, y) in zip(names, spots, strict=True):
        text = name if len(name) <= 16 else f"{name[:7]}…{name[-8:]}"  # names of a federation differ at their ends
        half, first, apart = LETTER * len(text), -1 if x > SIZE / 2 else 1, radius + 5
        places = product((first, -first, 0), (0.0, radius + 9, -radius - 9))
        for side, under in sorted(places, key=all):  # those in a corner last
            a, b = x + side * (apart + half), y + under
            free = all(abs(a - c) >= half + wide or abs(b - d) >= 7 + high for c, d, wide, high in boxes)
            if free and half < a < SIZE - half and 8 < b < SIZE - 8:
                boxes.append((a, b, half, 7.0))
                yield tag("text", text, x=x + side * apart, y=b + 4.5, class_=f"tick {('middle', '', 'end')[side]}")
                break


def _told(member: Member, accuracy: Scores, scale: Scale) -> str:
    parts = [scale.show(accuracy[member.name])] if member.name in accuracy else []
    common = sorted(enumerate(member.shares), key=lambda pair: -pair[1])[:3]
    parts += [f"class {label}: {100 * share:.0f} %" for label, share in common if share >= 0.01]
    return f"{member.name} ({', '.join(parts)})" if parts else member.name


def _point(member: Member, at: Point, radius: float, shade: str, count: int) -> list[Markup]:
    """Return a disc in one colour, or a pie of the client's classes."""
    disc = {"cx": at[0], "cy": at[1], "r": radius}
    if not member.shares:
        return [tag("circle", **disc, class_=f"point {shade}")]
    if count > PIES or max(member.shares) > 0.995:
        largest = max(range(len(member.shares)), key=lambda label: member.shares[label])
        return [tag("circle", **disc, class_="point", fill=class_colour(largest))]
    parts, begin = [], 0.0
    for label, share in enumerate(member.shares):
        if share > 0.005:  # a slice is a dash of a circle as wide as its radius
            dash = {"pathLength": 1, "stroke_dasharray": f"{share:.4f} 1", "stroke_dashoffset": f"{-begin:.4f}"}
            half = {"r": radius / 2, "stroke_width": radius, "stroke": class_colour(label)}
            parts.append(tag("circle", cx=at[0], cy=at[1], fill="none", **half, **dash))
        begin += share
    return [*parts, tag("circle", **disc, class_="ring")]


def class_colour(label: int) -> Markup:
    """Return a class's colour, with a contrast of 3:1 on light and dark; neighbours differ by the golden angle."""
    return Markup(f"oklch({(60, 63, 56)[label % 3]}% 0.14 {(label * 137.5 + 260) % 360:.0f})")
