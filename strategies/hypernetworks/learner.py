"""The server's half of pFedHN in pure torch: embed clients, write a cohort's weights, learn from the clients' changes.

Shamsian et al., ICML 2021, https://arxiv.org/abs/2103.04628, algorithm 1. The paper writes the update with
`delta = trained - sent` and a minus sign, which would ascend. The authors' code passes `sent - trained` to the
optimiser as the gradient of the generated weights `h(v)`. So do we. Where training did not begin at `h(v)`, it is
`h(v) - trained`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor, nn

from hyperbloom.common.seeds import derive
from hyperbloom.strategies.hypernetworks.chunked import ChunkedHypernetwork
from hyperbloom.strategies.hypernetworks.mlp import MLPHypernetwork

Hypernetwork = MLPHypernetwork | ChunkedHypernetwork
"""A module from descriptors `(C, k)` and a size to weights `(C, P)`, with the Gram matrix of its heads' inputs."""

UpdateRule = Literal["proximal", "mean"]

TRUNK_LIMIT = 10
"""Most replies whose trunk gradients are summed in full. A sum of 50 diverged where one of 10 trained well."""
BYTES_AT_ONCE = 32 * 2**20
"""Bytes of a cohort's weights processed at a time (69 LeNets). Each is held three times."""


@dataclass(frozen=True)
class Reply:
    """One client's answer: `delta = trained - sent` is `(P,)` for a target network of `size`."""

    row: int
    size: str
    delta: Tensor


