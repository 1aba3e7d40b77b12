"""Local: every client trains alone. A federation should beat this baseline."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from hyperbloom.strategies.algorithm import Algorithm
from hyperbloom.strategies.exchange import Client, Update


class Local(Algorithm):
    """No weights travel. Each client continues its own model, for as many steps as in the other strategies."""

    private: ClassVar[str] = "all"
    reply: ClassVar[str] = "nothing"
    own_models: ClassVar[Literal["no", "may", "must"]] = "may"
    asynchronous: ClassVar[bool] = True
    noise_at: ClassVar[tuple[str, ...]] = ("client", "server")  # nothing is sent
    sums: ClassVar[bool] = True

    def weights(self, clients: Sequence[Client]) -> None:
        """Send nothing."""

    def learn(self, updates: Sequence[Update]) -> None:
        """Learn nothing."""
