"""Refinement is plain SGD on the client's examples, and costs nothing if it diverges."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.refinement import refine
from hyperbloom.client.work.scoring import settle_norms
from hyperbloom.common.data import Examples
from hyperbloom.common.layout import Weights
from hyperbloom.common.models import build_own
from hyperbloom.common.seeds import derive
from hyperbloom.common.tasks import TaskSpec, make_task
from hyperbloom.common.wire.orders import Refinement

from ...scores import count_right
from ..conftest import SHARE
from ..orders import Worker
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


def test_a_refinement_is_judged_by_the_loss_that_it_makes_smaller() -> None:
    """With balanced weights the plain loss may grow meanwhile: few examples of a class count as much as many."""
    generator, labels = torch.Generator().manual_seed(0), torch.tensor([0] * 57 + [1] * 3)
    data = Examples(torch.randn(60, 4, generator=generator), labels).under(
        make_task(TaskSpec("classification", balanced=True))
    )
    module = nn.Linear(4, 2)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.copy_(torch.tensor([3.0, 0.0]))  # near the shares of the classes
    before = {name: value.clone() for name, value in module.state_dict().items()}
    after = refine(module, ("bias",), data, Refinement(5, 0.5, 60, "all"), 0)
    plain, weighted = (F.cross_entropy(after(data.inputs), labels), data.loss(after(data.inputs), torch.arange(60)))
    sent = functional_call(module, before, (data.inputs,))
    assert weighted < data.loss(sent, torch.arange(60)) and plain > F.cross_entropy(sent, labels)