class EmbeddingTable(nn.Module):
    """One descriptor `v_i` of dimension k per client.

    A row's initial value depends on the seed and the client's name, not on the order of joining.

    Args:
        dim: dimension k of a descriptor.
        seed: of the run.
        trainable: False for fixed descriptors (appendix C.5 of pFedHN).

    Shape:
        `weight` is `(n, k)`; `forward(rows)` maps `(C,)` row numbers to `(C, k)`.
    """

    def __init__(self, dim: int, seed: int, trainable: bool = True) -> None:
        super().__init__()
        self.dim = dim
        self.seed = seed
        self.weight = nn.Parameter(torch.empty(0, dim), requires_grad=trainable)

    def grow(self, client_id: str, row: Tensor | None = None) -> None:
        """Append a row for `client_id`: standard normal like `nn.Embedding`, or the given descriptor `(k,)`."""
        if row is None:
            generator = torch.Generator().manual_seed(derive(self.seed, "embedding", client_id))
            row = torch.randn(self.dim, generator=generator)
        self.weight.data = append_row(self.weight.data, row.to(self.weight))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the descriptors `(C, k)` of some clients."""
        return self.weight[rows]


def append_row(rows: Tensor, row: Tensor) -> Tensor:
    """Return `(n + 1, k)` from `rows` `(n, k)` and `row` `(k,)`.

    The storage doubles when it is full, so ten thousand joining clients cause only a few copies of the table. Do not
    use `rows` afterwards: the result may share its storage.
    """
    count, dim = rows.shape
    if rows.untyped_storage().nbytes() < (count + 1) * dim * rows.element_size():
        larger = rows.new_empty(2 * count + 1, dim)
        larger[:count] = rows
        rows = larger
    grown = rows.as_strided((count + 1, dim), (dim, 1))
    grown[count] = row
    return grown


class HypernetworkLearner:
    """A hypernetwork, its embedding table and the optimiser that persists between rounds.

    Args:
        hypernetwork: module from descriptors `(C, k)` and a size to weights `(C, P)`.
        table: the clients' descriptors, on the hypernetwork's device. What comes in may be on any device; weights and
            state go out on the CPU.
        learning_rate: of the hypernetwork.
        embedding_learning_rate: of the embeddings.
        momentum: of the server's SGD. Rebuilding the optimiser each round loses it and several points of accuracy.
        weight_decay: of the server's SGD.
        clip: largest total norm of the gradient over hypernetwork and embeddings.
        sparse: move only the cohort's embedding rows. The paper's optimiser also moves the other rows, by momentum
            and weight decay.
        freeze: learn only embeddings (novel clients, section 5.3).
    """

    def __init__(
        self,
        hypernetwork: Hypernetwork,
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
        self.hypernetwork = hypernetwork.requires_grad_(not freeze)
        self.table = table
        self.clip = clip
        self.sparse = sparse or freeze
        self.given = False  # descriptors come from an encoder, which needs their gradient; the table stays
        self.gradient: Tensor | None = None  # `(n, k)`, of the last step with given descriptors
        self._spare: dict[Tensor, Tensor] = {}  # memory of the heads' last gradients
        rates = (learning_rate, embedding_learning_rate or learning_rate)
        parts = (list(hypernetwork.parameters()), [table.weight])
        groups = [{"params": part, "lr": rate, "initial_lr": rate} for part, rate in zip(parts, rates, strict=True)]
        self.optimizer = torch.optim.SGD(groups, learning_rate, momentum, weight_decay=weight_decay, fused=True)

    def grow(self, client_id: str, descriptor: Tensor | None = None) -> None:
        """Append an embedding row, and a zero row to the optimiser's momentum."""
        self.table.grow(client_id, descriptor)
        self.table.weight.grad = None
        state = self.optimizer.state[self.table.weight]
        if state.get("momentum_buffer") is not None:
            buffer = state["momentum_buffer"]
            state["momentum_buffer"] = append_row(buffer, buffer.new_zeros(buffer.shape[1]))

    @torch.no_grad()
    def generate(self, rows: Sequence[int], size: str) -> Tensor:
        """Return the weights `(C, P)` of clients of one size."""
        return self.write(self.table(torch.tensor(rows, device=self._device)), size)

    @torch.no_grad()
    def write(self, descriptors: Tensor, size: str) -> Tensor:
        """Return the weights `(C, P)` for any descriptors `(C, k)`."""
        return self.hypernetwork(descriptors.to(self._device), size).cpu()

    @torch.no_grad()
    def average(self, rows: Sequence[int], size: str) -> Tensor:
        """Return the mean `(P,)` of the weights of clients of one size: heads are linear in their inputs."""
        table = self.table(torch.tensor(rows, device=self._device))
        features = self.hypernetwork.features(table, size).mean(0, keepdim=True)
        return self.hypernetwork.write(features, features.new_ones(1), size)[0].cpu()

    def update(self, replies: Sequence[Reply], rule: UpdateRule) -> None:
        """Learn from a cohort.

        With one reply, both rules are the paper's step. With more,
        * `proximal` takes one step on the sum, after removing what the replies have in common. Its rate and momentum
          make each reply count as much as with one client per round (see `_proximal`);
        * `mean` takes one step on the mean gradient.
        """
        if len(replies) > 1 and rule == "proximal":
            self._proximal(replies)
        elif replies:
            for _, group in by_size(replies):
                self._backward_mixed(group, lambda gram: torch.eye(len(gram)).to(gram) / len(replies))
            self._step([reply.row for reply in replies])

    def update_asynchronously(self, reply: Reply, overlap: Sequence[Reply]) -> None:
        """Learn from one late reply; `overlap` holds the replies that were applied since its order was written.

        Clients that train at the same time learn much in common, but a step on each reply ignores the others. So the
        reply and its overlap are treated as a cohort: of `(I + eta K)^-1 delta` as in `_proximal`, only this reply's
        row is applied, with the paper's rate and momentum. Without overlap it is the paper's step.
        """
        cohort = [*(other for other in overlap if other.size == reply.size), reply]
        gradient = -reply.delta
        if len(cohort) > 1:
            with torch.no_grad():
                gram = self.hypernetwork.gram(self._features(cohort))
                gradient = -(self._share_out(gram)[-1] @ torch.stack([each.delta for each in cohort]).to(gram))
        features = self._features([reply])
        self._backward_heads(features, features.new_ones(1), reply.size, gradient[None].to(self._device))
        self._step([reply.row])

    def _proximal(self, replies: Sequence[Reply]) -> None:
        """Take one step for `C > 1` replies that is worth `C` single steps.

        Let `eta = lr / (1 - m)`, the total effect of a gradient under momentum `m`. A sum of deltas moves `h(v_i)` by
        `eta sum_j K_ij delta_j`, where `K` is the Gram matrix of the heads' inputs. It overshoots what clients share
        up to `C` times. The implicit (proximal) step towards the trained weights, `argmin_W 1/2 sum_i |W f_i -
        trained_i|^2 + 1/(2 eta) |W - W_0|^2`, has the closed form `delta' = (I + eta K)^-1 delta`. Over the `C` steps
        that it replaces, momentum decays to `m^C` and moves `lr (1 - m^C) / (1 - m)` of a gradient.
        """
        count = len(replies)
        for _, group in by_size(replies):
            self._backward_mixed(group, self._share_out)
        for name, parameter in self.hypernetwork.named_parameters():
            if name.startswith("trunk.") and parameter.grad is not None:
                parameter.grad.mul_(min(1.0, TRUNK_LIMIT / count))
        self._step([reply.row for reply in replies], count)

    def _share_out(self, gram: Tensor) -> Tensor:
        """Return `(I + eta K)^-1` `(C, C)`; its eigenvalues lie between 0 and 1."""
        momentum, rate = self.optimizer.defaults["momentum"], self.optimizer.defaults["lr"]
        return torch.linalg.inv(torch.eye(len(gram)).to(gram) + rate / (1 - momentum) * gram)

    @property
    def _device(self) -> torch.device:
        return self.table.weight.device

    def _features(self, replies: Sequence[Reply]) -> Tensor:
        rows = torch.tensor([reply.row for reply in replies], device=self._device)
        return self.hypernetwork.features(self.table(rows), replies[0].size)

    def _backward_mixed(self, replies: Sequence[Reply], mixing: Callable[[Tensor], Tensor]) -> None:
        """Add the vector-Jacobian product with `-M @ deltas` of replies of one size, `M = mixing(K)` `(C, C)`.

        Heads are linear in their inputs. With `M` symmetric, a head's gradient `(M D)^T F` is `D^T (M F)`, and that of
        the features, `M D W`, is `M (D W)`. So `M` is applied to the features, which are a thousand times smaller than
        the weights. The weights are processed for as many clients at a time as memory allows.
        """
        features = self._features(replies)
        leaf = features.detach().requires_grad_()  # backpropagate through the trunk once, after all clients
        mixed = mixing(self.hypernetwork.gram(leaf.detach()))
        at_once = max(1, BYTES_AT_ONCE // (replies[0].delta.numel() * replies[0].delta.element_size()))
        for start in range(0, len(replies), at_once):
            rows = mixed[start : start + at_once]
            deltas = torch.stack([reply.delta for reply in replies[start : start + at_once]])
            gradient = deltas.to(self._device).neg_()
            self._backward_heads(torch.tensordot(rows, leaf, 1), rows.sum(1), replies[0].size, gradient)
        if features.requires_grad:
            features.backward(leaf.grad)

    def _backward_heads(self, features: Tensor, ones: Tensor, size: str, gradient: Tensor) -> None:
        """Add the vector-Jacobian product of the hypernetwork's `write` with `gradient` `(C, P)` to `.grad`.

        The gradient of a plain head takes the memory of the last one: the operating system takes longer to hand out
        fresh memory for 12 million numbers than the product takes.
        """
        head = None if isinstance(self.hypernetwork, ChunkedHypernetwork) else self.hypernetwork.heads[size]
        if not isinstance(head, nn.Linear):
            self.hypernetwork.write(features, ones, size).backward(gradient)
            return
        for parameter, factors in ((head.weight, features), (head.bias, ones[:, None])):
            if parameter is not None and parameter.requires_grad:
                is_first = parameter.grad is None
                if parameter.grad is None:
                    spare = self._spare.get(parameter)
                    parameter.grad = self._spare[parameter] = torch.empty_like(parameter) if spare is None else spare
                flat = parameter.grad.view(gradient.shape[1], -1)
                torch.addmm(flat, gradient.T, factors.detach(), beta=0 if is_first else 1, out=flat)
        if features.requires_grad:
            features.backward(gradient @ head.weight.detach())

    def _step(self, rows: Sequence[int], worth: int = 1) -> None:
        """Clip, take an optimiser step that counts as `worth` steps, and clear the gradients."""
        if self.given:
            self.gradient, self.table.weight.grad = self.table.weight.grad, None
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if norm + 1e-6 > self.clip:  # `clip_grad_norm_` would multiply by 1 otherwise
            nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        if self.optimizer.defaults["momentum"]:
            for parameter in parameters:
                # The fused optimiser cannot step parameters with and without momentum together, which happens when a
                # size joins a cohort for the first time. Zero momentum is the same as none.
                if self.optimizer.state[parameter].get("momentum_buffer") is None:
                    self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = self.optimizer.defaults["momentum"]
        # The step gets the effect of `worth` steps on one gradient, with as much decay of momentum.
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 - momentum**worth) / (1 - momentum)
            group["momentum"] = momentum**worth
        if self.sparse:
            self._step_rows(rows)
        else:
            self.optimizer.step()
        # None, not zero: momentum and weight decay must skip a head whose size was not in the cohort.
        self.optimizer.zero_grad(set_to_none=True)

    def _step_rows(self, rows: Sequence[int]) -> None:
        """Take the step, then restore the embedding rows and momentum of clients outside the cohort."""
        table, state = self.table.weight, self.optimizer.state[self.table.weight]
        before, momentum = table.detach().clone(), state.get("momentum_buffer")
        momentum = torch.zeros_like(before) if momentum is None else momentum.clone()
        self.optimizer.step()
        moved = torch.tensor(rows, device=self._device)
        for now, restored in ((table.detach(), before), (state.get("momentum_buffer"), momentum)):
            if now is not None:
                restored[moved] = now[moved]
                now.copy_(restored)

    def state(self) -> dict[str, Tensor]:
        """Return the learner's state by name, on the CPU: parameters, buffers, embeddings and momentum."""
        tensors = {f"hypernetwork.{name}": value for name, value in self.hypernetwork.state_dict().items()}
        tensors["embeddings"] = self.table.weight.detach()
        for name, parameter in self._named_parameters():
            momentum = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                tensors[f"momentum.{name}"] = momentum
        return {name: tensor.cpu() for name, tensor in tensors.items()}

    def load(self, tensors: Mapping[str, Tensor], with_momentum: bool = True) -> None:
        """Load what `state` returned; the embedding table gets as many rows as were stored."""
        prefix = "hypernetwork."
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        self.hypernetwork.load_state_dict(own)
        self.table.weight.data = tensors["embeddings"].clone().to(self.table.weight)
        self.optimizer.state.clear()
        for name, parameter in self._named_parameters():
            if with_momentum and f"momentum.{name}" in tensors:
                buffer = tensors[f"momentum.{name}"].clone().to(parameter)
                self.optimizer.state[parameter] = {"momentum_buffer": buffer}

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.hypernetwork.named_parameters()
        yield "embeddings", self.table.weight


def by_size(replies: Sequence[Reply]) -> Iterator[tuple[str, list[Reply]]]:
    """Yield each size with its replies."""
    ordered = sorted(replies, key=lambda reply: reply.size)
    return ((size, list(group)) for size, group in groupby(ordered, key=lambda reply: reply.size))
