"""What secure aggregation costs: CPU seconds and bytes of a round of FedAvg, with masks and without, in turns.

All clients and the server in one process on one thread (the inline engine), the paper's LeNet of 121,182 floats, one
local step with one image: what is left is the round itself, and seconds are those of all clients one after the other.
`vanish` is a round in which a quarter of the clients stay away once keys are shared, so that the server makes their
masks, one for each client that is left; there are no bytes of theirs. Bytes are those of messages (`weigh`), to and
from one client on average.

    python -m figures.secure_aggregation --results FILE        # 2 min; a new file measures anew
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.federation import PATIENCE_S, write_images
from benchmarks.measure import machine
from figures.pages import table_row
from figures.study import Line, Study
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import DataConfig, LocalConfig, RunConfig
from hyperbloom.common.wire.orders import Scope
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.server.loop.admission import Admission
from hyperbloom.server.loop.exchange import Outcome
from hyperbloom.server.loop.federation import Federation
from hyperbloom.server.loop.masks import under_masks
from hyperbloom.server.loop.post import Traffic
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.loop.rounds import Run
from hyperbloom.server.loop.session import greeting_of
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.exchange import Exchanges

WAYS = ("plain", "secure", "vanish")
MASKED = 2
"""Place of the exchange that brings masked changes among those of a round."""


class Rounds:
    """A run whose clients have joined; each call of `play` is a training round."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        roster, algorithm = Roster(), make_algorithm(config)
        federation = Federation(inline_grid(config, folder, vectorise=False), roster, lambda event: None)
        federation.admission, federation.greeting = Admission(config, algorithm, None), greeting_of(algorithm)
        federation.gather(config.clients, PATIENCE_S)
        roster.sort(0)
        federation.admission.begin(roster, 0)
        self.run = Run(config, algorithm, federation, [], Scope("benchmark", 0, config.seed))
        self._number = 0

    def play(self, way: str) -> tuple[float, Traffic]:
        """Play a round one way; return its seconds and bytes.

        Raises:
            RuntimeError: nothing was learned: such a round measures nothing.
        """
        self._number += 1
        run, outcome, turn = self.run, Outcome(), self.run.draw(self._number)
        vanished = len(turn.cohort) // 4 if way == "vanish" else 0
        run.federation.post.take_traffic()
        start = time.process_time()
        exchanges: Exchanges[None] = run.protection.round(run.algorithm.round(turn))
        if way != "plain":
            exchanges = under_masks(exchanges, run.config, turn, outcome, run.director.blame)
        run.director.play(without(exchanges, vanished), outcome, len(turn.cohort))
        seconds = time.process_time() - start
        if len(outcome.results) != len(turn.cohort) - vanished:
            raise RuntimeError(f"round {self._number}: {outcome.refused}")
        return seconds, run.federation.post.take_traffic()


def without(exchanges: Exchanges[None], vanished: int) -> Exchanges[None]:
    """Play exchanges with so many clients less when masked changes are asked for."""
    answers: Any = None
    for place in itertools.count():
        try:
            ask = exchanges.send(answers)
        except StopIteration:
            return
        left = len(ask.clients) - vanished if place == MASKED else len(ask.clients)
        answers = yield replace(ask, clients=ask.clients[:left])


def measure(cohort: int, repetitions: int = 5, model: str = "lenet") -> Line:
    """Play rounds; returns seconds of each, and bytes of one, by way."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        data = write_images(Path(name) / "images.npz", train=10 * cohort, held_out=10 * cohort)
        config = RunConfig(
            gains=False,
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
    ways = {
        way: {
            "seconds": [round(one, 4) for one in seconds[way]],
            "down": moved.down // cohort,
            "up": moved.up // cohort,
        }
        for way, moved in traffic.items()
    }
    return {"machine": machine(), **ways}


def table(lines: Sequence[Line]) -> str:
    """Return what there is as Markdown: medians of seconds, least and most."""
    heads = ["cohort", "round", "CPU seconds", "times plain", "bytes to a client", "bytes from it"]
    rows = [table_row(heads), table_row(["---:", "---", "---", *["---:"] * 3])]
    for line in lines:
        plain = statistics.median(line["plain"]["seconds"])
        for way in WAYS:
            took, middle = line[way]["seconds"], statistics.median(line[way]["seconds"])
            cells = [str(line["cohort"]), way, f"{middle:.3f} ({min(took):.3f} to {max(took):.3f})"]
            rows.append(table_row([*cells, f"{middle / plain:.2f}", f"{line[way]['down']:,}", f"{line[way]['up']:,}"]))
    return "\n".join(rows) + "\n"


STUDY = Study("secure_aggregation", [{"cohort": cohort} for cohort in (4, 16, 64)], measure, {"table": table})

TABLES = STUDY.pages

if __name__ == "__main__":
    STUDY.main(__doc__)
