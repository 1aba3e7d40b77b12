"""Refinement is plain SGD on the client's examples, and costs nothing if it diverges."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.refinement import distil
from hyperbloom.client.work.scoring import settle_norms
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import WireError
from hyperbloom.common.models import ModelSpec, build, build_own, full_layout
from hyperbloom.common.seeds import derive
from hyperbloom.common.tasks import CLASSIFICATION
from hyperbloom.common.wire.orders import EvaluateOrder, Refinement
from hyperbloom.common.wire.weights import Weights

from ...scores import count_right
from ..conftest import SHARE
from ..orders import Worker, change, evaluate_order
from .own import GRAPH, SPEC, hypernetwork, to_evaluate


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    """Return a client with a model of its own."""
    return Worker(ClientSettings("ward-7", SHARE, "cpu", "S", tmp_path / "ward-7", model="plain-4"))


@pytest.fixture
def disclosing(worker: Worker) -> Worker:
    """Return one whose server may know the graph."""
    return Worker(dataclasses.replace(worker.settings, disclose="graph"))


def test_refinement_is_sgd_on_the_head_alone(worker: Worker) -> None:
    scores = worker.answer(to_evaluate(epochs=3, rate=0.5, batch=16))
    target = build_own(SPEC)
    target.load_state_dict({**target.state_dict(), **GRAPH.layout.views(hypernetwork()(GRAPH).detach())})
    data = worker.train_data
    settle_norms(target, data)
    target.eval()
    optimizer = torch.optim.SGD(target.head.parameters(), lr=0.5)  # type: ignore[union-attr, arg-type]
    generator = torch.Generator().manual_seed(derive(5, "ward-7", 2, "refine"))
    for _ in range(3):
        for rows in torch.randperm(len(data), generator=generator).split(16):
            optimizer.zero_grad()
            F.cross_entropy(target(data.inputs[rows]), data.labels[rows]).backward()
            optimizer.step()
    logits = target(worker.test_data.inputs)
    assert scores.test.loss == pytest.approx(F.cross_entropy(logits, worker.test_data.labels).item(), rel=1e-4)
    assert count_right(scores.test) == int((logits.argmax(1) == worker.test_data.labels).sum())
    assert scores.test.loss != pytest.approx(worker.answer(to_evaluate()).test.loss, rel=1e-2)


@pytest.mark.parametrize("generated", [True, False])
def test_refinement_of_all_weights_is_sgd_and_settles_the_norms_anew(disclosing: Worker, generated: bool) -> None:
    weights = hypernetwork()(GRAPH).detach()
    changes = {} if generated else {"hypernetwork": None, "weights": Weights(GRAPH.layout, weights)}
    order = to_evaluate(epochs=2, rate=0.3, batch=16, part="all", **changes)
    scores = disclosing.answer(order)
    target, data = build_own(SPEC), disclosing.train_data
    target.load_state_dict({**target.state_dict(), **GRAPH.layout.views(weights)})
    settle_norms(target, data)
    target.eval()
    optimizer = torch.optim.SGD(target.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(derive(5, "ward-7", 2, "refine"))
    for _ in range(2):
        for rows in torch.randperm(len(data), generator=generator).split(16):
            optimizer.zero_grad()
            F.cross_entropy(target(data.inputs[rows]), data.labels[rows]).backward()
            optimizer.step()
    stale = F.cross_entropy(target(disclosing.test_data.inputs), disclosing.test_data.labels).item()
    settle_norms(target, data)
    target.eval()
    loss = F.cross_entropy(target(disclosing.test_data.inputs), disclosing.test_data.labels).item()
    assert scores.test.loss == pytest.approx(loss, rel=1e-4)
    assert scores.test.loss != pytest.approx(stale, rel=1e-3)


def test_a_refinement_of_all_weights_that_diverges_costs_nothing(worker: Worker) -> None:
    order = to_evaluate(epochs=5, rate=1e38, batch=8, part="all")
    assert worker.answer(order) == worker.answer(to_evaluate())


def test_a_refinement_that_diverges_costs_nothing(worker: Worker) -> None:
    order = to_evaluate(epochs=5, rate=1e38, batch=8)
    assert worker.answer(order) == worker.answer(to_evaluate())


# ---------------------------------------------------------------------- distillation


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
