"""What the programs share: synthetic CIFAR-10, a run over it, and rounds that are driven one at a time.

`Rounds` is the server's own loop (`hyperbloom.server.loop.rounds`) with the exchange of messages left open. So two ways of
exchanging them can be timed around the same algorithm.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from hyperbloom.common.config import DataConfig, LocalConfig, RunConfig
from hyperbloom.server.loop.federation import Federation
from hyperbloom.server.loop.roster import Roster
from hyperbloom.strategies import make_algorithm

__all__ = ["LENET_FLOATS", "Rounds", "run_config", "write_images"]

LENET_FLOATS = 121_182
"""Parameters of the paper's target network on CIFAR-10 (16 and 32 filters)."""

PATIENCE_S = 180.0

Exchange = Callable[[list[Message]], Iterable[Message]]


def write_images(path: Path, train: int, held_out: int, seed: int = 0) -> Path:
    """Write random 32 x 32 colour images in ten classes, in the form that `--data FILE.npz` takes.

    Args:
        path: where; must end in `.npz`.
        train: training images.
        held_out: validation images, and as many test images.
        seed: of the random images.
    """
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    for part, count in (("train", train), ("val", held_out), ("test", held_out)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        # Every class is there, however small the part: the number of classes is read from the labels.
        arrays[f"y_{part}"] = rng.permutation(np.arange(count) % 10)
    np.savez(path, **arrays)
    return path


def run_config(data: Path, clients: int, cohort: int, local: LocalConfig, rounds: int = 1) -> RunConfig:
    """Return a run of pFedHN with the paper's LeNet over images that the clients share equally."""
    return RunConfig(
        clients=clients,
        cohort=cohort,
        rounds=rounds,
        eval_every=rounds,
        model="lenet",
        local=local,
        data=DataConfig(name=str(data), split="iid"),
        join_timeout_s=PATIENCE_S,
        round_timeout_s=PATIENCE_S,
    )


class Rounds:
    """A strategy whose clients have joined; each call of `play` is a training round.

    Args:
        config: the run.
        grid: any grid with `config.clients` clients on it.
        run_id: names the run to the clients.
    """

    def __init__(self, config: RunConfig, grid: Grid, run_id: str) -> None:
        """Wait until the clients are here, and build the hypernetwork."""
        self.config, self.grid = config, grid
        roster = Roster(config.seed)
        self.strategy = make_algorithm(config, run_id, roster)
        self.federation = Federation(grid, roster, lambda text: None)
        self.federation.gather(self.strategy, config.clients, config.join_timeout_s)
        roster.sort(0)
        self.federation.begin(self.strategy, 0)
        self._number = 0

    def exchange(self, orders: list[Message]) -> Iterable[Message]:
        """Exchange messages as `flower-server` does."""
        return self.federation.exchange([orders], self.config.round_timeout_s)

    def play(self, exchange: Exchange | None = None) -> float:
        """Play a training round and return its seconds.

        Args:
            exchange: sends orders and returns the replies; `flower-server`'s way by default.

        Raises:
            RuntimeError: a client did not answer, or not well: such a round measures nothing.
        """
        self._number += 1
        start = time.perf_counter()
        orders = self.strategy.configure_train(self._number, ArrayRecord(), ConfigRecord(), self.grid)
        self.strategy.aggregate_train(self._number, list((exchange or self.exchange)(orders)))
        seconds = time.perf_counter() - start
        if self.strategy.round.refused or len(self.strategy.round.results) != self.config.cohort:
            raise RuntimeError(f"round {self._number}: {self.strategy.round.refused or 'replies are missing'}")
        return seconds

    def close(self) -> None:
        """Tell the clients that the run is over."""
        self.federation.say_goodbye("the benchmark is over")
