"""Distillation against its formula and a plain loop; what it leaves alone."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.distillation import distil
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import WireError
from hyperbloom.common.models import ModelSpec, build, full_layout
from hyperbloom.common.seeds import derive
from hyperbloom.common.tasks import CLASSIFICATION
from hyperbloom.common.wire.orders import EvaluateOrder, Refinement
from hyperbloom.common.wire.weights import Weights

from ..conftest import SHARE
from ..orders import Worker, change, evaluate_order

TEACHER = ModelSpec("mlp", "S", (1, 8, 8), 10)
STUDENT = ModelSpec("plain-4", "S", (1, 8, 8), 10)


REFINEMENT = Refinement(3, 0.05, 8, distil_temperature=2.0)


def order(**changes: Any) -> EvaluateOrder:
    """Return the order of strategy `hafl-distillation`, whose weights make the teacher."""
    torch.manual_seed(1)
    layout = full_layout(TEACHER)
    weights = Weights(layout, layout.flatten(dict(build(TEACHER).named_parameters())) * 5)
    return change(evaluate_order(round=3, weights=weights, refinement=REFINEMENT), **changes)


def test_the_loss_is_its_formula() -> None:
    student, teacher = [0.0, math.log(3)], [math.log(16), 0.0]
    outputs, labels = torch.tensor([student]), torch.tensor([1])
    found = CLASSIFICATION.loss(outputs, labels) + CLASSIFICATION.distil(outputs, torch.tensor([teacher]), 2.0)
    p, q = (4 / 5, 1 / 5), (1 / (1 + 3**0.5), 3**0.5 / (1 + 3**0.5))  # softmaxes at temperature 2
    divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert found.item() == pytest.approx(-math.log(3 / 4) + 4 * divergence, rel=1e-5)


def loop(teacher: nn.Module, data: Examples) -> nn.Module:
    """Return the student of a plain loop."""
    seed = derive(5, "ward-7", "distil")
    torch.manual_seed(seed)
    student = build(STUDENT)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        for rows in torch.randperm(len(data), generator=generator).split(8):
            made: Tensor = student(data.inputs[rows])
            with torch.no_grad():
                p = (teacher(data.inputs[rows]) / 2).softmax(1)
            divergence = (p * (p.log() - (made / 2).log_softmax(1))).sum(1).mean()
            optimizer.zero_grad()
            (F.cross_entropy(made, data.labels[rows]) + 4 * divergence).backward()
            optimizer.step()
    return student


def test_a_client_scores_the_student_of_the_shared_network(tmp_path: Path) -> None:
    worker = Worker(ClientSettings("ward-7", SHARE, "cpu", "S", tmp_path, model="plain-4"))
    teacher = build(TEACHER)
    sent = order().weights
    assert sent is not None
    teacher.load_state_dict(sent.layout.views(sent.values))
    student = loop(teacher, worker.train_data)
    found = distil(teacher, STUDENT, worker.train_data, REFINEMENT, derive(5, "ward-7", "distil"))
    for one, other in zip(found.parameters(), student.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    assert torch.equal(sent.layout.flatten(dict(teacher.named_parameters())), sent.values)
    scores = worker.answer(order())
    assert scores == worker.answer(order())
    assert scores.test.loss != pytest.approx(worker.answer(order(refinement=None)).test.loss, rel=1e-2)


@pytest.mark.parametrize(
    "changes",
    [{"epochs": 0}, {"epochs": 10_001}, {"rate": 0.0}, {"batch": 0}, {"distil_temperature": 0.0}],
)
def test_impossible_orders_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    worker = Worker(ClientSettings("ward-7", SHARE, "cpu", "S", tmp_path, model="plain-4"))
    with pytest.raises(WireError, match="order: expected 1 to 10000 epochs with a rate, batches and temperature"):
        worker.answer(order(**changes))


def test_who_has_no_own_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(WireError, match="this client has none; join with --model"):
        Worker(ClientSettings("ward-7", SHARE, "cpu", "S", tmp_path)).answer(order())
