"""Local SGD is `torch.optim.SGD` with clipping of the shared part; evaluation is what one would compute by hand."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.client.work import sgd
from hyperbloom.client.work.scoring import evaluate
from hyperbloom.client.work.sgd import FlatPart, Network, backward, draw_batches, train
from hyperbloom.common import models
from hyperbloom.common.data import Examples
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import HEAD, MLP, LeNet, ModelSpec
from hyperbloom.common.wire.orders import SGD

from ...scores import count_right

STEPS = SGD(steps=20, batch_size=5, learning_rate=0.1, momentum=0.9, weight_decay=5e-3, clip=0.5)
SEED = 11
NETWORKS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {"mlp": (MLP, (6,)), "lenet": (LeNet, (1, 16, 16))}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a small network with fixed values."""
    kind, shape = NETWORKS[name]
    torch.manual_seed(3)
    return kind(shape, 4, 4).to(dtype)


def some_examples(name: str, count: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Examples:
    """Return labelled noise; float64 inputs get past the check for float32 on purpose."""
    generator = torch.Generator().manual_seed(4)
    inputs = 3 * torch.randn(count, *NETWORKS[name][1], generator=generator)
    labels = torch.randint(4, (count,), generator=generator)
    data = Examples(inputs, labels).to(device)
    object.__setattr__(data, "inputs", data.inputs.to(dtype))
    return data


def network(module: nn.Module, private: str) -> Network:
    """Return a network with its shared and its personal part."""
    full = Layout.of(module)
    body = Layout(tuple(item for item in full.shapes if not item[0].startswith(HEAD)))
    shared = {"none": full, "head": body, "all": Layout(())}[private]
    personal = Layout(tuple(item for item in full.shapes if item not in shared.shapes))
    return Network(module, FlatPart(module, shared), FlatPart(module, personal))


def optimiser(parameters: Iterable[nn.Parameter], given: SGD) -> torch.optim.SGD:
    """Return torch's own."""
    return torch.optim.SGD(
        list(parameters), lr=given.learning_rate, momentum=given.momentum, weight_decay=given.weight_decay
    )


def test_what_is_frozen_stays_as_it_is() -> None:
    """A user's own network may have such parameters; torch's optimiser is given the others alone."""
    mine, torchs, data = build("mlp"), build("mlp"), some_examples("mlp", 30)
    for module in (mine, torchs):
        next(module.parameters()).requires_grad_(False)
    before = [parameter.detach().clone() for parameter in mine.parameters()]
    train(Network(mine, FlatPart(mine, Layout(())), FlatPart(mine, Layout.of(mine))), data, STEPS, SEED)
    trained = [parameter for parameter in torchs.parameters() if parameter.requires_grad]
    reference_round(torchs, [optimiser(trained, STEPS)], [], data, STEPS)
    now = list(mine.parameters())
    assert torch.equal(now[0], before[0]) and not any(map(torch.equal, now[1:], before[1:]))
    torch.testing.assert_close([each.detach() for each in now], [each.detach() for each in torchs.parameters()])


def reference_round(
    module: nn.Module,
    optimisers: list[torch.optim.SGD],
    shared: list[nn.Parameter],
    data: Examples,
    given: SGD,
    seed: int = SEED,
) -> float:
    """Train with torch's own optimisers and clipping; returns the mean loss."""
    losses = []
    for batch in draw_batches(len(data), given.batch_size, given.steps, seed):
        for each in optimisers:
            each.zero_grad()
        loss = F.cross_entropy(module(data.inputs[batch]), data.labels[batch])
        loss.backward()
        if shared:
            nn.utils.clip_grad_norm_(shared, given.clip)
        for each in optimisers:
            each.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


# ---------------------------------------------------------------------- flat parts


def test_a_part_takes_over_the_values_and_stays_bound_to_the_network() -> None:
    module = build("mlp")
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    made = network(module, "none")
    part, empty = made.shared, made.personal
    assert all(torch.equal(parameter, before[name]) for name, parameter in module.named_parameters())
    part.load(torch.arange(part.layout.numel, dtype=torch.float64))
    assert module.fc1.weight[0, :3].tolist() == [0, 1, 2]  # type: ignore[index, union-attr]
    assert module.head.bias.tolist() == list(range(part.layout.numel - 4, part.layout.numel))  # type: ignore[operator, union-attr]
    module(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    assert part.gradient[-4:].tolist() == [1, 1, 1, 1]  # of the head's bias
    assert (empty.values.shape, empty.gradient.shape) == ((0,), (0,))


def test_loading_copies_and_forgets_the_momentum() -> None:
    part = network(build("mlp"), "none").shared
    part.gradient.fill_(1.0)
    part.step(STEPS)
    assert part.momentum is not None
    values = torch.ones_like(part.values)
    part.load(values)
    assert part.momentum is None
    part.values.zero_()
    assert values.sum() == len(values)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e3])
