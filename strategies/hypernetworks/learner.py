"""The server's half of pFedHN as pure torch: generate a cohort's weights, learn from what the clients send back.

Shamsian et al., ICML 2021, https://arxiv.org/abs/2103.04628, algorithm 1. The paper writes the update with
`delta = trained - sent` and a minus sign, which would walk uphill; the authors' code hands `sent - trained` to the
optimiser as the gradient of the generated weights, and so do we: it is the gradient of `1/2 |trained - h(v)|^2`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor, nn

from hyperbloom.strategies.hypernetworks.embedding import EmbeddingTable

__all__ = ["HypernetworkLearner", "Reply", "UpdateRule"]

UpdateRule = Literal["mean", "sequential", "target"]


@dataclass(frozen=True)
class Reply:
    """One client's answer: `sent` and `delta = trained - sent` are `(P,)` for a target network of `size`."""

    row: int
    size: str
    sent: Tensor
    delta: Tensor


class HypernetworkLearner:
    """A hypernetwork, its embedding table and the optimiser that persists over rounds.

    Args:
        hypernetwork: module from descriptors `(C, k)` and a size to weights `(C, P)`.
        table: the clients' descriptors.
        learning_rate: of the hypernetwork.
        embedding_learning_rate: of the embeddings.
        momentum: of the server's SGD; rebuilding the optimiser each round loses it and several points of accuracy.
        weight_decay: of the server's SGD.
        clip: total norm to which the gradient over hypernetwork and embeddings is clipped.
        sparse: move only the embedding rows of the cohort. The paper's optimiser also moves the others, by momentum
            and weight decay.
        freeze: learn embeddings only (novel clients, section 5.3).
    """

    def __init__(
        self,
        hypernetwork: nn.Module,
        table: EmbeddingTable,
        *,
        learning_rate: float = 1e-2,
        embedding_learning_rate: float | None = None,
        momentum: float = 0.9,
        weight_decay: float = 1e-3,
        clip: float = 50.0,
        sparse: bool = False,
        freeze: bool = False,
    ) -> None:
        """Set up the optimiser with two parameter groups."""
        self.hypernetwork = hypernetwork.requires_grad_(not freeze)
        self.table = table
        self.clip = clip
        self.sparse = sparse or freeze
        groups = [
            {"params": list(hypernetwork.parameters()), "lr": learning_rate},
            {"params": [table.weight], "lr": embedding_learning_rate or learning_rate},
        ]
        self.optimizer = torch.optim.SGD(
            groups, lr=learning_rate, momentum=momentum, weight_decay=weight_decay, fused=True
        )

    def grow(self, client_id: str, descriptor: Tensor | None = None) -> None:
        """Append an embedding row, and a row without momentum to the optimiser's state."""
        self.table.grow(client_id, descriptor)
        self.table.weight.grad = None
        state = self.optimizer.state[self.table.weight]
        if state.get("momentum_buffer") is not None:
            buffer = state["momentum_buffer"]
            state["momentum_buffer"] = torch.cat([buffer, buffer.new_zeros(1, buffer.shape[1])])

    @torch.no_grad()
    def generate(self, rows: Sequence[int], size: str) -> Tensor:
        """Return the weights `(C, P)` of clients of one size; with spectral norm, one more power iteration."""
        self.hypernetwork.train()
        return self._forward(rows, size)

    def update(self, replies: Sequence[Reply], rule: UpdateRule) -> None:
        """Learn from a cohort.

        With one reply all rules are the paper's step. With more,
        * `mean` takes one step on the mean gradient;
        * `sequential` takes one step per reply, in order, with the deltas as they were sent;
        * `target` takes one step per reply towards the trained weights, measured from where `h(v)` is by then.
        """
        if not replies:
            return
        if rule == "mean":
            for size, group in _by_size(replies):
                gradient = torch.stack([-reply.delta for reply in group]) / len(replies)
                self._backward([reply.row for reply in group], size, gradient)
            self._step([reply.row for reply in replies])
            return
        for reply in replies:
            trained = reply.sent + reply.delta if rule == "target" else None
            self._backward([reply.row], reply.size, -reply.delta[None], trained)
            self._step([reply.row])

    def _forward(self, rows: Sequence[int], size: str) -> Tensor:
        index = torch.tensor(rows, device=self.table.weight.device)
        weights: Tensor = self.hypernetwork(self.table(index), size)
        return weights

    def _backward(self, rows: Sequence[int], size: str, gradient: Tensor, target: Tensor | None = None) -> None:
        """Add the vector-Jacobian product of `h` with `gradient` `(C, P)`, or with `h(v) - target`, to `.grad`."""
        # Evaluation mode: the weights that were sent, not those after another power iteration of spectral norm.
        self.hypernetwork.eval()
        weights = self._forward(rows, size)
        weights.backward(weights.detach() - target if target is not None else gradient)

    def _step(self, rows: Sequence[int]) -> None:
        """Clip, take the optimiser's step, and forget the gradients."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        nn.utils.clip_grad_norm_(parameters, self.clip)
        if self.sparse:
            self._step_rows(rows)
        else:
            self.optimizer.step()
        # None, not zero: a head whose size was not in the cohort must feel neither momentum nor weight decay.
        self.optimizer.zero_grad(set_to_none=True)

    def _step_rows(self, rows: Sequence[int]) -> None:
        """Take the step, then put back all embedding rows, and their momentum, that were not in the cohort."""
        table, state = self.table.weight, self.optimizer.state[self.table.weight]
        before, momentum = table.detach().clone(), state.get("momentum_buffer")
        momentum = torch.zeros_like(before) if momentum is None else momentum.clone()
        self.optimizer.step()
        absent = torch.ones(len(table), dtype=torch.bool, device=table.device)
        absent[list(rows)] = False
        with torch.no_grad():
            table[absent] = before[absent]
        if state.get("momentum_buffer") is not None:
            state["momentum_buffer"][absent] = momentum[absent]

    def state(self) -> dict[str, Tensor]:
        """Return everything the learner knows, by name: parameters, buffers, embeddings and momentum."""
        tensors = {f"hypernetwork.{name}": value for name, value in self.hypernetwork.state_dict().items()}
        tensors["embeddings"] = self.table.weight.detach()
        for name, parameter in self._named_parameters():
            momentum = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                tensors[f"momentum.{name}"] = momentum
        return tensors

    def load(self, tensors: Mapping[str, Tensor], with_momentum: bool = True) -> None:
        """Take over what `state` returned; the embedding table gets as many rows as were stored."""
        prefix = "hypernetwork."
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        self.hypernetwork.load_state_dict(own)
        self.table.weight.data = tensors["embeddings"].clone().to(self.table.weight)
        for name, parameter in self._named_parameters():
            if with_momentum and f"momentum.{name}" in tensors:
                buffer = tensors[f"momentum.{name}"].clone().to(parameter)
                self.optimizer.state[parameter] = {"momentum_buffer": buffer}

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.hypernetwork.named_parameters()
        yield "embeddings", self.table.weight


def _by_size(replies: Sequence[Reply]) -> Iterator[tuple[str, list[Reply]]]:
    ordered = sorted(replies, key=lambda reply: reply.size)
    return ((size, list(group)) for size, group in groupby(ordered, key=lambda reply: reply.size))
