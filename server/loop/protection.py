"""Protection around an algorithm's exchanges: compression and noise. The algorithm knows of neither.

See common/secrecy/noise.py for the formulas of both places and the guarantees, masks.py for secure aggregation.
"""

from collections.abc import Sequence
from dataclasses import replace

from hyperbloom.common.compression import Codec
from hyperbloom.common.config import FEWEST_CLIENTS, MOST_CLIENTS, RunConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.secrecy.noise import noisy_mean
from hyperbloom.common.wire.orders import Noise, TrainOrder
from hyperbloom.server.loop.listener import Listener
from hyperbloom.strategies.algorithm import Algorithm
from hyperbloom.strategies.exchange import Client, Exchanges, Train, Update, through, train


def check_protection(config: RunConfig, algorithm: Algorithm) -> None:
    """Refuse settings that do not fit an algorithm.

    Raises:
        ConfigError: noise would not cover all that the algorithm sends, secure aggregation would hide the single
            replies that it needs, or it does not support own models, asynchronous mode or compression here.
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
    """Adds compression and noise to the exchanges of an algorithm; `listeners` hear of noise before it is asked for."""

    def __init__(self, algorithm: Algorithm, listeners: Sequence[Listener]) -> None:
        self.config, self._listeners = algorithm.config, listeners
        self._codec = Codec.parse(self.config.compression)
        self._reply = algorithm.reply

    def training(self, ask: Train) -> Train:
        """Return the training exchange with orders that ask for the run's noise and compression."""
        privacy, codec, sends = self.config.privacy, self._codec, self._reply != "nothing"
        on_client, noisy = privacy.where == "client", sends and privacy.where != "none"
        noise = Noise(privacy.clip, privacy.noise) if on_client and sends else None
        # Where changes are hidden, an algorithm that receives none must not learn losses either. Where the server adds
        # the noise, a training that diverges must not take it away: of a cohort of one there would be no change at all.
        quiet = privacy.where == "server" or (not sends and (on_client or self.config.secure_aggregation))

        def orders(clients: Sequence[Client]) -> list[TrainOrder]:
            for listener in self._listeners if noisy else ():
                listener.released([client.client_id for client in clients])
            return [replace(order, noise=noise, quiet=quiet, codec=codec) for order in ask.orders(clients)]

        keep_sent = ask.keep_sent or codec is not None or privacy.where == "server"
        return replace(ask, orders=orders, codec=codec, keep_sent=keep_sent)

    def learned(self, updates: Sequence[Update]) -> Sequence[Update]:
        """Return the updates to learn from. With noise on the server, each becomes the noisy mean."""
        privacy = self.config.privacy
        pairs = [(u, u.sent, u.returned) for u in updates if u.sent is not None and u.returned is not None]
        if privacy.where != "server" or not pairs:
            return updates
        changes = [returned if self._reply == "delta" else returned - sent for _, sent, returned in pairs]
        # Divide by the configured cohort: a client's influence must not depend on how many answered.
        mean = noisy_mean(changes, privacy.clip, privacy.noise, self.config.cohort)
        return [replace(u, returned=mean if self._reply == "delta" else sent + mean) for u, sent, _ in pairs]

    def round(self, exchanges: Exchanges[None]) -> Exchanges[None]:
        """Play a round's exchanges with protected training."""
        return through(exchanges, self._train)

    def _train(self, ask: Train) -> Exchanges[Sequence[Update]]:
        return self.learned((yield from train(self.training(ask))))
