"""Local: every client trains alone. The baseline that a federation has to beat to be worth its while."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from hyperbloom.strategies.algorithm import Algorithm
from hyperbloom.strategies.exchange import Client, Update

__all__ = ["Local"]


class Local(Algorithm):
    """No weights travel; clients go on from where they stopped, for as many steps as in the other strategies."""

    private: ClassVar[str] = "all"
    reply: ClassVar[str] = "nothing"
    own_models: ClassVar[Literal["no", "may", "must"]] = "may"
    asynchronous: ClassVar[bool] = True
    noise_at: ClassVar[tuple[str, ...]] = ("client", "server")  # nothing is sent
    sums: ClassVar[bool] = True

    def weights(self, clients: Sequence[Client]) -> None:
        """Nothing is sent."""

    def learn(self, updates: Sequence[Update]) -> None:
        """Nothing is learned."""
