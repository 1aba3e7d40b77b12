"""What a fifth of hostile clients costs pFedHN, with and without robust updates.

Ten virtual clients share the digits, all take part in every round; clients 0 and 1 attack:

* sign: they send back five times their change with the opposite sign;
* labels: their training labels are 9 - y, all else they do as they should.

What is reported is the mean test accuracy, in percent, of the eight others after the last round. The server starts with
one network for all, or as the paper's hypernetwork.

    python -m figures.robust                                   # what is missing (10 min)
    python -m figures.robust --only attack=labels seed=0       # some of it
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message

from figures.pages import table_row
from figures.study import Line, Study
from hyperbloom.client.app import app
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import DataConfig, LocalConfig, RunConfig
from hyperbloom.common.layout import Weights
from hyperbloom.common.wire.orders import TrainOrder, TrainResult
from hyperbloom.common.wire.pack import pack, unpack
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.server.loop.listener import Listener, RoundReport
from hyperbloom.server.loop.session import Session

HOSTILE = ("client-0", "client-1")
STRENGTH = 5.0
ATTACKS = {"none": "none", "sign": "signs flipped, times five", "labels": "labels flipped"}
STARTS = ("common", "hypernetwork")
SEEDS = range(3)
DEFENCES: dict[str, dict[str, Any]] = {
    "none": {},
    "clip": {"clip_deltas": "median"},
}


class Last(Listener):
    """Keeps the accuracy of the honest clients at the latest evaluation."""

    accuracy = 0.0

    def round_done(self, report: RoundReport) -> None:
        """Take the mean over them."""
        if report.outcome.evaluation:
            scores = report.outcome.evaluation.scores.items()
            self.accuracy = statistics.fmean(
                100 * result.test.values[0] for name, result in scores if name not in HOSTILE
            )


def accuracy(attack: str, defence: str, config: RunConfig) -> float:
    """Run once and return the honest clients' mean test accuracy."""
    client_for.cache_clear()
    options = {**config.options, **DEFENCES[defence]}
    config, last = config.model_copy(update={"options": options}), Last()
    with tempfile.TemporaryDirectory() as folder:
        grid = inline_grid(config, Path(folder))
        if attack == "labels":
            for context in grid._contexts.values():
                settings = ClientSettings.from_node_config(context.node_config)
                if settings.client_id in HOSTILE:
                    client = client_for(settings)
                    client.train_data = replace(client.train_data, labels=9 - client.train_data.labels)
        if attack == "sign":
            grid.app = _flipping(app)
        Session(config, grid, "benchmark", [last]).run()
    return last.accuracy


def _flipping(honest: Callable[[Message, Context], Message]) -> Callable[[Message, Context], Message]:
    def answer(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type != TrainOrder.message_type or context.node_config["client-id"] not in HOSTILE:
            return reply
        result = unpack(TrainResult, reply.content)
        assert result.weights is not None
        turned = Weights(result.weights.layout, -STRENGTH * result.weights.values)
        return Message(pack(replace(result, weights=turned)), reply_to=message)

    return answer


def measure(start: str, attack: str, defence: str, seed: int) -> Line:
    """Run once."""
    torch.set_num_threads(1)
    config = RunConfig(
        gains=False,
        strategy="pfedhn",
        options={"start": start},
        clients=10,
        cohort=10,
        rounds=15,
        eval_every=15,
        seed=seed,
        checkpoint_every=0,
        local=LocalConfig(learning_rate=0.005, schedule="constant"),
        data=DataConfig(split="shares"),
    )
    return {"accuracy": round(accuracy(attack, defence, config), 2)}


def table(lines: Sequence[Line], start: str) -> str:
    """Return what there is of a start as Markdown: a mean over seeds, and each of them."""
    rows = [table_row(["attack", *DEFENCES]), table_row(["---"] * (1 + len(DEFENCES)))]
    for attack, title in ATTACKS.items():
        cells = [title]
        for defence in DEFENCES:
            wanted = {"start": start, "attack": attack, "defence": defence}
            found = [line["accuracy"] for line in lines if line.items() >= wanted.items()]
            each = ", ".join(f"{value:.1f}" for value in found)
            cells.append(f"{statistics.fmean(found):.1f} ({each})" if found else "")
        rows.append(table_row(cells))
    return "\n".join(rows) + "\n"


STUDY = Study(
    "robust",
    [
        {"start": start, "attack": attack, "defence": defence, "seed": seed}
        for start in STARTS
        for attack in ATTACKS
        for defence in DEFENCES
        for seed in SEEDS
    ],
    measure,
    {start: partial(table, start=start) for start in STARTS},
)

TABLES = STUDY.pages

if __name__ == "__main__":
    STUDY.main(__doc__)
