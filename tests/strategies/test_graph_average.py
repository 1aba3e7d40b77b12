"""The average of parts, and FedAvg as the special case of a federated graph hypernetwork."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.common.graphs import Graph, GraphHypernetwork, Settings, trace
from hyperbloom.strategies.hypernetworks.graph import average_parts

ROUNDS, STEPS, CLASSES = 10, 4, 3
EXAMPLES = (30, 10, 50)  # of each client
RATE, MOMENTUM, DECAY = 0.05, 0.9, 1e-2


def test_a_part_is_averaged_over_those_who_trained_it() -> None:
    replies = [
        (1.0, {"gnn": torch.tensor([0.0, 4.0]), "a": torch.tensor([1.0])}),
        (3.0, {"gnn": torch.tensor([4.0, 0.0]), "b": torch.tensor([5.0])}),
        (4.0, {"gnn": torch.tensor([2.0, 2.0]), "b": torch.tensor([12.0])}),
    ]
    averaged = average_parts(replies)
    assert {name: values.tolist() for name, values in averaged.items()} == {"gnn": [2.5, 1.5], "a": [1.0], "b": [9.0]}
    assert replies[0][1]["gnn"].tolist() == [0, 4]  # what came in is left as it was


class Net(nn.Module):
    """Layers of one type that repeat, a skip, and a norm: all that a hypernetwork could mix up."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.norm(self.conv1(x)) + self.conv2(x)
        return self.head(x.relu().mean((2, 3)))  # type: ignore[no-any-return]


def batches(client: int, round_: int) -> list[tuple[Tensor, Tensor]]:
    """Return a client's batches of a round: the same for both methods, different between clients."""
    generator = torch.Generator().manual_seed(100 * client + round_)
    inputs = torch.randn(STEPS, 8, 2, 5, 5, generator=generator) + client
    return list(zip(inputs, torch.randint(CLASSES, (STEPS, 8), generator=generator), strict=True))


def fedavg(start: Tensor, graph: Graph) -> list[Tensor]:
    """Return the weights after each round of FedAvg by torch's own means."""
    weights, history = start, []
    for round_ in range(ROUNDS):
        total = torch.zeros_like(weights)
        for client, examples in enumerate(EXAMPLES):
            net = Net()
            net.load_state_dict({**net.state_dict(), **graph.layout.views(weights)})
            optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
            for inputs, labels in batches(client, round_):
                optimizer.zero_grad()
                F.cross_entropy(net(inputs), labels).backward()
                optimizer.step()
            total += examples / sum(EXAMPLES) * torch.cat([p.detach().flatten() for p in net.parameters()])
        weights = total
        history.append(weights)
    return history


def federated(server: GraphHypernetwork, graph: Graph) -> list[Tensor]:
    """Return the generated weights after each round of HAFL-GHN: the hypernetwork travels and is trained."""
    history = []
    for round_ in range(ROUNDS):
        replies = []
        for client, examples in enumerate(EXAMPLES):
            own, net = GraphHypernetwork(graph.types, server.settings, seed=None), Net()
            for part in own.parts():
                own.load_part(part, server.read_part(part))
            parameters = [p for p in own.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
            for inputs, labels in batches(client, round_):
                optimizer.zero_grad()
                weights = graph.layout.views(own(graph))
                F.cross_entropy(torch.func.functional_call(net, weights, (inputs,)), labels).backward()
                optimizer.step()
            replies.append((float(examples), {part: own.read_part(part) for part in own.parts()}))
        for part, values in average_parts(replies).items():
            server.load_part(part, values)
        history.append(server(graph).detach())
    return history


def run(settings: Settings) -> float:
    """Return how far the two methods are apart at most, from the same weights on."""
    graph = trace(Net(), (2, 5, 5))
    server = GraphHypernetwork(graph.types, settings, seed=3)
    start = server(graph).detach().clone()
    ours, theirs = federated(server, graph), fedavg(start, graph)
    assert (theirs[-1] - start).abs().max() > 0.1  # it learns at all
    return float((torch.stack(ours) - torch.stack(theirs)).abs().max())


def test_with_identity_gnn_and_linear_maps_it_is_fedavg() -> None:
    assert run(Settings(mode="linear", latent=4)) < 1e-5


@pytest.mark.parametrize("mode", ["graph", "no-graph"])
def test_otherwise_it_is_not(mode: str) -> None:
    assert run(Settings(mode=mode, layers=2, latent=8, hidden=8)) > 1e-2  # type: ignore[arg-type]
