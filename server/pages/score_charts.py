"""Charts of what clients disclose of their scores: ROC and calibration curves, and targets against predictions."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup
from torch import Tensor

from hyperbloom.common.metrics import figure
from hyperbloom.common.tasks import GRID, REACH, TaskSpec, make_task
from hyperbloom.common.tasks.measures import regrouped
from hyperbloom.server.pages.charts import STYLES, Series, lines
from hyperbloom.server.pages.report_data import RunData
from hyperbloom.server.pages.svg import Frame, picture, tag

MOST = STYLES - 1
"""Most labels with a curve, or targets with a chart; these are the first ones. The last colour is that of chance."""


class ScoreChart(NamedTuple):
    """A chart with its title, the names of its lines, and a note."""

    title: str
    chart: Markup
    names: Sequence[str]
    note: str


def score_charts(run: RunData) -> list[ScoreChart]:
    """Return the charts that the clients' counts of the selected round allow."""
    moments, half = run.members.moments, len(run.members.moments) // 2
    task = make_task(TaskSpec(run.members.task, moments[:half], moments[half:]))
    counts, bins = task.unpacked(run.main.counts, run.members.outputs)
    if task.standardises and half:
        return list(_against(counts[:MOST, 5:], moments[:half], moments[half:]))
    return _curves(bins[:MOST]) if len(bins) else []


def _curves(bins: Tensor) -> list[ScoreChart]:
    """Return ROC and calibration curves from histograms `(L, 2, BINS)`."""
    roc, calibration, names = [], [], []
    for label, (negative, positive) in enumerate(bins):
        if not (float(negative.sum()) and float(positive.sum())):
            continue
        names.append("positive" if len(bins) == 1 else f"label {label}")
        above = [100 * each.flip(0).cumsum(0) / each.sum() for each in (negative, positive)]
        points = [(0.0, 0.0), *zip(*(each.tolist() for each in above), strict=True)]
        roc.append(Series(names[-1], points))
        held, told = (regrouped(each, 10) for each in (positive, positive + negative))
        shares = enumerate((100 * held / told).tolist())
        calibration.append(Series(names[-1], [(10.0 * tenth + 5, share) for tenth, share in shares if share == share]))
    if not roc:
        return []
    chance, ideal = (Series(name, [(0.0, 0.0), (100.0, 100.0)]) for name in ("chance", "calibrated"))
    first = lines("roc", "ROC curves", "true positives, %", [*roc, chance], True, "false positives, %")
    second = lines("calibration", "Calibration", "positive, %", [*calibration, ideal], True, "predicted probability, %")
    note = "All clients' test examples together, from the scores in bins that all of them disclosed."
    named = ("ROC", first, [*names, chance.name]), ("Calibration", second, [*names, ideal.name])
    return [ScoreChart(*each, note) for each in named]


def _against(grids: Tensor, means: Sequence[float], deviations: Sequence[float]) -> Iterator[ScoreChart]:
    """Yield for each target a chart of predictions from its cells `(T, GRID^2)`."""
    for target, (cells, mean, std) in enumerate(zip(grids.view(-1, GRID, GRID), means, deviations, strict=False)):
        low, high = mean - REACH * std, mean + REACH * std
        frame = Frame((low, low), (high, high), height=420.0)
        most, side = float(cells.max()) or 1.0, (high - low) / GRID
        marks = frame.axes("prediction", "target", whole=False)
        for row, column in cells.nonzero().tolist():
            count = float(cells[row, column])
            x, y = frame.at(low + (column + 0.5) * side, low + (row + 0.5) * side)
            tip = tag("title", f"{count:.0f} examples")
            marks.append(tag("circle", tip, cx=x, cy=y, r=1.5 + 7 * (count / most) ** 0.5, class_="dot s0"))
        marks.append(frame.line([(low, low), (high, high)], "s1 other"))
        said = "dots on the line are right; a larger dot is more examples"
        chart = picture(f"target-{target}", "Target against prediction", said, (frame.width, frame.height), marks)
        told = f"All clients' test examples, in cells of {figure(side)}. On the line predictions are right."
        which = f"Target {target} against prediction" if len(grids) > 1 else "Target against prediction"
        yield ScoreChart(which, chart, ["examples", "right"], told)
