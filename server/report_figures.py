"""The figures of a run's report."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from hyperbloom.server.embedding_map import Points
from hyperbloom.server.report_data import Course, Member
from hyperbloom.server.run_lines import Line
from hyperbloom.server.svg import Frame, Point, picture, short, tag, thin

__all__ = [
    "STEPS",
    "accuracy_over_rounds",
    "class_colour",
    "clients_in_order",
    "left_out_over_rounds",
    "matrix",
    "over_rounds",
    "plane",
    "style_of",
]

STEPS = 9
"""Shades from low to high."""

STYLES = 8
"""Colours of strategies; the ninth has the first one's again."""

NAMED = 12
"""Clients up to which points have their names beside them."""

PIES = 300
"""Clients up to which points are pies of their classes."""


def style_of(index: int) -> str:
    """Return the class of the strategy of this place."""
    return f"s{index % STYLES}"


def accuracy_over_rounds(courses: Sequence[Course]) -> Markup:
    """Return the mean over clients of each strategy by round, and the spread over clients of the first."""
    main = courses[0]
    floor = min(spread.extremes[0] for course in courses for spread in course.spreads)
    low = 0.0 if floor < 50 else 10.0 * math.floor(min(floor, 99) / 10)
    last = max(course.spreads[-1].round for course in courses if course.spreads)
    first = min(1, *(course.spreads[0].round for course in courses if course.spreads))
    frame = Frame((first, low), (max(last, first + 1), 100.0), height=350.0)
    marks = frame.axes("round", "test accuracy, %")
    for style, choose in (("wide", lambda s: s.extremes), ("narrow", lambda s: s.quartiles)):
        lower, upper = (thin([(s.round, choose(s)[end]) for s in main.spreads]) for end in (0, 1))
        marks.append(frame.band(upper, lower, f"{style_of(0)} {style}"))
    for index, course in reversed(list(enumerate(courses))):
        if course.spreads:
            points = thin([(spread.round, spread.mean) for spread in course.spreads])
            marks.append(frame.line(points, f"{style_of(index)} {'main' if index == 0 else 'other'}"))
        if course.selected is not None and course.metrics:
            x, y = frame.at(course.selected, course.metrics["test_mean"])
            note = tag("title", f"{course.name}: {course.metrics['test_mean']:.1f} % at round {course.selected}")
            marks.append(tag("circle", note, cx=x, cy=y, r=4.5, class_=f"dot {style_of(index)}"))
    said = "; ".join(
        f"{course.name} goes from {course.spreads[0].mean:.1f} to {course.spreads[-1].mean:.1f} percent"
        for course in courses
        if course.spreads
    )
    return picture("curve", "Test accuracy over rounds, mean over clients", said, (560, 350), marks)


def clients_in_order(courses: Sequence[Course]) -> Markup:
    """Return the accuracy of all clients, in order of that of the first strategy, and the others' beside it."""
    names = sorted(courses[0].accuracy, key=lambda name: courses[0].accuracy[name])
    shown = [course for course in courses if course.accuracy]
    floor = min(min(course.accuracy.values()) for course in shown)
    frame = Frame((0.0, 0.0 if floor < 50 else 10.0 * math.floor(min(floor, 99) / 10)), (len(names), 100.0))
    marks = frame.axes("clients, from the worst to the best", "test accuracy, %")
    step = (frame.width - frame.left - frame.right) / max(1, len(names))
    for place, name in enumerate(names):
        value = courses[0].accuracy[name]
        x, y = frame.at(place, value)
        note = ", ".join(f"{course.name} {course.accuracy[name]:.1f} %" for course in shown if name in course.accuracy)
        height = frame.height - frame.bottom - y
        bar = {"x": f"{x + 0.1 * step:.2f}", "width": f"{0.8 * step:.2f}", "y": y, "height": height}
        marks.append(tag("rect", tag("title", f"{name}: {note}"), **bar, class_=f"fill {style_of(0)}"))
    radius = min(3.5, max(1.2, 0.4 * step))
    for index, course in list(enumerate(courses))[1:]:
        for place, name in enumerate(names):
            if name in course.accuracy:
                x, y = frame.at(place + 0.5, course.accuracy[name])
                marks.append(tag("circle", cx=x, cy=y, r=radius, class_=f"dot small {style_of(index)}"))
    worst, best = courses[0].accuracy[names[0]], courses[0].accuracy[names[-1]]
    said = f"{len(names)} clients, from {worst:.1f} to {best:.1f} percent"
    return picture("clients", "Test accuracy of each client", said, (frame.width, frame.height), marks)


