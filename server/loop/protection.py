"""What goes around an algorithm's exchanges: compression, noise, masks. The algorithm does not know of any of them.

    client   delta_i' = clip(delta_i) + N(0, (z C)^2 I)             on the client, before anything leaves it
    server   w <- w + (sum_i clip(delta_i) + N(0, (z C)^2 I)) / m   m the cohort as configured, whoever answers

See common/secrecy/noise.py for what they promise, masks.py for secure aggregation.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from hyperbloom.common.compression import Codec
from hyperbloom.common.config import FEWEST_CLIENTS, MOST_CLIENTS, RunConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.secrecy.noise import noisy_mean
from hyperbloom.common.wire import Noise, TrainOrder
from hyperbloom.strategies.algorithm import Algorithm
from hyperbloom.strategies.exchange import Client, Exchanges, Train, Update, through, train

__all__ = ["Protection", "check_protection"]

Release = Callable[[Sequence[str]], None]


def check_protection(config: RunConfig, algorithm: Algorithm) -> None:
    """Refuse what does not go with an algorithm.

    Raises:
        ConfigError: noise would not cover what it sends, it needs single replies where only sums come, and the like.
    """
    name, where = config.strategy, config.privacy.where
    if config.models and algorithm.own_models == "no":
        raise ConfigError(f"models: {name} sends the same model to all clients; set model instead")
    if config.asynchronous and not algorithm.asynchronous:
        raise ConfigError(f"asynchronous: {name} learns from whole rounds; set it to false")
    if where != "none" and where not in algorithm.noise_at:
        able = f"with {' or '.join(algorithm.noise_at)} it can" if algorithm.noise_at else "it sends more than changes"
        raise ConfigError(f"privacy.where: noise on the {where} cannot hide all that {name} sends; {able}")
    if Codec.parse(config.compression) is not None and where == "server":
        raise ConfigError(
            "compression: expected none with privacy.where=server: what compression leaves out of one reply comes with "
            "the next, and the bound on each change would not hold"
        )
    if not config.secure_aggregation:
        return
    if not algorithm.sums:
        why = f"cannot work: {name} needs each single reply"
        raise ConfigError(f"secure_aggregation: it {why}; leave it out, or let clients add noise (--dp-clients)")
    if not FEWEST_CLIENTS <= config.cohort <= MOST_CLIENTS:
        raise ConfigError(
            f"cohort: expected {FEWEST_CLIENTS} to {MOST_CLIENTS} with secure_aggregation, found {config.cohort}; "
            "a sum of fewer hides nobody, one of more takes too many masks"
        )


class Protection:
    """Goes around the exchanges of one algorithm.

    Args:
        algorithm: whose exchanges they are.
        release: called with the names of those whose changes with noise are about to be asked for.
    """

    def __init__(self, algorithm: Algorithm, release: Release) -> None:
        """Read what the run wants."""
        self.config, self._release = algorithm.config, release
        self._codec = Codec.parse(self.config.compression)
        self._reply = algorithm.reply

    def training(self, ask: Train) -> Train:
        """Return an exchange in which clients train as the run wants them to protect and compress what they send."""
        write, codec = ask.orders, self._codec
        noisy = self._reply != "nothing" and self.config.privacy.where != "none"

        def orders(clients: Sequence[Client]) -> list[TrainOrder]:
            if noisy:
                self._release([client.client_id for client in clients])
            return [self._protected(order) for order in write(clients)]

        keep_sent = ask.keep_sent or codec is not None or self.config.privacy.where == "server"
        return replace(ask, orders=orders, codec=codec, keep_sent=keep_sent)

    def _protected(self, order: TrainOrder) -> TrainOrder:
        privacy = self.config.privacy
        on_client, sends = privacy.where == "client", self._reply != "nothing"
        noise = Noise(privacy.clip, privacy.noise) if on_client and sends else None
        # Where changes are hidden, algorithms to which none are sent must not be told more than others.
        quiet = not sends and (on_client or self.config.secure_aggregation)
        return replace(order, noise=noise, quiet=quiet, codec=self._codec)

    def learned(self, updates: Sequence[Update]) -> Sequence[Update]:
        """Return what the algorithm learns from: with noise on the server the noisy mean, as every client's update."""
        privacy = self.config.privacy
        pairs = [(u, u.sent, u.returned) for u in updates if u.sent is not None and u.returned is not None]
        if privacy.where != "server" or not pairs:
            return updates
        changes = [returned if self._reply == "delta" else returned - sent for _, sent, returned in pairs]
        # Of as many as were to be asked: how many answered must not change how much one of them moves the mean.
        mean = noisy_mean(changes, privacy.clip, privacy.noise, self.config.cohort)
        return [replace(u, returned=mean if self._reply == "delta" else sent + mean) for u, sent, _ in pairs]

    def round(self, exchanges: Exchanges[None]) -> Exchanges[None]:
        """Play a round's exchanges with all of this around those that train."""
        return through(exchanges, self._train)

    def _train(self, ask: Train) -> Exchanges[Sequence[Update]]:
        return self.learned((yield from train(self.training(ask))))
