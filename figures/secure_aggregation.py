"""What secure aggregation costs: CPU seconds and bytes of a round of FedAvg, with masks and without, in turns.

All clients and the server in one process on one thread (the inline engine), the paper's LeNet of 121,182 floats, one
local step with one image: what is left is the round itself, and seconds are those of all clients one after the other.
`vanish` is a round in which a quarter of the clients stay away once keys are shared, so that the server makes their
masks, one for each client that is left; there are no bytes of theirs. Bytes are those of messages (`weigh`), to and
from one client on average.

    python -m figures.secure_aggregation [--quick] [--cohorts 4,16,64]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.federation import PATIENCE_S, write_images
from benchmarks.measure import machine
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import DataConfig, LocalConfig, RunConfig
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.server.loop.federation import Federation, Traffic
from hyperbloom.strategies import make_strategy
from hyperbloom.strategies.personalised import Leg
from hyperbloom.strategies.roster import Client, Roster
from hyperbloom.strategies.secure_aggregation import secure_legs

WAYS = ("plain", "secure", "vanish")


class Rounds:
    """A strategy whose clients have joined; each call of `play` is a training round."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.grid = config, inline_grid(config, folder, vectorise=False)
        roster = Roster(config.seed)
        self.strategy = make_strategy(config, "benchmark", roster)
        self.federation = Federation(self.grid, roster, lambda text: None)
        self.federation.gather(self.strategy, config.clients, PATIENCE_S)
        roster.sort(0)
        self.federation.begin(self.strategy, 0)
        self._number = 0

    def play(self, way: str) -> tuple[float, Traffic]:
        """Play a round one way; return its seconds and bytes.

        Raises:
            RuntimeError: nothing was learned: such a round measures nothing.
        """
        self._number += 1
        cohort = self.strategy.begin_round(self._number)
        vanished = len(cohort) // 4 if way == "vanish" else 0
        self.federation.take_traffic()
        start = time.process_time()
        legs = (self.strategy.legs if way == "plain" else self._secure)(self._number, cohort)
        for place, leg in enumerate(legs):
            clients = leg.clients[: len(leg.clients) - vanished] if place == 2 else leg.clients
            leg.take(self.federation.exchange([leg.orders(clients)], PATIENCE_S))
        seconds = time.process_time() - start
        if len(self.strategy.round.results) != len(cohort) - vanished:
            raise RuntimeError(f"round {self._number}: {self.strategy.round.refused}")
        return seconds, self.federation.take_traffic()

    def _secure(self, number: int, cohort: Sequence[Client]) -> Iterator[Leg]:
        return secure_legs(self.strategy, number, cohort)


def run(cohort: int, repetitions: int, model: str = "lenet") -> list[str]:
    """Return the rows of a cohort's table."""
    with tempfile.TemporaryDirectory() as name:
        data = write_images(Path(name) / "images.npz", train=10 * cohort, held_out=10 * cohort)
        config = RunConfig(
            strategy="fedavg",
            clients=cohort,
            cohort=cohort,
            model=model,
            local=LocalConfig(steps=1, batch_size=1),
            data=DataConfig(name=str(data), split="iid"),
            secure_aggregation=True,
        )
        rounds = Rounds(config, Path(name))
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        traffic: dict[str, Traffic] = {}
        for turn in range(1 + repetitions):
            for way in WAYS:
                took, traffic[way] = rounds.play(way)
                if turn:
                    seconds[way].append(took)
    client_for.cache_clear()
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    return [
        f"| {cohort} | {way} | {medians[way]:.3f} ({min(seconds[way]):.3f} to {max(seconds[way]):.3f}) | "
        f"{medians[way] / medians['plain']:.2f} | {traffic[way].down // cohort:,} | {traffic[way].up // cohort:,} |"
        for way in WAYS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short settings: to see that it works, not to quote")
    parser.add_argument("--cohorts", default="4,16,64", metavar="A,B", help="sizes (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}\n\n| cohort | round | CPU seconds | times plain | bytes to a client | bytes from it |")
    print("|---:|---|---|---:|---:|---:|", flush=True)
    for cohort in args.cohorts.split(","):
        print("\n".join(run(int(cohort), 1 if args.quick else 5)), flush=True)


if __name__ == "__main__":
    main()