def over_rounds(
    name: str, title: str, unit: str, rounds: Sequence[Line], values: Mapping[str, Callable[[Line], float]]
) -> Markup:
    """Return lines over rounds, the first in the strategy's colour, others in those of the next places."""
    lines = [thin([(line["round"], get(line)) for line in rounds]) for get in values.values()]
    highest = max((y for points in lines for _, y in points), default=0.0) or 1.0
    first, last = rounds[0]["round"], rounds[-1]["round"]
    frame = Frame((first, 0.0), (max(last, first + 1), 1.08 * highest), height=240.0)
    marks = frame.axes("round", unit)
    for index, points in enumerate(lines):
        marks.append(frame.line(points, f"{style_of(index)} {'main' if index == 0 else 'other'}"))
    said = "; ".join(
        f"{label}: {np.mean([get(line) for line in rounds]):.3g} on average" for label, get in values.items()
    )
    return picture(name, title, f"{said} ({unit})", (560, 240), marks)


def left_out_over_rounds(left_out_in: Mapping[int, int], first: int, last: int) -> Markup:
    """Return how many clients were left out in each round."""
    size = math.ceil((last - first + 1) / 140)
    counts: dict[int, int] = {}
    for number, count in left_out_in.items():
        place = first + (number - first) // size * size
        counts[place] = counts.get(place, 0) + count
    frame = Frame((first, 0.0), (max(last, first) + 1, 1.08 * max(counts.values())), height=190.0)
    marks = frame.axes("round", "clients left out")
    width = (frame.width - frame.left - frame.right) / max(1, last - first + 1) * size
    for number, count in sorted(counts.items()):
        x, y = frame.at(number, count)
        note = tag("title", f"{count} from round {number} on" if size > 1 else f"{count} in round {number}")
        height = frame.height - frame.bottom - y
        marks.append(
            tag("rect", note, x=x, y=y, width=f"{max(1.0, 0.85 * width):.2f}", height=height, class_="fill warn")
        )
    said = f"{sum(counts.values())} in all, in {len(left_out_in)} rounds"
    return picture("left-out", "Clients left out by round", said, (560, 190), marks)


def plane(
    name: str, title: str, points: Points, members: Sequence[Member], accuracy: Mapping[str, float], axes: Sequence[str]
) -> Markup:
    """Return clients as points in a plane, coloured by what they disclose of their classes, else by accuracy.

    Args:
        name: of the picture, unique in the page.
        title: in a few words.
        points: `(clients, 2)`.
        members: in the same order.
        accuracy: test accuracy by client's name, percent.
        axes: names of both directions, or nothing.
    """
    size, margin = 420.0, 34.0
    low, high = points.min(axis=0), points.max(axis=0)
    middle, reach = (low + high) / 2, max(float((high - low).max()), 1e-12)  # one scale for both: distances are kept
    radius = float(np.clip(90 / math.sqrt(len(members)), 2.5, 10))
    values = [accuracy[member.name] for member in members if member.name in accuracy]
    scale = (min(values), max(values)) if values else (0.0, 1.0)
    places = (points - middle) / reach * (size - 2 * margin)
    marks = [tag("rect", x=1, y=1, width=size - 2, height=size - 2, rx=8, class_="ground")]
    for member, (x, y) in zip(members, places, strict=True):
        at = (size / 2 + float(x), size / 2 - float(y))
        note = tag("title", f"{member.name}{_told(member, accuracy)}")
        marks.append(tag("g", note, *_point(member, at, radius, accuracy.get(member.name), scale, len(members))))
        if len(members) <= NAMED:
            end = at[0] > size / 2
            style = f"tick {'end' if end else ''}"
            beside = at[0] + (-1 if end else 1) * (radius + 5)
            marks.append(tag("text", short(member.name, 14), x=beside, y=at[1] + 4.5, class_=style))
    for text, (x, y, style) in zip(axes, ((size - 10, size - 12, "end"), (12, 22, "")), strict=False):
        marks.append(tag("text", text, x=x, y=y, class_=f"label {style}"))
    said = f"{len(members)} clients; those whose embeddings are alike lie close together"
    return picture(name, title, said, (size, size), marks)


