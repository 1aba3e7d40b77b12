"""The obvious implementation of pFedHN, as a reader of the paper writes it: the other side of three benchmarks.

One linear head per tensor of the target network, a Python loop over the cohort, `torch.autograd.grad` per client,
`torch.optim.SGD` as it comes, and on the client a `DataLoader` of which each step takes the first batch of a fresh
shuffle, and a LeNet that pools what ReLU has passed. The same mathematics as `hyperbloom.strategies.hypernetworks`,
which the tests compare it with; the structure is that of the authors' public code
(https://github.com/AvivSham/pFedHN).
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hyperbloom.common.config import LocalConfig
from hyperbloom.common.layout import Layout

__all__ = ["Images", "TextbookHypernetwork", "TextbookLeNet", "TextbookServer", "train"]

Weights = dict[str, Tensor]


class TextbookHypernetwork(nn.Module):
    """Embedding, trunk, and one head per tensor: `forward(client)` is a state dict of the target network.

    Args:
        clients: rows of the embedding table.
        layout: of the target network.
        embedding_dim: of a row; the authors' rule by default.
        hidden_dim: width of the trunk.
        hidden_layers: of the trunk.
    """

    def __init__(
        self,
        clients: int,
        layout: Layout,
        embedding_dim: int | None = None,
        hidden_dim: int = 100,
        hidden_layers: int = 3,
    ) -> None:
        """Initialise from torch's global generator."""
        super().__init__()
        dim = embedding_dim or int(1 + clients / 4)
        self.embeddings = nn.Embedding(clients, dim)
        trunk: list[nn.Module] = [nn.Linear(dim, hidden_dim)]
        for _ in range(hidden_layers):
            trunk += [nn.ReLU(), nn.Linear(hidden_dim, hidden_dim)]
        self.trunk = nn.Sequential(*trunk)
        self.shapes = dict(layout.shapes)
        self.heads = nn.ModuleList(nn.Linear(hidden_dim, size) for size in layout.sizes)

    def forward(self, client: int) -> Weights:
        """Return one client's weights by name."""
        features = self.trunk(self.embeddings(torch.tensor([client])))
        return {
            name: head(features).view(shape)
            for (name, shape), head in zip(self.shapes.items(), self.heads, strict=True)
        }


class TextbookLeNet(nn.Module):
    """The target network on CIFAR-10, layer after layer; its parameters have the names and shapes of ours."""

    def __init__(self, channels: int = 3, side: int = 32) -> None:
        """Initialise from torch's global generator, for other images of `side` pixels too."""
        super().__init__()
        pixels = (((side - 4) // 2 - 4) // 2) ** 2
        self.conv1, self.conv2 = nn.Conv2d(channels, 16, 5), nn.Conv2d(16, 32, 5)
        self.fc1, self.fc2, self.head = nn.Linear(32 * pixels, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch `(B, channels, side, side)`."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.head(F.relu(self.fc2(x)))
        return logits


class TextbookServer:
    """A hypernetwork and its optimiser, with the values of the authors' code."""

    def __init__(self, hypernetwork: TextbookHypernetwork) -> None:
        """Make the optimiser that persists over rounds."""
        self.hypernetwork = hypernetwork
        self.parameters = list(hypernetwork.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-2, momentum=0.9, weight_decay=1e-3)

    def generate(self, cohort: Sequence[int]) -> list[Weights]:
        """Return every client's weights, with the graph that made them."""
        return [self.hypernetwork(client) for client in cohort]

    def update(self, generated: Sequence[Weights], deltas: Sequence[Weights]) -> None:
        """Take one step on the mean of the clients' gradients; `delta` is trained - sent."""
        self.optimizer.zero_grad()
        for weights, delta in zip(generated, deltas, strict=True):
            outputs = [-delta[name] / len(deltas) for name in weights]
            gradients = torch.autograd.grad(list(weights.values()), self.parameters, grad_outputs=outputs)
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        nn.utils.clip_grad_norm_(self.parameters, 50.0)
        self.optimizer.step()


class Images(Dataset[tuple[Tensor, int]]):
    """Bytes that become floats one image at a time, as a data set with transforms does (without PIL: faster).

    Args:
        images: uint8 `(N, H, W, C)`.
        labels: `(N,)`.
    """

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        """Keep the arrays as they are."""
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image between 0 and 1, and its class."""
        return torch.from_numpy(self.images[index]).permute(2, 0, 1).float().div(255), int(self.labels[index])


def train(network: nn.Module, weights: Weights, loader: DataLoader[tuple[Tensor, int]], local: LocalConfig) -> Weights:
    """Load weights, take the local steps, and return trained - sent."""
    sent = {name: tensor.detach() for name, tensor in weights.items()}
    network.load_state_dict(sent)
    network.train()
    optimizer = torch.optim.SGD(
        network.parameters(), lr=local.learning_rate, momentum=local.momentum, weight_decay=local.weight_decay
    )
    for _ in range(local.steps):
        inputs, labels = next(iter(loader))
        optimizer.zero_grad()
        F.cross_entropy(network(inputs), labels).backward()
        nn.utils.clip_grad_norm_(network.parameters(), local.clip)
        optimizer.step()
    return {name: tensor.detach() - sent[name] for name, tensor in network.named_parameters()}