def test_clipping_is_torchs(scale: float) -> None:
    module = build("mlp")
    part = network(module, "none").shared
    part.gradient.copy_(scale * torch.linspace(-1, 2, part.layout.numel, dtype=torch.float64))
    expected = [nn.Parameter(torch.zeros_like(view)) for view in part.layout.views(part.gradient).values()]
    for parameter, view in zip(expected, part.layout.views(part.gradient).values(), strict=True):
        parameter.grad = view.clone()
    nn.utils.clip_grad_norm_(expected, 0.5)
    part.clip(0.5)
    flat = torch.cat([p.grad.reshape(-1) for p in expected if p.grad is not None])
    assert torch.allclose(part.gradient, flat, rtol=1e-12, atol=0)
    assert part.gradient.norm() <= 0.5
    assert scale != 1e3 or part.gradient.norm() > 0.499


# ---------------------------------------------------------------------- against torch's own optimiser


@pytest.mark.parametrize("name", sorted(NETWORKS))
@pytest.mark.parametrize(("momentum", "weight_decay", "clip"), [(0.9, 5e-3, 0.5), (0.0, 0.0, 50.0), (0.5, 0.1, 1e-3)])
def test_twenty_steps_are_those_of_torch_sgd(name: str, momentum: float, weight_decay: float, clip: float) -> None:
    given = replace(STEPS, momentum=momentum, weight_decay=weight_decay, clip=clip)
    data = some_examples(name, 17)
    ours, theirs = build(name), build(name)
    mine = network(ours, "none")
    loss = train(mine, data, given, SEED)
    wanted = list(theirs.parameters())
    expected = reference_round(theirs, [optimiser(wanted, given)], wanted, data, given)
    assert loss == pytest.approx(expected, rel=1e-6)
    for (parameter_name, got), want in zip(ours.named_parameters(), wanted, strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-6), parameter_name
    moved = (mine.shared.values - Layout.of(build(name)).flatten(dict(build(name).named_parameters()))).norm()
    assert moved > 1e-3


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_over_rounds_the_personal_momentum_persists_and_the_shared_starts_afresh(name: str) -> None:
    given = replace(STEPS, clip=0.05)  # so tight that clipping the personal part as well would show
    data = some_examples(name, 17)
    ours, theirs = build(name), build(name)
    mine = network(ours, "head")
    body = [p for n, p in theirs.named_parameters() if not n.startswith(HEAD)]
    head = [p for n, p in theirs.named_parameters() if n.startswith(HEAD)]
    persistent = optimiser(head, given)
    sent = mine.shared.values.clone()
    for number in range(3):
        mine.shared.load(sent)
        train(mine, data, given, number)
        with torch.no_grad():
            for parameter, view in zip(body, mine.shared.layout.views(sent).values(), strict=True):
                parameter.copy_(view)
        reference_round(theirs, [optimiser(body, given), persistent], body, data, given, number)
        for (parameter_name, got), want in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(got, want, rtol=0, atol=1e-6), (number, parameter_name)
        sent = sent + 0.01


def test_with_nothing_shared_nothing_is_clipped() -> None:
    given = replace(STEPS, clip=1e-9)
    data = some_examples("mlp", 17)
    ours, theirs = build("mlp"), build("mlp")
    train(network(ours, "all"), data, given, SEED)
    reference_round(theirs, [optimiser(theirs.parameters(), given)], [], data, given)
    for got, want in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-6)


def test_dropout_works_while_training_and_rests_while_evaluating() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)).double()
    modes: list[bool] = []
    module[1].register_forward_pre_hook(lambda layer, _: modes.append(layer.training))
    train(network(module, "none"), some_examples("mlp", 9), replace(STEPS, steps=2), SEED)
    evaluate(module, some_examples("mlp", 9))
    train(network(module, "none"), some_examples("mlp", 9), replace(STEPS, steps=1), SEED)
    assert modes == [True, True, False, True]


def test_dropout_draws_from_the_orders_seed() -> None:
    found = []
    for other in (1, 2):
        module = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)).double()
        nn.init.ones_(module[0].weight)
        nn.init.zeros_(module[0].bias)
        torch.manual_seed(other)
        train(network(module, "none"), some_examples("mlp", 9), replace(STEPS, steps=3), SEED)
        found.append(module[0].weight.detach().clone())
    assert torch.equal(*found)


