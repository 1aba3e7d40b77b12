"""FedMA: matching undoes permutations, finds the best assignment, and layers are frozen in turn."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from figures.fedma import MATCHABLE, Frozen, layers_of, match
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.models import ModelSpec, build
from hyperbloom.common.wire.orders import EvaluateOrder, TrainOrder, TrainResult
from hyperbloom.strategies import make_algorithm
from tests.strategies.conftest import assert_same, digits_federation, introduction, joined, play, turn, update_of
from tests.strategies.test_baselines import config

SHAPES = {"mlp": (5,), "lenet": (1, 20, 20)}


def network(name: str, seed: int) -> tuple[Any, Layout, Tensor]:
    """Return an architecture, its layout, and weights from `seed`."""
    torch.manual_seed(seed)
    module = build(ModelSpec(name, "S", SHAPES[name], 4))
    layout = Layout.of(module)
    return module, layout, layout.flatten(dict(module.named_parameters()))


def outputs(name: str, module: Any, layout: Layout, weights: Tensor) -> Tensor:
    """Return the logits of some inputs."""
    inputs = torch.randn(6, *SHAPES[name], generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: Tensor = functional_call(module, layout.views(weights), (inputs,))
    return found


def permuted(layout: Layout, weights: Tensor, seed: int) -> Tensor:
    """Return the network with all hidden neurons shuffled; channel by channel, with explicit loops."""
    old = {name: tensor.clone() for name, tensor in layout.views(weights).items()}
    generator = torch.Generator().manual_seed(seed)
    layers = layers_of(layout)
    for layer, following in itertools.pairwise(layers):
        order = torch.randperm(len(old[f"{layer}.bias"]), generator=generator)
        new = {name: tensor.clone() for name, tensor in old.items()}
        inputs = old[f"{following}.weight"].shape[1] // len(order)  # pixels of a channel that was flattened, else one
        for place, neuron in enumerate(order.tolist()):
            new[f"{layer}.weight"][place] = old[f"{layer}.weight"][neuron]
            new[f"{layer}.bias"][place] = old[f"{layer}.bias"][neuron]
            for pixel in range(inputs):
                source = old[f"{following}.weight"][:, neuron * inputs + pixel]
                new[f"{following}.weight"][:, place * inputs + pixel] = source
        old = new
    return layout.flatten(old)


@pytest.mark.parametrize("name", MATCHABLE)
def test_a_permuted_copy_is_recovered_exactly(name: str) -> None:
    module, layout, weights = network(name, 0)
    other = permuted(layout, weights, 1)
    assert not torch.equal(other, weights)
    # One function in two orders, up to the order of summation.
    torch.testing.assert_close(
        outputs(name, module, layout, other), outputs(name, module, layout, weights), rtol=0, atol=1e-5
    )
    matched = match([weights, other, permuted(layout, weights, 2)], [3, 2, 1], layout)
    assert all(torch.equal(found, weights) for found in matched)
    # Plainly averaged it would be another network.
    assert not torch.allclose(
        outputs(name, module, layout, (weights + other) / 2), outputs(name, module, layout, weights), atol=0.01
    )


@pytest.mark.parametrize("name", MATCHABLE)
def test_matching_leaves_every_function_as_it_is(name: str) -> None:
    module, layout, one = network(name, 0)
    two, three = network(name, 1)[2], network(name, 2)[2]
    for before, after in zip((one, two, three), match([one, two, three], [1, 5, 2], layout), strict=True):
        wanted = outputs(name, module, layout, before)
        torch.testing.assert_close(outputs(name, module, layout, after), wanted, rtol=0, atol=1e-5)
        assert torch.equal(before, after) == (before is two)  # of the most examples


@pytest.mark.parametrize("seed", range(5))
def test_the_assignment_is_the_best_of_all_permutations(seed: int) -> None:
    """Of two networks, by trying all; then of a third one to the weighted average of those two."""
    layout = Layout((("a.weight", (4, 3)), ("a.bias", (4,)), ("head.weight", (2, 4)), ("head.bias", (2,))))
    generator = torch.Generator().manual_seed(seed)
    networks = [torch.randn(layout.numel, generator=generator) for _ in range(3)]
    examples = [5, 3, 2]
    found = match(networks, examples, layout)

    def neurons(weights: Tensor) -> Tensor:
        views = layout.views(weights)
        return torch.cat([views["a.weight"], views["a.bias"][:, None]], 1)

    average = neurons(networks[0])
    for number, share in ((1, 3 / 8), (2, 2 / 10)):
        own = neurons(networks[number])
        best = min(itertools.permutations(range(4)), key=lambda o: float(((average - own[list(o)]) ** 2).sum()))
        assert torch.equal(neurons(found[number]), own[list(best)])
        head = layout.views(networks[number])["head.weight"][:, list(best)]
        assert torch.equal(layout.views(found[number])["head.weight"], head)
        average = (1 - share) * average + share * own[list(best)]


def test_layers_that_are_frozen_are_not_matched() -> None:
    _, layout, one = network("lenet", 0)
    other = permuted(layout, one, 1)
    (_, found) = match([one, other], [2, 1], layout, first=2)
    views, before = layout.views(found), layout.views(other)
    for name in ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"):
        assert torch.equal(views[name], before[name])
    assert not torch.equal(views["fc1.weight"], before["fc1.weight"])


def test_clients_that_permute_average_to_the_network() -> None:
    """Over a whole cycle: the server's average is the one network that all clients have in different orders."""
    torch.manual_seed(0)
    layout = Layout.of(build(ModelSpec("mlp", "S", (4,), 3)))
    weights = torch.randn(layout.numel)

    def train(name: str, order: TrainOrder) -> TrainResult:
        assert order.weights is not None and order.reply == "weights"
        if order.method is None:
            return TrainResult(1.0, Weights(layout, permuted(layout, weights, ord(name))))
        return TrainResult(1.0, order.weights)

    made = joined(config("fedma"), *(introduction(name) for name in "ab"))
    for number in (1, 2):
        play(made.round(turn(made, number)), train)
        average = layout.flatten(made.state())
        assert torch.equal(average, permuted(layout, weights, ord("a")))  # the order is that of the first


