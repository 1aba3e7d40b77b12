"""Summaries of a comparison's run folders: a table (Markdown, JSON), and a page with the curves."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from markupsafe import Markup

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.files.storage import write_bytes, write_json
from hyperbloom.common.metrics import Scale, axis_of, scale_of, title_of
from hyperbloom.server.compare.comparison import Cell
from hyperbloom.server.pages.charts import Series, lines
from hyperbloom.server.pages.page import render
from hyperbloom.server.runs.course import Course, read_course
from hyperbloom.server.runs.recorded import read_summary
from hyperbloom.server.watch.board import amount

PAGE = "comparison.html"
BELOW = (
    "{metric}: test{unit}, mean over clients, at the round that validation selected; +- is the sample's deviation "
    "over\nseeds. Down and up: what a client is sent and sends in a round of training. Seconds: a run's rounds, here."
)

Results = Mapping[str, Sequence[tuple[Cell, Course]]]


def read_results(cells: Sequence[Cell]) -> dict[str, list[tuple[Cell, Course]]]:
    """Return the results of the finished cells, by row; ConfigError if a file of one is missing or damaged."""
    results: dict[str, list[tuple[Cell, Course]]] = {}
    for cell in cells:
        if cell.finished:
            results.setdefault(cell.name, []).append((cell, _read(cell)))
    return results


def _read(cell: Cell) -> Course:
    name = cell.config.strategy
    try:
        course = read_course(name, cell.folder, read_summary(cell.folder)[name])
        if not course.is_over(cell.config):
            raise ValueError(f"metrics.jsonl has {len(course.rounds)} of {cell.config.rounds} rounds")
        return course
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{cell.folder}: damaged ({error!r}); remove it, and it will be run again") from None


def write_table(out: Path, cells: Sequence[Cell]) -> str:
    """Write comparison.md, .json and .html, and curves.csv; return the Markdown. Errors as in `read_results`."""
    results = read_results(cells)
    rows = [_row(name, [course for _, course in found]) for name, found in results.items()]
    remarks = _remarks(cells, results)
    name = next((course.metric for found in results.values() for _, course in found), "accuracy")
    metric, scale = title_of(name), scale_of(name)
    header = ("strategy", "seeds", metric, "std of clients", "worst client", "down", "up", "seconds")
    below = BELOW.format(metric=metric[0].upper() + metric[1:], unit=", percent" if scale.percent else "")
    text = "\n".join([markdown(header, [_shown(row, scale) for row in rows]), "", below, *remarks, ""])
    write_bytes(out / "comparison.md", text.encode())
    write_json(out / "comparison.json", json.loads(json.dumps(rows), parse_constant=lambda _: None))  # JSON has no NaN
    curves = io.StringIO()
    lines_of = csv.writer(curves, lineterminator="\n")
    lines_of.writerow(("strategy", "seed", "round", "test_mean"))
    each = ((strategy, *pair) for strategy, found in results.items() for pair in found)
    lines_of.writerows((who, one.config.seed, *point) for who, one, course in each for point in course.curve.items())
    write_bytes(out / "curves.csv", curves.getvalue().encode())
    page = render(
        "comparison.html",
        folder=out.resolve().name,
        rows=rows,
        most=max((max(row["bytes_down"], row["bytes_up"]) for row in rows), default=0) or 1,
        curve=_curves(results, name),
        metric=metric,
        scale=scale,
        largest=scale.longest(row[of] for row in rows for of in ("mean", "client_worst")),
        remarks=remarks,
        shared=(out / "comparison.yaml").read_text(),
    )
    write_bytes(out / PAGE, page)
    return text


def _row(name: str, courses: Sequence[Course]) -> dict[str, Any]:
    """Return a strategy's row: means over seeds, and the sample standard deviation (None with one seed)."""
    mean, deviation = mean_and_deviation([course.metrics["test_mean"] for course in courses])
    return {
        "name": name,
        "seeds": len(courses),
        "mean": mean,
        "deviation": deviation,
        "client_std": fmean(course.metrics["test_std"] for course in courses),
        "client_worst": fmean(course.metrics["test_worst"] for course in courses),
        "bytes_down": fmean(course.bytes_each("down") for course in courses),
        "bytes_up": fmean(course.bytes_each("up") for course in courses),
        "seconds": fmean(course.seconds for course in courses),
    }


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of some numbers and their sample standard deviation (None for a single one)."""
    return fmean(values), float(np.std(values, ddof=1)) if len(values) > 1 else None  # stdev refuses NaN


def plus_minus(mean: float, deviation: float | None, scale: Scale = scale_of("accuracy")) -> str:  # noqa: B008 - frozen
    """Return a mean as text, with its deviation if there is one; percent has two decimals."""
    return " +- ".join(scale.cell(value, 2) for value in (mean, deviation) if value is not None)


def _shown(row: Mapping[str, Any], scale: Scale) -> list[str]:
    accuracy = plus_minus(row["mean"], row["deviation"], scale)
    spread = [plus_minus(row[key], None, scale) for key in ("client_std", "client_worst")]
    traffic = [amount(row["bytes_down"]), amount(row["bytes_up"])]
    return [row["name"], str(row["seeds"]), accuracy, *spread, *traffic, f"{row['seconds']:.1f}"]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table aligned for reading as text: first column left, the others right."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)))
        return f"| {' | '.join((first, *others))} |"

    rule = "|".join(("-" * (widths[0] + 2), *(f"{'-' * (width + 1)}:" for width in widths[1:])))
    return "\n".join((line(header), f"|{rule}|", *(line(row) for row in rows)))


def _remarks(cells: Sequence[Cell], results: Results) -> list[str]:
    """Return remarks on cells that are unfinished or lack clients."""
    remarks = [f"{cell.folder.name}: not finished" for cell in cells if not cell.finished]
    for cell, course in (pair for found in results.values() for pair in found):
        scored, clients = len(course.accuracy), cell.config.clients
        novel = sum(map(cell.config.is_novel, range(clients)))
        if scored < clients - (0 if "novel_test_mean" in course.metrics else novel):
            remarks.append(f"{cell.folder.name}: {scored} of {clients} clients were evaluated")
    return remarks


def _curves(results: Results, metric: str) -> Markup:
    """Return the chart of each strategy's metric by round: the mean over seeds, with a band from least to most."""
    series = []
    for name, found in results.items():
        curves = [course.curve for _, course in found]
        each = {n: [curve[n] for curve in curves] for n in curves[0] if all(n in curve for curve in curves)}
        low, high = ([(n, pick(values)) for n, values in each.items()] for pick in (min, max))
        bands = [(low, high)] if len(curves) > 1 else []
        series.append(Series(name, [(n, fmean(values)) for n, values in each.items()], bands))
    return lines("curve", f"Test {title_of(metric)} over rounds", axis_of(metric), series, scale_of(metric).percent)