def test_a_network_trains_on_fewer_examples_than_a_batch() -> None:
    given = replace(STEPS, batch_size=64, steps=2)
    data = some_examples("mlp", 3)
    ours, theirs = build("mlp"), build("mlp")
    train(network(ours, "none"), data, given, SEED)
    wanted = list(theirs.parameters())
    reference_round(theirs, [optimiser(wanted, given)], wanted, data, given)
    for got, want in zip(ours.parameters(), wanted, strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- batches


@pytest.mark.parametrize(("examples", "batch_size", "size"), [(20, 6, 6), (6, 6, 6), (5, 64, 5), (1, 1, 1)])
def test_each_row_is_a_sample_without_replacement(examples: int, batch_size: int, size: int) -> None:
    batches = draw_batches(examples, batch_size, 7, 0)
    assert batches.shape == (7, size)
    for row in batches.tolist():
        assert len(set(row)) == size
        assert 0 <= min(row) <= max(row) < examples


def test_batches_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = draw_batches(50, 8, 5, 3)
    torch.manual_seed(2)
    assert torch.equal(draw_batches(50, 8, 5, 3), first)
    assert not torch.equal(draw_batches(50, 8, 5, 4), first)
    assert torch.equal(draw_batches(50, 8, 2, 3), first[:2])  # fewer steps are the beginning of more
    assert torch.equal(draw_batches(50, 4, 5, 3), first[:, :4])


def test_each_row_is_a_shuffle_of_its_own() -> None:
    batches = draw_batches(1000, 8, 20, 0)
    assert len({tuple(row) for row in batches.tolist()}) == 20


def test_every_example_is_drawn_equally_often() -> None:
    counts = torch.bincount(draw_batches(10, 3, 2000, 5).reshape(-1), minlength=10)
    assert counts.sum() == 6000
    assert (counts - 600).abs().max() < 5 * math.sqrt(600)


# ---------------------------------------------------------------------- devices


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_cuda_trains_on_the_same_batches_to_the_same_weights(name: str) -> None:
    results = []
    for device in ("cpu", "cuda"):
        module = build(name).to(device)
        made = network(module, "head")
        data = some_examples(name, 17, device=device)
        loss = train(made, data, STEPS, SEED)
        score = evaluate(module, data)
        results.append((made.shared.values.cpu(), made.personal.values.cpu(), loss, count_right(score), score.loss))
        assert made.shared.values.device.type == device
    cpu, cuda = results
    assert torch.allclose(cpu[0], cuda[0], rtol=0, atol=1e-6)
    assert torch.allclose(cpu[1], cuda[1], rtol=0, atol=1e-6)
    assert cuda[2:] == pytest.approx(cpu[2:], rel=1e-5)


def test_batches_are_drawn_on_the_cpu_for_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Tensor] = []

    def keep(*arguments: int) -> Tensor:
        drawn.append(draw_batches(*arguments))
        return drawn[-1]

    monkeypatch.setattr(sgd, "draw_batches", keep)
    module = build("mlp")
    train(network(module, "none"), some_examples("mlp", 17), STEPS, SEED)
    assert [batch.device.type for batch in drawn] == ["cpu"]
    assert torch.equal(drawn[0], draw_batches(17, 5, 20, 11))


# ---------------------------------------------------------------------- half precision

LORA = ModelSpec("mlp", "S", (1, 8, 8), 4, "lora:r=2")
DATA = Examples(torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 4)


def gradient_of_a_step() -> torch.Tensor:
    torch.manual_seed(0)
    module = models.build(LORA)
    part = FlatPart(module, Layout.of(module))
    with torch.no_grad():
        part.values.add_(torch.randn_like(part.values), alpha=0.1)  # LoRA's B starts at zero
    loss = backward(module, [part], DATA, torch.arange(40))
    assert loss.dtype == part.gradient.dtype == torch.float32
    return part.gradient.clone()


@pytest.mark.parametrize(("large", "gains", "half"), [(1, True, True), (1, False, False), (10_000_000, True, False)])
def test_a_large_frozen_network_is_passed_in_half_precision(
    large: int, gains: bool, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradient_of_a_step()
    monkeypatch.setattr(sgd, "LARGE", large)
    monkeypatch.setattr(sgd, "gains_by_half", lambda device: gains)
    found = gradient_of_a_step()
    assert torch.equal(found, expected) == (not half)
    assert float((found - expected).norm() / expected.norm()) < 0.1  # bfloat16 has eight bits


@pytest.mark.parametrize("adapt", ["all", "generated:k=3,h=4"])
def test_what_is_trained_as_a_whole_is_passed_in_single_precision(adapt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sgd, "LARGE", 1)
    monkeypatch.setattr(sgd, "gains_by_half", lambda device: True)
    module = models.build(replace(LORA, adapt=adapt))
    assert torch.equal(sgd.outputs_of(module, DATA.inputs), module(DATA.inputs))


def test_the_rule_knows_devices() -> None:
    assert sgd.gains_by_half(torch.device("cpu")) == torch.cpu._is_avx512_bf16_supported()
    assert not sgd.gains_by_half(torch.device("meta"))
