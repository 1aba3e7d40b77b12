"""ODPFL-HN whose network for all has the server's momentum, as in FedAvgM.

`--strategy figures.shared_momentum:ODPFLMomentum` runs it, with `start: common` alone. Hsu, Qi, Brown: Measuring the
Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019,
https://arxiv.org/abs/1909.06335.

Single clients move the hypernetwork one after the other, with momentum over the last of them. A cohort moves it once,
at most by what its clients have in common. Momentum from round to round gives the network for all the same advantage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hyperbloom.common.errors import ConfigError
from hyperbloom.strategies.hypernetworks.learner import Reply, by_size
from hyperbloom.strategies.odpfl import ODPFL
from hyperbloom.strategies.pfedhn import shrunk_mean


class ODPFLMomentum(ODPFL):
    """w moves by v <- m v + s, s the estimated mean change of all clients, m the option `momentum`."""

    def check(self) -> None:
        """Refuse the paper's start, which has no network for all."""
        super().check()
        if self.options.start != "common":
            raise ConfigError(f"options.start: expected common, found {self.options.start}")

    def make(self, dim: int) -> None:
        """Make all networks; w stands still."""
        super().make(dim)
        self._velocity: dict[str, Tensor] = {}  # by head: v `(P,)`

    def _average(self, replies: Sequence[Reply]) -> list[Reply]:
        left: list[Reply] = []
        for head, group in by_size(replies):
            deltas, clients = torch.stack([reply.delta for reply in group]), len(self._rows_of(head))
            step = shrunk_mean(deltas, clients)
            self._velocity[head] = step + self.options.momentum * self._velocity.get(head, torch.zeros_like(step))
            self.learner.hypernetwork.move_start(head, self._velocity[head])
            left += [replace(reply, delta=reply.delta - step) for reply in group]
        return sorted(left, key=lambda reply: reply.row)

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the state and the velocities."""
        return super().checkpoint() | {f"velocity.{head}": v for head, v in self._velocity.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore everything, the velocities too."""
        super().restore(tensors)
        prefix = "velocity."
        self._velocity = {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}
