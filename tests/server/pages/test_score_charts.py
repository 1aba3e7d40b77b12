"""Curves from the counts that clients disclose."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hyperbloom.common.tasks import TaskSpec, make_task
from hyperbloom.server.pages.charts import style_of
from hyperbloom.server.pages.report_data import RunData
from hyperbloom.server.pages.score_charts import score_charts
from hyperbloom.server.runs.recorded import Members


def run(name: str, outputs: torch.Tensor, labels: torch.Tensor, moments: tuple[float, ...] = ()) -> RunData:
    """Return a run of one client with these outputs."""
    half, width = len(moments) // 2, outputs.shape[1]
    task = make_task(TaskSpec(name, moments[:half], moments[half:]))
    counts = task.measure(task.answers(outputs), labels, width, list(task.metrics)).counts
    main = SimpleNamespace(counts=counts)
    return cast(RunData, SimpleNamespace(main=main, members=Members([], name, width, moments)))


def test_perfect_scores_are_a_corner_and_calibrated() -> None:
    labels = torch.tensor([[0.0], [1.0]] * 10)
    roc, calibration = score_charts(run("multilabel", 20 * (2 * labels - 1), labels))
    assert (roc.title, calibration.title) == ("ROC", "Calibration")
    assert roc.names == ["positive", "chance"] and calibration.names == ["positive", "calibrated"]
    assert "chance goes from 0.0 to 100.0" in roc.chart and "calibrated goes from" in calibration.chart
    assert "goes from 0.0 to 100.0" in roc.chart and "disclosed" in roc.note


def test_labels_that_are_never_seen_have_no_curve() -> None:
    labels = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    (roc, _) = score_charts(run("multilabel", torch.zeros(2, 2), labels))
    assert roc.names == ["label 1", "chance"]
    assert score_charts(run("multilabel", torch.zeros(2, 1), torch.ones(2, 1))) == []


def test_chance_has_a_colour_of_its_own() -> None:
    labels = torch.tensor([[0.0] * 13, [1.0] * 13])
    roc, _ = score_charts(run("multilabel", torch.zeros(2, 13), labels))
    assert len({style_of(index) for index, _ in enumerate(roc.names)}) == len(roc.names)


def test_targets_that_hardly_differ_have_numbers_on_both_axes() -> None:
    labels = torch.randn(50, 1, generator=torch.Generator().manual_seed(0))
    (chart,) = score_charts(run("regression", labels.clone(), labels, (0.5, 0.05)))
    assert chart.chart.count('class="tick middle"') >= 3


def test_large_targets_have_no_exponents() -> None:
    labels = torch.randn(50, 1, generator=torch.Generator().manual_seed(0))
    (chart,) = score_charts(run("regression", labels.clone(), labels, (2e6, 3.3e5)))
    assert "e+" not in chart.chart + chart.note and ">2,000,000<" in chart.chart


@pytest.mark.parametrize("targets", [1, 2])
def test_numbers_are_a_picture_for_each_target(targets: int) -> None:
    labels = torch.randn(50, targets, generator=torch.Generator().manual_seed(0))
    moments: Any = (0.0,) * targets + (1.0,) * targets
    charts = score_charts(run("regression", labels.clone(), labels, moments))
    assert len(charts) == targets
    assert all(chart.chart.count("<circle") > 5 and "examples" in chart.chart for chart in charts)