def test_layers_are_frozen_in_turn_and_each_client_goes_on_from_its_own(tmp_path: Path) -> None:
    federation = digits_federation(config("fedma", clients=3, cohort=3, rounds=5, eval_every=1), tmp_path)
    history, _ = federation.run()
    layout = Layout.of(build(ModelSpec("mlp", "S", (1, 8, 8), 10)))
    states = [layout.flatten(state) for state in history.states]
    orders = [(order.weights.values, order.method) for order in federation.grid.sent(TrainOrder) if order.weights]
    returned = [answer.weights.values for answer in federation.grid.answers(TrainOrder)]
    evaluated = [order.weights.values for order in federation.grid.sent(EvaluateOrder) if order.weights]
    assert [len(messages) for messages in (orders, returned, evaluated)] == [15] * 3
    frozen = 64 * 50 + 50
    for number in range(5):
        sent = orders[3 * number : 3 * number + 3]
        if number % 2 == 0:  # everything, from one network for all
            assert all(method is None for _, method in sent)
            assert torch.equal(sent[0][0], sent[1][0]) and torch.equal(sent[0][0], sent[2][0])
            assert number == 0 or torch.equal(sent[0][0], states[number - 1])
        else:  # the head alone, each its own
            assert all(method == Frozen(names=("fc1.weight", "fc1.bias")) for _, method in sent)
            before = returned[3 * (number - 1) : 3 * number]
            sizes = [client.about.train_examples for client in federation.roster]
            matched = match(before, sizes, layout)
            for (values, _), own, back in zip(sent, matched, returned[3 * number :], strict=False):
                assert torch.equal(values[:frozen], states[number - 1][:frozen])
                assert torch.equal(values[frozen:], own[frozen:])
                assert torch.equal(back[:frozen], values[:frozen])
                assert not torch.equal(back[frozen:], values[frozen:])
            assert not torch.equal(sent[0][0], sent[1][0])
            assert torch.equal(states[number][:frozen], states[number - 1][:frozen])
        assert all(torch.equal(values, states[number]) for values in evaluated[3 * number : 3 * number + 3])


def in_a_cycle() -> Any:
    """Return an algorithm after the first round of a cycle, in which the third of its clients did not take part."""
    made = joined(config("fedma"), *(introduction(name) for name in "abc"))
    made.learn([update_of(made.clients[row], torch.randn(made.whole.numel)) for row in (0, 1)])
    return made


def test_who_joins_a_cycle_late_starts_from_the_average() -> None:
    made = in_a_cycle()
    late, own = made.weights([made.clients[2], made.clients[0]])
    assert torch.equal(late.values, made.global_weights)
    frozen = 4 * 50 + 50
    assert torch.equal(own.values[:frozen], late.values[:frozen])
    assert not torch.equal(own.values, late.values)


def test_a_checkpoint_in_the_middle_of_a_cycle_holds_each_clients_own_network() -> None:
    made = in_a_cycle()
    saved = {name: tensor.clone() for name, tensor in made.checkpoint().items()}
    other = joined(config("fedma"), *(introduction(name) for name in "abc"), checkpoint=saved)
    assert other.recipe(2) == made.recipe(2) != joined(config("fedma"), introduction("a")).recipe(2)
    clients = [*made.clients.values()]
    sent = made.weights(clients)
    assert len({tuple(weights.values.tolist()) for weights in sent}) == 3
    for mine, theirs in zip(sent, other.weights(clients), strict=True):
        assert torch.equal(mine.values, theirs.values)


def test_a_round_without_replies_freezes_nothing() -> None:
    made = joined(config("fedma"), introduction("a"))
    before = {name: tensor.clone() for name, tensor in made.state().items()}
    made.learn([])
    assert made.recipe(2).method is None
    assert_same(before, made.state())


@pytest.mark.parametrize("model", ["hafl-0", "plain-4"])
def test_models_that_it_cannot_match_are_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=rf"model: fedma matches the neurons of mlp, lenet .* found '{model}'"):
        make_algorithm(config("fedma", model=model))
