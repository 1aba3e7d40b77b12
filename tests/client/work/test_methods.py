"""Each local method against a loop written from its paper with torch's own optimiser, and against its special cases."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from figures.fedma import Frozen
from figures.per_fedavg import Adapted
from figures.pfedme import Moreau
from hyperbloom.client.work.methods import check_method, train_by
from hyperbloom.client.work.sgd import Flat, FlatPart, Network, draw_batches, train
from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.methods import Ditto, FedProx, FedRep, HyperFL, Method
from hyperbloom.common.models import HEAD
from hyperbloom.common.models.generated import Generated
from hyperbloom.common.wire.orders import SGD

from .test_sgd import SEED, STEPS, build, network, some_examples

DATA = some_examples("mlp", 17)
HESSIAN_FREE = Adapted(alpha=0.3, variant="hessian-free", delta=1e-4)
FIRST_ORDER = Adapted(alpha=0.3, variant="first-order", delta=1e-4)


def run(method: Method | None, private: str = "none", **changes: Any) -> tuple[Flat, Flat, float]:
    """Train the small network by a method; returns what was shared, what is personal, and the loss."""
    module = build("mlp")
    if private == "copy":
        shared = FlatPart(module, Layout.of(module))
        made = Network(module, shared, Flat(shared.layout, shared.values.clone()))
    else:
        made = network(module, private)
    given = replace(STEPS, **changes)
    check_method(method, private, given.steps)
    loss = train_by(method, made, DATA, given, SEED)
    assert all(parameter.requires_grad for parameter in module.parameters())
    return made.shared, made.personal, loss


def flat(module: nn.Module, head: bool | None = None) -> Tensor:
    """Return the parameters of the head, of all else, or all."""
    named = module.named_parameters()
    return torch.cat([p.detach().flatten() for name, p in named if head in (None, name.startswith(HEAD))])


def batches(given: SGD, count: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return the batches that `count` steps draw."""
    drawn = draw_batches(len(DATA), given.batch_size, count or given.steps, SEED)
    return [(DATA.inputs[rows], DATA.labels[rows]) for rows in drawn]


def sgd(parameters: list[nn.Parameter], given: SGD) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=given.learning_rate, momentum=given.momentum, weight_decay=given.weight_decay)


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------- fedprox


@pytest.mark.parametrize("private", ["none", "head"])
def test_fedprox_without_its_term_is_sgd_to_the_bit(private: str) -> None:
    shared, personal, loss = run(FedProx(mu=0.0), private=private)
    plain, kept, expected = run(None, private=private)
    assert torch.equal(shared.values, plain.values)
    assert torch.equal(personal.values, kept.values)
    assert loss == expected


@pytest.mark.parametrize("clip", [0.5, 50.0])
def test_fedprox_is_sgd_on_the_loss_with_its_term(clip: float) -> None:
    given = replace(STEPS, clip=clip)
    module = build("mlp")
    sent = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer, losses = sgd(list(module.parameters()), given), []
    for inputs, labels in batches(given):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(inputs), labels)
        distance = sum(((p - s) ** 2).sum() for p, s in zip(module.parameters(), sent, strict=True))
        (loss + 0.35 * distance).backward()
        nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    shared, _, mean = run(FedProx(mu=0.7), clip=clip)
    assert_close(shared.values, flat(module), 1e-8)  # torch's clipping adds 1e-6 to norms of single precision
    assert mean == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert (shared.values - run(None, clip=clip)[0].values).norm() > 1e-2


# ---------------------------------------------------------------------- fedrep


def test_fedrep_trains_the_head_then_the_body() -> None:
    given = replace(STEPS, steps=10)
    module = build("mlp")
    head = [p for name, p in module.named_parameters() if name.startswith(HEAD)]
    body = [p for name, p in module.named_parameters() if not name.startswith(HEAD)]
    optimizers = [sgd(head, given)] * 7 + [sgd(body, given)] * 3
    for (inputs, labels), optimizer in zip(batches(given), optimizers, strict=True):
        module.zero_grad()
        F.cross_entropy(module(inputs), labels).backward()
        if optimizer is optimizers[-1]:
            nn.utils.clip_grad_norm_(body, given.clip)
        optimizer.step()
    shared, personal, _ = run(FedRep(head_share=0.7), private="head", steps=10)
    assert_close(shared.values, flat(module, head=False), 1e-8)
    assert_close(personal.values, flat(module, head=True), 1e-8)


