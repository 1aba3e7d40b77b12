"""What a comparison's run folders say, as a table (Markdown, CSV) and a picture."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.storage import write_bytes
from hyperbloom.server.comparison import Cell

__all__ = ["Result", "Row", "check_matplotlib", "markdown", "plus_minus", "read_results", "rows_of", "write_table"]


@dataclass(frozen=True)
class Result:
    """A finished cell's figures, accuracy in percent on test examples at the round that validation selected.

    Attributes:
        accuracy: of each client that was evaluated.
        metrics: all that the run folder has of that round.
        mean: over clients.
        client_std: over clients (population).
        client_worst: of the worst client.
        bytes_down: sent to a client for the training of one round.
        bytes_up: received from it.
        seconds: of all rounds and evaluations.
        curve: mean over clients by round.
    """

    accuracy: Mapping[str, float]
    metrics: Mapping[str, float]
    mean: float
    client_std: float
    client_worst: float
    bytes_down: float
    bytes_up: float
    seconds: float
    curve: Mapping[int, float]


@dataclass(frozen=True)
class Row:
    """A strategy over its seeds: means, but for `deviation`, the sample's, None with one seed."""

    name: str
    seeds: int
    mean: float
    deviation: float | None
    client_std: float
    client_worst: float
    bytes_down: float
    bytes_up: float
    seconds: float
    curves: tuple[Mapping[int, float], ...]


# ---------------------------------------------------------------------- reading


def read_results(cells: Sequence[Cell]) -> dict[str, list[tuple[Cell, Result]]]:
    """Return what the finished cells brought, by row.

    Raises:
        ConfigError: a file of a finished cell is missing or damaged.
    """
    results: dict[str, list[tuple[Cell, Result]]] = {}
    for cell in cells:
        if cell.finished:
            results.setdefault(cell.name, []).append((cell, _read(cell)))
    return results


def _read(cell: Cell) -> Result:
    try:
        summary = json.loads((cell.folder / "summary.json").read_text())[cell.config.strategy]
        lines = [json.loads(line) for line in (cell.folder / "metrics.jsonl").read_text().splitlines()]
        metrics, clients = summary["metrics"], sum(line["clients"] for line in lines)
        return Result(
            accuracy=summary["test_accuracy"],
            metrics=metrics,
            mean=metrics["test_mean"],
            client_std=metrics["test_std"],
            client_worst=metrics["test_worst"],
            bytes_down=sum(line["bytes_down"] for line in lines) / max(1, clients),
            bytes_up=sum(line["bytes_up"] for line in lines) / max(1, clients),
            # In asynchronous mode an evaluation is a second line of its round, and runs beside the next ones.
            seconds=sum({line["round"]: line["seconds"] for line in reversed(lines)}.values()),
            curve={line["round"]: line["test_mean"] for line in lines if "test_mean" in line},
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{cell.folder}: damaged ({error!r}); remove it, and it will be run again") from None


def rows_of(results: Mapping[str, Sequence[tuple[Cell, Result]]]) -> list[Row]:
    """Return a row per strategy, as they were asked for."""
    return [_row(name, [result for _, result in found]) for name, found in results.items()]


def _row(name: str, found: Sequence[Result]) -> Row:
    means = [result.mean for result in found]
    return Row(
        name,
        len(found),
        fmean(means),
        stdev(means) if len(means) > 1 else None,
        fmean(result.client_std for result in found),
        fmean(result.client_worst for result in found),
        fmean(result.bytes_down for result in found),
        fmean(result.bytes_up for result in found),
        fmean(result.seconds for result in found),
        tuple(result.curve for result in found),
    )


# ---------------------------------------------------------------------- writing

_HEADER = ("strategy", "seeds", "accuracy", "std of clients", "worst client", "down", "up", "seconds")
_BELOW = (
    "Accuracy: test, percent, mean over clients, at the round that validation selected; +- is the sample's deviation "
    "over\nseeds. Down and up: what a client is sent and sends in a round of training. Seconds: a run's rounds, here."
)


def write_table(out: Path, cells: Sequence[Cell], picture: bool) -> str:
    """Write comparison.md, comparison.csv and curves.csv, and comparison.png if asked for; returns the Markdown.

    Raises:
        ConfigError: a file of a finished cell is missing or damaged.
    """
    results = read_results(cells)
    rows = rows_of(results)
    text = f"{markdown(_HEADER, [_cells(row) for row in rows])}\n\n{_BELOW}\n"
    text += "".join(f"{line}\n" for line in _remarks(cells, results))
    write_bytes(out / "comparison.md", text.encode())
    fields = [name for name in Row.__dataclass_fields__ if name != "curves"]
    write_bytes(out / "comparison.csv", _csv(fields, [[getattr(row, name) for name in fields] for row in rows]))
    curves = [
        (name, cell.config.seed, number, accuracy)
        for name, found in results.items()
        for cell, result in found
        for number, accuracy in result.curve.items()
    ]
    write_bytes(out / "curves.csv", _csv(("strategy", "seed", "round", "test_mean"), curves))
    if picture and rows:
        write_bytes(out / "comparison.png", _draw(rows))
    return text


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table that can be read as it is: the first column to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)))
        return f"| {' | '.join((first, *others))} |"

    rule = "|".join(("-" * (widths[0] + 2), *(f"{'-' * (width + 1)}:" for width in widths[1:])))
    return "\n".join((line(header), f"|{rule}|", *(line(row) for row in rows)))


