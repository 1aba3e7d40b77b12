"""A strategy of your own: FedAvg with server momentum (Hsu, Qi, Brown, 2019, https://arxiv.org/abs/1909.06335).

    cd examples
    flower-server --strategy momentum:FedAvgM --engine inline --rounds 20 --set beta=0.9

With m the mean of the clients' weights, `learn` is:  v <- beta v + (m - w),  w <- w + rate v
"""

from collections.abc import Mapping, Sequence

from pydantic import Field
from torch import Tensor

from hyperbloom.common.config import Rate, Section
from hyperbloom.strategies.algorithm import Setting
from hyperbloom.strategies.exchange import Update
from hyperbloom.strategies.fedavg import FedAvg, average


class Options(Section):
    """What `--set` reaches; checked before anything starts."""

    beta: float = Field(0.9, ge=0, lt=1, description="momentum of the server; 0 with rate 1 is FedAvg")
    rate: Rate = Field(1.0, description="how far the server goes along it")


class FedAvgM(FedAvg):
    """FedAvg with server momentum."""

    options: Options

    def build(self, setting: Setting) -> None:
        super().build(setting)
        self.velocity = 0 * self.global_weights

    def learn(self, updates: Sequence[Update]) -> None:
        if updates:
            self.velocity = self.options.beta * self.velocity + (average(updates) - self.global_weights)
            self.global_weights = self.global_weights + self.options.rate * self.velocity

    # The two methods below carry v over a crash (`--resume`).
    def checkpoint(self) -> dict[str, Tensor]:
        return {**self.state(), "velocity": self.velocity}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.velocity = tensors["velocity"]
        super().restore({name: tensors[name] for name in self.state()})
