"""A strategy of your own: FedAvg with server momentum (Hsu, Qi, Brown, 2019, https://arxiv.org/abs/1909.06335).

    cd examples
    flower-server --strategy momentum:FedAvgM --engine inline --rounds 20 --set beta=0.9
    flower-server --explain momentum:FedAvgM

With m the mean of the clients' weights:  v <- beta v + (m - w),  w <- w + rate v.
Two methods learn; the two below them carry v over a crash (`--resume`).
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from hyperbloom.common.config import Rate, Section, Share
from hyperbloom.strategies.fedavg import FedAvg
from hyperbloom.strategies.personalised import ClientUpdate


class Options(Section):
    """What `--set` reaches; checked before anything starts."""

    beta: Share = Field(0.9, description="momentum of the server; 0 with rate 1 is FedAvg")
    rate: Rate = Field(1.0, description="how far the server goes along it")


class FedAvgM(FedAvg):
    """FedAvg with server momentum."""

    options_type: ClassVar[type[Section]] = Options
    options: Options

    def build(self) -> None:
        super().build()
        self.velocity = 0 * self.weights

    def update(self, updates: Sequence[ClientUpdate]) -> None:
        if updates:
            self.velocity = self.options.beta * self.velocity + (self.average(updates) - self.weights)
            self.weights = self.weights + self.options.rate * self.velocity

    def checkpoint(self) -> dict[str, Tensor]:
        return {**self.state(), "velocity": self.velocity}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.velocity = tensors["velocity"]
        super().restore({name: tensors[name] for name in self.state()})