@pytest.mark.parametrize(("share", "moved"), [(0.01, (1, 4)), (0.55, (3, 2)), (0.99, (4, 1))])
def test_fedrep_gives_each_part_its_share_and_at_least_a_step(
    share: float, moved: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    step = Flat.step

    def noted(part: Flat, given: SGD) -> None:
        taken.append(part.layout.numel)
        step(part, given)

    monkeypatch.setattr(Flat, "step", noted)
    shared, personal, _ = run(FedRep(head_share=share), private="head", steps=5)
    assert (taken.count(personal.layout.numel), taken.count(shared.layout.numel)) == moved


def test_fedrep_keeps_the_momentum_of_the_head_and_not_of_the_body() -> None:
    made = network(build("mlp"), "head")
    shared, personal = made.shared, made.personal
    train_by(FedRep(head_share=0.5), made, DATA, STEPS, SEED)
    assert personal.momentum is not None
    lasting = personal.momentum.clone()
    sent, kept = shared.values.clone(), personal.values.clone()
    outcomes = []
    for momentum in (lasting, None):
        personal.load(kept)
        personal.momentum = None if momentum is None else momentum.clone()
        shared.load(sent)
        train_by(FedRep(head_share=0.5), made, DATA, STEPS, SEED)
        outcomes.append(personal.values.clone())
    assert not torch.allclose(outcomes[0], outcomes[1])


# ---------------------------------------------------------------------- hyperfl


def generated() -> tuple[Generated, Network]:
    """Return a small network that writes its body, and its parts as a client has them."""
    torch.manual_seed(3)
    module = Generated(build("mlp"), HEAD, 3, 4).to(DATA.inputs.dtype)
    shapes, own = Layout.of(module).shapes, ("embedding", "network.")
    shared = FlatPart(module, Layout(tuple(each for each in shapes if not each[0].startswith(own))))
    return module, Network(module, shared, FlatPart(module, Layout(tuple(x for x in shapes if x[0].startswith(own)))))


def test_hyperfl_trains_the_head_then_embedding_and_hypernetwork() -> None:
    """A loop of the paper with explicit products, and with the optimisers and parts of the authors' code."""
    given = replace(STEPS, steps=6, clip=0.5)
    module, made = generated()
    v, w1, b1, w2, b2, head, bias = [nn.Parameter(each.detach().clone()) for each in module.parameters()]
    plain = build("mlp").to(DATA.inputs.dtype)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        body = module.layout.views(w2 @ (w1 @ v + b1).relu() + b2)
        return F.cross_entropy(
            torch.func.functional_call(plain, {**body, "head.weight": head, "head.bias": bias}, (batch[0],)), batch[1]
        )

    drawn = batches(given)
    first, second = (
        sgd([head, bias], replace(given, learning_rate=3 * given.learning_rate)),
        sgd([v, w1, b1, w2, b2], given),
    )
    for number, batch in enumerate(drawn):
        for each in (v, w1, b1, w2, b2, head, bias):
            each.grad = None
        loss(batch).backward()
        if number >= 2:
            nn.utils.clip_grad_norm_([w1, b1, w2, b2], given.clip)
        (first if number < 2 else second).step()
    method = HyperFL(head_share=1 / 3, head_rate=3)
    check_method(method, "head", given.steps)
    train_by(method, made, DATA, given, SEED)
    for found, wanted in zip(module.parameters(), (v, w1, b1, w2, b2, head, bias), strict=True):
        assert_close(found.detach(), wanted.detach(), 1e-8)  # torch's clipping adds 1e-6 to norms
    assert made.personal.momentum is None  # each round starts with fresh optimisers


# ---------------------------------------------------------------------- per-fedavg


@pytest.mark.parametrize("variant", [FIRST_ORDER, HESSIAN_FREE])
def test_per_fedavg_that_adapts_nothing_is_sgd_to_the_bit(variant: Adapted) -> None:
    method = variant.model_copy(update={"alpha": 0.0})
    shared, _, loss = run(method, steps=20)
    plain, _, expected = run(None, steps=20 // method.fewest_steps)
    assert torch.equal(shared.values, plain.values)
    assert loss == expected


@pytest.mark.parametrize("variant", [FIRST_ORDER, HESSIAN_FREE])
def test_per_fedavg_takes_the_gradient_of_the_adapted_loss(variant: Adapted) -> None:
    given, updates = replace(STEPS, steps=20, clip=50.0), 20 // variant.fewest_steps
    drawn = batches(given, updates * (2 if variant is FIRST_ORDER else 3))
    module = build("mlp")
    layout = Layout.of(module)
    w = nn.Parameter(flat(module))
    optimizer = sgd([w], given)

    def loss(values: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(module, layout.views(values), (batch[0],)), batch[1])

    for number in range(updates):
        (descent,) = torch.autograd.grad(loss(w, drawn[updates + number]), w)
        adapted = (w - 0.3 * descent).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(adapted, drawn[number]), adapted)
        if variant is HESSIAN_FREE:  # the product with the Hessian itself, by differentiating twice
            _, product = torch.autograd.functional.hvp(
                lambda values, batch=drawn[2 * updates + number]: loss(values, batch),
                w,
                gradient,
            )
            gradient = gradient - 0.3 * product
        w.grad = gradient.detach()
        optimizer.step()
    shared, _, _ = run(variant, steps=20, clip=50.0)
    # Central differences of length 1e-4 are exact up to their square, but where a ReLU switches.
    assert_close(shared.values, w.detach(), 1e-12 if variant is FIRST_ORDER else 1e-6)
    other = HESSIAN_FREE if variant is FIRST_ORDER else FIRST_ORDER
    same_updates = run(other, steps=updates * other.fewest_steps, clip=50.0)
    assert (same_updates[0].values - w).norm() > 1e-3


# ---------------------------------------------------------------------- ditto


@pytest.mark.parametrize("lamda", [0.0, 0.7])
def test_the_global_part_of_ditto_is_fedavg_to_the_bit(lamda: float) -> None:
    shared, personal, loss = run(Ditto(lamda=lamda), private="copy", clip=0.3)
    plain, _, plain_loss = run(None, clip=0.3)
    assert torch.equal(shared.values, plain.values) and loss == plain_loss
    assert not torch.equal(personal.values, shared.values)


def test_ditto_without_a_pull_trains_alone_to_the_bit() -> None:
    _, personal, _ = run(Ditto(lamda=0.0), private="copy", clip=0.3)
    _, alone, _ = run(None, private="all", clip=0.3)
    assert torch.equal(personal.values, alone.values)
    assert personal.momentum is not None and alone.momentum is not None
    assert torch.equal(personal.momentum, alone.momentum)


def test_the_personal_model_of_ditto_keeps_its_momentum_from_round_to_round() -> None:
    """Without a pull, two rounds are two of training alone, whose optimiser lasts."""
    module, alone = build("mlp"), network(build("mlp"), "all")
    shared = FlatPart(module, Layout.of(module))
    made = Network(module, shared, Flat(shared.layout, shared.values.clone()))
    for seed in (SEED, SEED + 1):
        train_by(Ditto(lamda=0.0), made, DATA, STEPS, seed)
        train(alone, DATA, STEPS, seed)
    assert torch.equal(made.personal.values, alone.personal.values)


def test_the_personal_part_of_ditto_is_its_algorithm() -> None:
    module = build("mlp")
    w = [p.detach().clone() for p in module.parameters()]
    optimizer = sgd(list(module.parameters()), STEPS)
    for inputs, labels in batches(STEPS):
        optimizer.zero_grad()
        pull = sum(((p - v) ** 2).sum() for p, v in zip(module.parameters(), w, strict=True))
        (F.cross_entropy(module(inputs), labels) + 0.7 / 2 * pull).backward()
        optimizer.step()
    _, personal, _ = run(Ditto(lamda=0.7), private="copy")
    assert_close(personal.values, flat(module), 1e-8)


# ---------------------------------------------------------------------- pfedme

MOREAU = Moreau(lamda=2.0, inner_steps=3, inner_rate=0.2)


def test_pfedme_is_its_algorithm() -> None:
    given = replace(STEPS, steps=11, clip=0.3)
    module = build("mlp")  # whose parameters are theta
    w = [nn.Parameter(p.detach().clone()) for p in module.parameters()]
    outer = sgd(w, given)
    losses = []
    for (inputs, labels), inner_steps in zip(batches(given, 4), (3, 3, 3, 2), strict=True):
        inner = torch.optim.SGD(module.parameters(), lr=0.2)
        for _ in range(inner_steps):
            inner.zero_grad()
            loss = F.cross_entropy(module(inputs), labels)
            (loss + sum(((p - v.detach()) ** 2).sum() for p, v in zip(module.parameters(), w, strict=True))).backward()
            inner.step()
            losses.append(loss.item())
        for value, parameter in zip(w, module.parameters(), strict=True):
            value.grad = 2.0 * (value.detach() - parameter.detach())
        nn.utils.clip_grad_norm_(w, 0.3)
        outer.step()
    shared, personal, mean = run(MOREAU, private="copy", steps=11, clip=0.3)
    assert_close(shared.values, torch.cat([value.detach().flatten() for value in w]), 1e-8)
    assert_close(personal.values, flat(module), 1e-8)
    assert mean == pytest.approx(sum(losses) / 11, rel=1e-6)
    assert personal.momentum is None


@pytest.mark.parametrize("inner_steps", [2, 5])
def test_pfedme_tends_to_sgd_as_lambda_grows(inner_steps: int) -> None:
    """theta = w - grad f(theta) / lambda, so that lambda (w - theta) tends to grad f(w), the error as 1 / lambda.

    A gradient step of rate 1 / lambda is an iteration of that equation; the first of each batch is from an old theta.
    """
    plain, _, _ = run(None, steps=6)
    errors = []
    for lamda in (1e3, 1e5):
        method = Moreau(lamda=lamda, inner_steps=inner_steps, inner_rate=1 / lamda)
        shared, personal, _ = run(method, private="copy", steps=6 * inner_steps)
        errors.append(float((shared.values - plain.values).norm()))
        # theta is where w was before its last step, up to 1 / lambda
        assert (personal.values - run(None, steps=5)[0].values).norm() < 100 / lamda
    assert errors[1] < errors[0] / 50 < 1e-2


# ---------------------------------------------------------------------- frozen


def test_frozen_parameters_stay_and_the_others_train_as_if_alone() -> None:
    names = ("fc1.weight", "fc1.bias")
    shared, _, loss = run(Frozen(names=names), clip=0.3)
    module = build("mlp")
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    rest = Layout(tuple(item for item in Layout.of(module).shapes if item[0] not in names))
    alone, kept = FlatPart(module, rest), FlatPart(module, Layout(()))
    expected = train(Network(module, alone, kept), DATA, replace(STEPS, clip=0.3), SEED)
    after = shared.layout.views(shared.values)
    for name in names:
        assert torch.equal(after[name], before[name])
    assert torch.equal(torch.cat([after["head.weight"].flatten(), after["head.bias"]]), alone.values)
    assert loss == expected


def test_freezing_nothing_is_sgd_to_the_bit() -> None:
    assert torch.equal(run(Frozen(names=()))[0].values, run(None)[0].values)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("method", "private", "steps", "message"),
    [
        (None, "copy", 20, "expected a method that trains the client's copy, found none"),
        (FedRep(head_share=0.5), "none", 20, "expected private in .*'head'.* for fedrep, found 'none'"),
        (MOREAU, "none", 20, "expected private in .*'copy'.* for pfedme, found 'none'"),
        (FIRST_ORDER, "head", 20, "expected private in .*'none'.* for per-fedavg, found 'head'"),
        (FedProx(mu=1.0), "all", 20, "for fedprox, found 'all'"),
        (FedRep(head_share=0.5), "head", 1, "expected at least 2 steps for fedrep, found 1"),
        (HESSIAN_FREE, "none", 3, "expected at least 4 steps for per-fedavg, found 3"),
    ],
)
def test_an_order_whose_method_does_not_fit_is_refused(
    method: Method | None, private: str, steps: int, message: str
) -> None:
    with pytest.raises(WireError, match=message):
        check_method(method, private, steps)