def plus_minus(mean: float, deviation: float | None) -> str:
    """Return a mean with its deviation, if there is one."""
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} +- {deviation:.2f}"


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        str(row.seeds),
        plus_minus(row.mean, row.deviation),
        f"{row.client_std:.2f}",
        f"{row.client_worst:.2f}",
        _bytes(row.bytes_down),
        _bytes(row.bytes_up),
        f"{row.seconds:.1f}",
    ]


def _bytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _remarks(cells: Sequence[Cell], results: Mapping[str, Sequence[tuple[Cell, Result]]]) -> list[str]:
    """Say what a reader must know of single cells."""
    lines = [f"{cell.folder.name}: not finished" for cell in cells if not cell.finished]
    for cell, result in (pair for found in results.values() for pair in found):
        if len(result.accuracy) < cell.config.clients:
            lines.append(f"{cell.folder.name}: {len(result.accuracy)} of {cell.config.clients} clients were evaluated")
    return lines


def _csv(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue().encode()


def check_matplotlib() -> None:
    """Raise a ConfigError if there is nothing to draw with."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "expected matplotlib for the picture, which is not installed; install the extra `plots`: "
            "pip install 'hyperbloom[plots]', or '.[plots]' from the sources, or do without: --no-picture"
        )


def _draw(rows: Sequence[Row]) -> bytes:
    """Return a PNG: accuracy over rounds, accuracy with the worst client, bytes per client and round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = max(3.6, 0.35 * len(rows) + 1.2)
    figure, (curves, accuracy, traffic) = pyplot.subplots(
        1, 3, figsize=(13, height), layout="constrained", width_ratios=(1.5, 1, 1)
    )
    colours = [f"C{index % 10}" for index in range(len(rows))]
    for index, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        numbers = [number for number in row.curves[0] if all(number in curve for curve in row.curves)]
        each = [[curve[number] for curve in row.curves] for number in numbers]
        curves.plot(
            numbers, [fmean(values) for values in each], "-" if index < 10 else "--", color=colour, label=row.name
        )
        curves.fill_between(numbers, [min(v) for v in each], [max(v) for v in each], color=colour, alpha=0.15, lw=0)
        place = len(rows) - 1 - index
        accuracy.barh(place, row.mean, xerr=row.deviation or 0, color=colour, alpha=0.75, height=0.6)
        accuracy.plot(row.client_worst, place, "k|", markersize=10, markeredgewidth=2)
        traffic.barh(place + 0.18, row.bytes_down / 1e3, color=colour, alpha=0.9, height=0.34)
        traffic.barh(place - 0.18, row.bytes_up / 1e3, color=colour, alpha=0.4, height=0.34)
    curves.set(xlabel="rounds", ylabel="test accuracy, mean over clients, percent", title="mean and range over seeds")
    curves.xaxis.get_major_locator().set_params(integer=True)
    curves.grid(alpha=0.3)
    curves.legend(fontsize=8)
    accuracy.set(xlabel="percent", xlim=(0, 100), title="at the selected round; | worst client")
    traffic.set(xlabel="kB", title="a client's round: dark down, light up")
    for axis in (accuracy, traffic):
        axis.set_yticks(range(len(rows)), [row.name for row in reversed(rows)])
        axis.grid(axis="x", alpha=0.3)
    content = io.BytesIO()
    figure.savefig(content, dpi=110)
    pyplot.close(figure)
    return content.getvalue()
