"""Local: every client trains alone. A federation should beat this baseline."""

from collections.abc import Sequence

from hyperbloom.strategies.algorithm import Algorithm
from hyperbloom.strategies.exchange import Client, Update


class Local(Algorithm):
    """No weights travel. Each client continues its own model, for as many steps as in the other strategies."""

    private = "all"
    reply = "nothing"
    own_models = "may"
    asynchronous = True
    noise_at = ("client", "server")  # nothing is sent
    sums = True

    def weights(self, clients: Sequence[Client]) -> None:
        """Send nothing."""

    def learn(self, updates: Sequence[Update]) -> None:
        """Learn nothing."""