@pytest.mark.parametrize("names", [("fc2.weight",), ("fc1.weight", "fc1.bias", "head.weight", "head.bias")])
def test_only_some_of_the_parameters_can_be_frozen(names: tuple[str, ...]) -> None:
    with pytest.raises(WireError, match=r"expected to freeze some of fc1\.bias, .*, found"):
        run(Frozen(names=names))


def test_the_loop_draws_as_many_batches_as_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """`steps` counts gradients: a method that draws less batches uses some of them several times."""
    gradients: list[int] = []
    backward: Callable[..., Tensor] = Tensor.backward

    def noted(loss: Tensor, *arguments: Any, **named: Any) -> None:
        gradients.append(1)
        backward(loss, *arguments, **named)

    monkeypatch.setattr(Tensor, "backward", noted)
    spent = {}
    for method, private in (
        (None, "none"),
        (FedProx(mu=0.1), "none"),
        (FedRep(head_share=0.9), "head"),
        (FIRST_ORDER, "none"),
        (HESSIAN_FREE, "none"),
        (MOREAU, "copy"),
        (Frozen(names=("fc1.bias",)), "none"),
    ):
        gradients.clear()
        run(method, private=private, steps=20)
        spent[str(method)] = len(gradients)
    assert spent == dict.fromkeys(spent, 20)
