"""pFedHN once more, as its paper and public code read: slow, plain, and sharing nothing with the code under test.

One `nn.Embedding`, one linear head per tensor of the target network, `torch.autograd.grad` with `grad_outputs`,
`torch.optim.SGD` and `clip_grad_norm_` on the server; a network loaded by `load_state_dict` on the client.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shapes = Sequence[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class LocalSGD:
    """Hyperparameters of the local loop; `clip` None: no clipping."""

    steps: int
    batch_size: int
    learning_rate: float
    momentum: float
    weight_decay: float
    clip: float | None

    def optimizer(self, net: nn.Module) -> torch.optim.SGD:
        """Return a fresh optimiser."""
        return torch.optim.SGD(
            net.parameters(), lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
        )


def seed_of(seed: int, *labels: str | int) -> int:
    """Return the seed that the run's seed and these labels give: 63 bits of a SHA-256."""
    text = "\x1f".join(str(part) for part in (seed, *labels))
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) // 2


def batches(examples: int, settings: LocalSGD, seed: int) -> list[Tensor]:
    """Return the indices of each local batch: the head of a fresh shuffle."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(examples, generator=generator)[: settings.batch_size] for _ in range(settings.steps)]


def local_loop(
    net: nn.Module, inputs: Tensor, labels: Tensor, settings: LocalSGD, seed: int, *optimizers: torch.optim.SGD
) -> float:
    """Train `net` in place and return the mean loss.

    With two optimisers, for the body and for a personal head, only what the first one moves is clipped.
    """
    losses = []
    for batch in batches(len(labels), settings, seed):
        net.zero_grad()
        loss = F.cross_entropy(net(inputs[batch]), labels[batch])
        loss.backward()
        if settings.clip is not None:
            torch.nn.utils.clip_grad_norm_(optimizers[0].param_groups[0]["params"], settings.clip)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


class PlainHypernetwork(nn.Module):
    """Embedding, trunk, and a head of its own for every tensor of the target network."""

    def __init__(self, clients: int, shapes: Shapes, dim: int, hidden: int, hidden_layers: int) -> None:
        super().__init__()
        self.shapes = shapes
        self.embeddings = nn.Embedding(clients, dim)
        layers: list[nn.Module] = [nn.Linear(dim, hidden)]
        for _ in range(hidden_layers):
            layers.append(nn.ReLU())
            layers.append(nn.Linear(hidden, hidden))
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleList([nn.Linear(hidden, math.prod(shape)) for _, shape in shapes])

    def forward(self, client: int) -> dict[str, Tensor]:
        """Return the state dict of a client's network."""
        features = self.trunk(self.embeddings(torch.tensor([client])))
        return {name: head(features).view(shape) for head, (name, shape) in zip(self.heads, self.shapes, strict=True)}

    @torch.no_grad()
    def copy_from(self, state: Mapping[str, Tensor], size: str) -> None:
        """Take the values of the state under test: the heads are slices of the fused one."""
        for name, parameter in self.trunk.named_parameters():
            parameter.copy_(state[f"hypernetwork.trunk.{name}"])
        self.embeddings.weight.copy_(state["embeddings"])
        lengths = [math.prod(shape) for _, shape in self.shapes]
        for kind in ("weight", "bias"):
            pieces = state[f"hypernetwork.heads.{size}.{kind}"].split(lengths)
            for head, piece in zip(self.heads, pieces, strict=True):
                getattr(head, kind).copy_(piece)


class PlainPFedHN:
    """The authors' loop: one client a round, one optimiser for the whole run."""

    def __init__(
        self,
        hypernetwork: PlainHypernetwork,
        learning_rate: float = 1e-2,
        embedding_learning_rate: float | None = None,
        momentum: float = 0.9,
        weight_decay: float = 1e-3,
        clip: float = 50.0,
    ) -> None:
        self.hypernetwork = hypernetwork
        self.clip = clip
        self.norms: list[float] = []  # of the gradient in each round, before it is clipped
        embedding: list[nn.Parameter] = list(hypernetwork.embeddings.parameters())
        rest = [p for name, p in hypernetwork.named_parameters() if not name.startswith("embeddings")]
        groups: list[dict[str, Any]] = [
            {"params": rest},
            {"params": embedding, "lr": embedding_learning_rate or learning_rate},
        ]
        self.optimizer = torch.optim.SGD(
            groups,
            lr=learning_rate,
            momentum=momentum,
            weight_decay=weight_decay,
        )

    def round(self, client: int, net: nn.Module, inputs: Tensor, labels: Tensor, settings: LocalSGD, seed: int) -> None:
        """Generate, train, pull the difference back through the hypernetwork, step."""
        self.optimizer.zero_grad()
        weights = self.hypernetwork(client)
        sent = {name: tensor.detach().clone() for name, tensor in weights.items()}
        net.load_state_dict(sent)
        local_loop(net, inputs, labels, settings, seed, settings.optimizer(net))
        trained = net.state_dict()
        parameters = list(self.hypernetwork.parameters())
        gradients = torch.autograd.grad(
            list(weights.values()), parameters, grad_outputs=[sent[name] - trained[name] for name in weights]
        )
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, self.clip)))
        self.optimizer.step()

    def state(self, size: str) -> dict[str, Tensor]:
        """Return parameters and momentum under the names of the state under test."""
        net = self.hypernetwork
        found: dict[str, Tensor] = {}
        for prefix, of in (("", _itself), ("momentum.", self._momentum)):
            owner = "" if prefix else "hypernetwork."
            for name, parameter in net.trunk.named_parameters():
                found[f"{prefix}{owner}trunk.{name}"] = of(parameter)
            for kind in ("weight", "bias"):
                found[f"{prefix}{owner}heads.{size}.{kind}"] = torch.cat([of(getattr(h, kind)) for h in net.heads])
            found[f"{prefix}embeddings"] = of(net.embeddings.weight)
        return found

    def _momentum(self, parameter: Tensor) -> Tensor:
        buffer: Tensor = self.optimizer.state[parameter]["momentum_buffer"]
        return buffer


def _itself(parameter: Tensor) -> Tensor:
    return parameter.detach()
