"""The last layer of a network, and what enters it, against other ways of finding both."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from hyperbloom.common.errors import ModelError
from hyperbloom.common.graphs import trace
from hyperbloom.common.models import MODELS, ModelSpec, build, features, last_layer, represent

IMAGE = (1, 28, 28)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_last_layer_of_our_own_networks_is_the_head(name: str) -> None:
    network = build(ModelSpec(name, "S", IMAGE, 4))
    assert last_layer(network, IMAGE) is network.get_submodule("head")


@pytest.mark.parametrize("name", ["mlp", "lenet", "cnn-1", "cnn-5", "hafl-2", "lstm-2"])
def test_the_head_makes_the_logits_of_the_representation(name: str) -> None:
    network = build(ModelSpec(name, "S", IMAGE, 4)).eval()
    inputs = torch.randn(5, *IMAGE)
    found = represent(network, last_layer(network, IMAGE), inputs)
    assert found.ndim == 2 and found.requires_grad
    if name != "hafl-2":  # whose norms take the statistics of the batch
        torch.testing.assert_close(network.get_submodule("head")(found), network(inputs))


class Branches(nn.Module):
    """Calls its layers in another order than it has them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.first = nn.Sequential(nn.Conv1d(2, 2, 2), nn.Dropout(0.5), nn.ReLU())
        self.unused = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).flatten(1)).softmax(1)
        return out


def test_the_last_layer_is_the_last_that_is_called() -> None:
    network = Branches()
    assert last_layer(network, (2, 4)) is network.last
    normed = nn.Sequential(nn.Flatten(), nn.Linear(8, 5), weight_norm(nn.Linear(5, 3)), nn.ReLU())
    assert last_layer(normed, (2, 4)) is normed[2]


def test_it_is_the_head_of_the_graph() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 36, 3))
    owners = {name.rpartition(".")[0] for name in trace(network, (1, 8, 8)).head}
    assert owners == {"3"} and last_layer(network, (1, 8, 8)) is network[3]


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_a_network_without_layers_has_no_last_one() -> None:
    with pytest.raises(ModelError, match=r"^Bare: expected a last layer that is a module"):
        last_layer(Bare(), (3,))


class Sequences(nn.Module):
    """Puts time before the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.transpose(0, 1)).sum(0)
        return out


def test_a_representation_has_a_row_for_each_input() -> None:
    network = Sequences()
    with pytest.raises(ModelError, match=r"^last layer: expected a tensor with 4 rows to enter it, found \(5, 4, 3\)$"):
        represent(network, network.head, torch.randn(4, 5, 3))


def test_representing_neither_drops_out_nor_depends_on_or_touches_the_running_statistics() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    inputs = torch.randn(6, 3)
    norm = network[1]
    assert isinstance(norm, nn.BatchNorm1d)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    one = represent(network, network[3], inputs)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert all(part.training for part in network.modules()) and norm.track_running_stats
    norm.running_mean = torch.full((4,), 9.0)
    assert torch.equal(represent(network.eval(), network[3], inputs), one)
    assert not any(part.training for part in network.modules())
    made = network[0](inputs)
    wanted = (made - made.mean(0)) / (made.var(0, unbiased=False) + norm.eps).sqrt()
    torch.testing.assert_close(one, wanted)
    assert not network[3]._forward_pre_hooks


class Dropping(nn.Module):
    """Drops out in its own `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 50), nn.Linear(50, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.body(x), training=self.training))


def test_features_are_those_of_evaluation_mode_of_a_network_that_was_just_built() -> None:
    net, inputs = Dropping(), torch.ones(3, 4)
    torch.testing.assert_close(features(net, inputs), net.body(inputs).detach())
