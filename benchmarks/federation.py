"""What the programs share: synthetic CIFAR-10, a run over it, and rounds that are played one at a time."""

import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.serverapp import Grid

from hyperbloom.common.config import DataConfig, LocalConfig, RunConfig
from hyperbloom.common.wire.orders import Scope
from hyperbloom.server.loop.admission import Admission
from hyperbloom.server.loop.exchange import Outcome
from hyperbloom.server.loop.federation import Federation
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.loop.rounds import Run
from hyperbloom.server.loop.session import greeting_of
from hyperbloom.strategies import make_algorithm

__all__ = ["LENET_FLOATS", "Rounds", "run_config", "write_images"]

LENET_FLOATS = 121_182
"""Parameters of the paper's target network on CIFAR-10 (16 and 32 filters)."""

PATIENCE_S = 180.0


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
        gains=False,
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
    """A run whose clients have joined; each call of `play` is a round of training.

    Args:
        config: the run.
        grid: any grid with `config.clients` clients on it.
        run_id: names the run to the clients.
    """

    def __init__(self, config: RunConfig, grid: Grid, run_id: str) -> None:
        """Wait until the clients are here, and build the hypernetwork."""
        algorithm, roster = make_algorithm(config), Roster()
        federation = Federation(grid, roster, lambda text: None)
        federation.admission, federation.greeting = Admission(config, algorithm), greeting_of(algorithm)
        federation.gather(config.clients, config.join_timeout_s)
        roster.sort(0)
        federation.admission.begin(roster, 0)
        self.run = Run(config, algorithm, federation, [], Scope(run_id, 0, config.seed))
        self._number = 0

    def play(self) -> float:
        """Play a round of training and return its seconds.

        Raises:
            RuntimeError: a client did not answer, or not well: such a round measures nothing.
        """
        self._number += 1
        outcome, start = Outcome(), time.perf_counter()
        self.run.train(self._number, outcome)
        seconds = time.perf_counter() - start
        if outcome.refused or len(outcome.results) != self.run.config.cohort:
            raise RuntimeError(f"round {self._number}: {outcome.refused or 'replies are missing'}")
        return seconds

    def close(self) -> None:
        """Tell the clients that the run is over."""
        self.run.federation.say_goodbye("the benchmark is over")