def _told(member: Member, accuracy: Mapping[str, float]) -> str:
    parts = [f"{accuracy[member.name]:.1f} %"] if member.name in accuracy else []
    common = sorted(enumerate(member.shares), key=lambda pair: -pair[1])[:3]
    parts += [f"class {label}: {100 * share:.0f} %" for label, share in common if share >= 0.01]
    return f" ({', '.join(parts)})" if parts else ""


def _point(
    member: Member, at: Point, radius: float, accuracy: float | None, scale: tuple[float, float], clients: int
) -> list[Markup]:
    x, y = at
    if not member.shares:
        style = "none" if accuracy is None else f"q{_step(accuracy, *scale)}"
        return [tag("circle", cx=x, cy=y, r=radius, class_=f"point {style}")]
    largest = max(range(len(member.shares)), key=lambda label: member.shares[label])
    if clients > PIES or member.shares[largest] > 0.995:
        return [tag("circle", cx=x, cy=y, r=radius, class_="point", fill=class_colour(largest))]
    parts, begin = [], 0.0
    for label, share in enumerate(member.shares):
        if share > 0.005:
            parts.append(tag("path", d=_slice(at, radius, begin, begin + share), fill=class_colour(label)))
        begin += share
    return [*parts, tag("circle", cx=x, cy=y, r=radius, class_="ring")]


def _slice(at: Point, radius: float, begin: float, end: float) -> str:
    (x, y), (a, b) = at, (2 * math.pi * begin, 2 * math.pi * end)
    first = f"{x + radius * math.sin(a):.1f} {y - radius * math.cos(a):.1f}"
    last = f"{x + radius * math.sin(b):.1f} {y - radius * math.cos(b):.1f}"
    return f"M{x:.1f} {y:.1f}L{first}A{radius:.1f} {radius:.1f} 0 {int(end - begin > 0.5)} 1 {last}Z"


def class_colour(label: int) -> str:
    """Return a colour for a class: neighbours differ by the golden angle, and in lightness."""
    return f"hsl({(label * 137.5 + 220) % 360:.0f} {(70, 55)[label % 2]}% {(50, 62, 42)[label % 3]}%)"


def _step(value: float, low: float, high: float) -> int:
    return min(STEPS - 1, int(STEPS * (value - low) / ((high - low) or 1)))


def matrix(names: Sequence[str], values: Points) -> Markup:
    """Return the accuracy with each client's head (rows) on each client's feature extractor (columns).

    Args:
        names: of the clients.
        values: `(clients, clients)`, percent; shaded from the least to the most of each row, as in the paper.
    """
    count = len(names)
    named = count <= 15
    margin, width = (96.0 if named else 14.0), 560.0
    cell = (width - margin - 4) / count
    marks: list[Any] = []
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            step = _step(value, row.min(), row.max()) if row.max() > row.min() else STEPS - 1
            x, y = margin + j * cell, margin + i * cell
            style = f"cell q{step}{' own' if i == j else ''}"
            note = tag("title", f"head of {names[i]}, the rest of {names[j]}: {value:.1f} %")
            box = {"x": x + 1, "y": y + 1, "width": cell - 2, "height": cell - 2}
            marks.append(tag("rect", note, **box, rx=min(4, cell / 8), class_=style))
            if named:
                ink = "on-dark" if step >= STEPS // 2 else "on-light"
                marks.append(
                    tag("text", f"{value:.0f}", x=x + cell / 2, y=y + cell / 2 + 5, class_=f"middle value {ink}")
                )
    for i, name in enumerate(names if named else ()):
        middle = margin + (i + 0.5) * cell
        marks.append(tag("text", short(name, 11), x=margin - 8, y=middle + 4.5, class_="tick end"))
        turn = f"translate({middle + 4:.1f} {margin - 8:.1f}) rotate(-45)"
        marks.append(tag("text", short(name, 11), transform=turn, class_="tick"))
    own = float(np.mean(np.diag(values)))
    others = float(values[~np.eye(count, dtype=bool)].mean()) if count > 1 else own
    said = f"On its own feature extractor a head is right on {own:.1f} percent on average, on another's on {others:.1f}"
    return picture("matrix", "Heads on other clients' feature extractors", said, (width, width), marks)
