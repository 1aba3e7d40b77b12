"""HAFL-distillation: the loss is its formula, and the student that of a plain loop."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from figures.hafl_distillation import distance, distil
from hyperbloom.client.settings import ClientSettings
from hyperbloom.common.config import LocalConfig
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Weights
from hyperbloom.common.models import ModelSpec, build, full_layout
from hyperbloom.common.tasks import CLASSIFICATION, Task, TaskSpec, make_task
from hyperbloom.common.wire.orders import EvaluateOrder, Refinement
from hyperbloom.strategies import make_algorithm
from tests.client.conftest import SHARE
from tests.client.orders import Worker, change, evaluate_order
from tests.strategies.conftest import digits_config

TEACHER = ModelSpec("mlp", "S", (1, 8, 8), 10)
STUDENT = ModelSpec("plain-4", "S", (1, 8, 8), 10)


MULTILABEL, REGRESSION, MASKS = (make_task(TaskSpec(name)) for name in ("multilabel", "regression", "segmentation"))
REFINEMENT = Refinement(3, 0.05, 8, "student")


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def order(**changes: Any) -> EvaluateOrder:
    """Return the order of strategy `hafl-distillation`, whose weights make the teacher."""
    torch.manual_seed(1)
    layout = full_layout(TEACHER)
    weights = Weights(layout, layout.flatten(dict(build(TEACHER).named_parameters())) * 5)
    return change(evaluate_order(round=3, weights=weights, refinement=REFINEMENT), **changes)


def test_the_loss_is_its_formula() -> None:
    student, teacher = [0.0, math.log(3)], [math.log(16), 0.0]
    outputs, labels = torch.tensor([student]), torch.tensor([1])
    found = CLASSIFICATION.loss(outputs, labels) + distance(CLASSIFICATION, outputs, torch.tensor([teacher]), 2.0)
    p, q = (4 / 5, 1 / 5), (1 / (1 + 3**0.5), 3**0.5 / (1 + 3**0.5))  # softmaxes at temperature 2
    divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert found.item() == pytest.approx(-math.log(3 / 4) + 4 * divergence, rel=1e-5)


@pytest.mark.parametrize(
    ("task", "shape"), [(CLASSIFICATION, (5, 3)), (MULTILABEL, (5, 3)), (REGRESSION, (5, 3)), (MASKS, (5, 3, 2, 2))]
)
def test_a_student_like_its_teacher_has_nothing_to_learn(task: Task, shape: tuple[int, ...]) -> None:
    student, teacher = noise(*shape).requires_grad_(), noise(*shape, seed=8)
    assert distance(task, teacher, teacher, 3.0).item() == pytest.approx(0.0, abs=1e-6)
    assert distance(task, student, teacher, 3.0).item() > 0.01
    optimizer = torch.optim.SGD([student], lr=0.5)
    before: Callable[[], float] = lambda: distance(task, student, teacher, 3.0).item()  # noqa: E731
    first = before()
    for _ in range(50):
        optimizer.zero_grad()
        distance(task, student, teacher, 3.0).backward()
        optimizer.step()
    assert before() < first / 2


def loop(teacher: nn.Module, data: Examples) -> nn.Module:
    """Return the student of a plain loop."""
    torch.manual_seed(7)
    student = build(STUDENT)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    generator = torch.Generator().manual_seed(7)
    for passes in range(3):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * passes / 3)) / 2
        for rows in torch.randperm(len(data), generator=generator).split(8):
            made: Tensor = student(data.inputs[rows])
            with torch.no_grad():
                p = (teacher(data.inputs[rows]) / 4).softmax(1)
            divergence = (p * (p.log() - (made / 4).log_softmax(1))).sum(1).mean()
            optimizer.zero_grad()
            (F.cross_entropy(made, data.labels[rows]) + 16 * divergence).backward()
            optimizer.step()
    return student


def test_a_client_scores_the_student_of_the_shared_network(tmp_path: Path) -> None:
    worker = Worker(ClientSettings("ward-7", SHARE, "cpu", "S", tmp_path, model="plain-4"))
    teacher = build(TEACHER)
    sent = order().weights
    assert sent is not None
    teacher.load_state_dict(sent.layout.views(sent.values))
    student = loop(teacher, worker.train_data)
    client = Mock(**{"own_spec.return_value": STUDENT})
    found = distil(client, teacher, (), worker.train_data, REFINEMENT, 7)
    for one, other in zip(found.parameters(), student.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    assert torch.equal(sent.layout.flatten(dict(teacher.named_parameters())), sent.values)
    scores = worker.answer(order())
    assert scores == worker.answer(order())
    assert scores.test.loss != pytest.approx(worker.answer(order(refinement=None)).test.loss, rel=1e-2)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_the_student_begins_at_the_rate_at_which_the_teacher_begins(schedule: str) -> None:
    """Its own annealing halves the mean, so a rate that is a mean already would be halved twice."""
    local = LocalConfig(learning_rate=0.05, schedule=schedule)  # type: ignore[arg-type]
    run = digits_config(strategy="hafl-distillation", options={"epochs": 4}, models=("plain-4",), local=local)
    assert make_algorithm(run).recipe(9).refinement == Refinement(4, 0.05, 64, "student")


def test_who_has_no_own_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(WireError, match="this client has none; join with --model"):
        Worker(ClientSettings("ward-7", SHARE, "cpu", "S", tmp_path)).answer(order())
