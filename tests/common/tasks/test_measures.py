"""Every metric against scikit-learn, for one client and for several whose counts are summed."""

import numpy as np
import pytest
import sklearn.metrics as reference
import torch
from torch import Tensor

from hyperbloom.common.tasks import TASKS, Task, TaskSpec, make_task
from hyperbloom.common.tasks.measures import BINS, EDGES, MIDDLES, regrouped

CLOSE = {"abs": 1e-6}


def task(name: str, **more: tuple[float, ...]) -> Task:
    return make_task(TaskSpec(name, **more))


def values(of: Task, outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return all metrics of a network's outputs."""
    return dict(of.measure(of.answers(outputs), labels, outputs.shape[1], list(of.metrics)).values)


def summed(of: Task, outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the metrics of three unequal clients' added counts."""
    parts = zip(outputs.split([7, 50, len(outputs) - 57]), labels.split([7, 50, len(labels) - 57]), strict=True)
    names, width = list(of.metrics), outputs.shape[1]
    each = [of.measure(of.answers(some), truth, width, names).counts for some, truth in parts]
    assert {len(counts) for counts in each} == {of.length(width, names)}
    return of.pooled([sum(column) for column in zip(*each, strict=True)], width, names)


@pytest.mark.parametrize("name", list(TASKS))
def test_counts_are_bounded_by_the_examples_that_they_are_of(name: str) -> None:
    of, outputs = task(name), noise(6, 3, 2, 2) if name == "segmentation" else noise(6, 3)
    labels = {
        "classification": torch.tensor([0, 1, 2, 0, 1, 1]),
        "multilabel": torch.tensor([[1.0, 0.0, torch.nan], [0.0, 1.0, 1.0]] * 3),
        "regression": -5 + noise(6, 3),  # whose sums are negative
        "segmentation": torch.ones(6, 2, 2, dtype=torch.int64),
    }[name]
    counts = list(of.measure(of.answers(outputs), labels, 3, list(of.metrics)).counts)

    pixels = 4 if name == "segmentation" else 1

    def sound(total: int = 6, **changes: float) -> bool:
        changed = [changes.get(f"at_{place}", value) for place, value in enumerate(counts)]
        return of.are_counts(*of.unpacked(changed, 3), pixels * total)

    assert sound()
    assert not sound(at_0=-1.0)
    assert not sound(**{f"at_{len(counts) - 1}": -1.0})
    assert not sound(total=5) and not sound(at_0=1e12)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def in_bins(probabilities: Tensor) -> Tensor:
    """Return probabilities in the middle of their bins, of which nothing is lost in a histogram."""
    return MIDDLES[torch.bucketize(probabilities, EDGES, right=True)]


def test_classification_with_an_absent_class() -> None:
    outputs, labels = 2 * noise(300, 5).double(), torch.arange(300) % 4  # class 4 is predicted, and never true
    found, answers = values(task("classification"), outputs, labels), outputs.argmax(1)
    with pytest.warns(UserWarning, match="not in y_true"):
        balanced = reference.balanced_accuracy_score(labels, answers)
    expected = {
        "accuracy": reference.accuracy_score(labels, answers),
        "balanced-accuracy": balanced,
        "macro-f1": reference.f1_score(labels, answers, average="macro"),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, **CLOSE)
    together = summed(task("classification"), outputs, labels)
    assert {name: together[name] for name in expected} == pytest.approx(expected, **CLOSE)
    scores, seen = outputs.softmax(1)[:, :4], torch.nn.functional.one_hot(labels, 4)
    assert found["auroc"] == pytest.approx(reference.roc_auc_score(seen, scores, average="macro"), **CLOSE)
    precision = reference.average_precision_score(seen, scores, average="macro")
    assert found["average-precision"] == pytest.approx(precision, **CLOSE)
    assert "auroc/4" not in found and "auroc/3" in found


def test_two_classes_are_scored_by_the_second() -> None:
    outputs, labels = noise(300, 2).double(), (noise(300) > 0.5).long()
    found, score = values(task("classification"), outputs, labels), outputs.softmax(1)[:, 1]
    assert found["auroc"] == pytest.approx(reference.roc_auc_score(labels, score), **CLOSE)
    assert found["average-precision"] == pytest.approx(reference.average_precision_score(labels, score), **CLOSE)
    edges = (score * 15).floor()
    error = sum(
        abs(float(labels[edges == at].double().mean() - score[edges == at].mean())) * int((edges == at).sum())
        for at in set(edges.tolist())
    )
    assert found["calibration-error"] == pytest.approx(error / 300, abs=1e-6)


def test_labels_that_are_not_known_are_left_out_label_by_label() -> None:
    outputs, labels = noise(300, 3), (noise(300, 3).flip(0) > 0.3).float()
    labels[::3, 0], labels[:, 2] = torch.nan, 1.0  # nothing is known of every third; the last is always there
    found, scores = values(task("multilabel"), outputs, labels), outputs.double().sigmoid().numpy()
    known = ~labels.isnan().numpy()
    each = [reference.roc_auc_score(labels[known[:, at], at], scores[known[:, at], at]) for at in (0, 1)]
    assert [found["auroc/0"], found["auroc/1"]] == pytest.approx(each, **CLOSE)
    assert found["auroc"] == pytest.approx(np.mean(each), **CLOSE)
    assert "auroc/2" not in found
    for name, score in (("accuracy", reference.accuracy_score), ("macro-f1", reference.f1_score)):
        of = [score(labels[known[:, at], at], scores[known[:, at], at] >= 0.5) for at in range(3)]
        assert found[name] == pytest.approx(np.mean(of), **CLOSE)
        assert summed(task("multilabel"), outputs, labels)[name] == pytest.approx(np.mean(of), **CLOSE)


def test_binned_scores_of_several_clients_give_the_figures_of_all_their_examples() -> None:
    probabilities, labels = in_bins(noise(400, 2).double().sigmoid()), (noise(400, 2).flip(0) > 0).float()
    found = summed(task("multilabel"), probabilities.logit(), labels)
    truth, scores = labels.numpy(), probabilities.numpy()
    assert found["auroc"] == pytest.approx(reference.roc_auc_score(truth, scores), **CLOSE)
    assert found["average-precision"] == pytest.approx(reference.average_precision_score(truth, scores), **CLOSE)
    each = values(task("multilabel"), probabilities.logit(), labels)
    assert found["calibration-error"] == pytest.approx(each["calibration-error"], **CLOSE)
    assert 0.05 < found["calibration-error"] < 0.5


def test_a_confident_network_loses_little_in_bins() -> None:
    """Many of its scores are nearer to 0 or 1 than 1/150, and the order among them counts."""
    labels = (noise(4000, 1).flip(0) > 0).float()
    outputs = 5 * (noise(4000, 1) + labels - 0.5)
    scores = outputs.double().sigmoid()
    assert float(((scores < 1 / 150) | (scores > 149 / 150)).double().mean()) > 0.3
    found, exact = summed(task("multilabel"), outputs, labels), reference.roc_auc_score(labels, scores)
    assert found["auroc"] == pytest.approx(exact, abs=1e-3)
    assert found["average-precision"] == pytest.approx(reference.average_precision_score(labels, scores), abs=5e-3)


def test_bins_are_those_of_one_width_with_finer_ends() -> None:
    assert BINS == 182 and bool((EDGES.diff() > 0).all()) and EDGES[0] > 0 and EDGES[-1] < 1
    assert regrouped(torch.ones(BINS, dtype=torch.float64), 15).tolist() == [26.0, *[10.0] * 13, 26.0]
    assert regrouped(torch.ones(BINS, dtype=torch.float64), 150).tolist() == [17.0, *[1.0] * 148, 17.0]


def test_one_class_alone_has_no_curve() -> None:
    found = values(task("classification"), noise(20, 2), torch.ones(20, dtype=torch.int64))
    assert {"auroc", "average-precision", "calibration-error"}.isdisjoint(found) and "accuracy" in found


@pytest.mark.parametrize("targets", [1, 3])
def test_numbers(targets: int) -> None:
    of = task("regression", mean=(100.0,) * targets, std=(20.0,) * targets)
    outputs = noise(200, targets)
    labels = 90 + 15 * outputs + noise(200, targets).flip(0)
    truth, guess = labels.double().numpy(), of.answers(outputs).double().numpy()
    expected = {
        "mae": reference.mean_absolute_error(truth, guess),
        "rmse": reference.root_mean_squared_error(truth, guess),
        "r2": reference.r2_score(truth, guess),
    }
    for found in (values(of, outputs, labels), summed(of, outputs, labels)):
        assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6, rel=1e-6)
    constant = values(of, outputs[:5], torch.full((5, targets), 3.0))
    assert "r2" not in constant and "mae" in constant


def test_masks() -> None:
    outputs, labels = noise(80, 4, 6, 6), torch.randint(3, (80, 6, 6), generator=torch.Generator().manual_seed(1))
    outputs[:, :3].scatter_add_(1, labels.unsqueeze(1), torch.ones(80, 1, 6, 6))
    truth, guess = labels.flatten(), outputs.argmax(1).flatten()
    expected = {
        "dice": reference.f1_score(truth, guess, labels=[1, 2, 3], average="macro"),
        "iou": reference.jaccard_score(truth, guess, labels=[1, 2, 3], average="macro"),
        "accuracy": reference.accuracy_score(truth, guess),
    }
    each = reference.f1_score(truth, guess, labels=[1, 2], average=None)
    expected |= {f"dice/{number}": value for number, value in enumerate(each, 1)}
    for found in (values(task("segmentation"), outputs, labels), summed(task("segmentation"), outputs, labels)):
        assert {name: found[name] for name in expected} == pytest.approx(expected, **CLOSE)
        assert "dice/0" not in found


def test_an_area_is_at_most_one_however_it_is_rounded() -> None:
    generator = torch.Generator().manual_seed(10)
    labels = (torch.rand(97, 1, generator=generator) > 0.3).float()
    for seed in range(60):
        generator.manual_seed(seed)
        scores = torch.rand(97, 1, generator=generator, dtype=torch.float64) * 0.4 + 0.5 * labels
        assert values(task("multilabel"), scores.logit(), labels)["auroc"] == 1.0
