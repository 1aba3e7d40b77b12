"""What compression saves and costs: bytes of a client's reply, and accuracy after the same rounds.

The demo (`examples/demo.yaml`: scikit-learn's digits, six clients, 60 rounds) in the inline engine, on one thread, once
per codec and seed. Bytes are those of the whole message with the reply, as `wire_bytes` counts them. Accuracy is the
mean over clients on their test examples, in percent: after the last round, and at the round that validation selected.
`/forgetful` is the same codec on clients that lose what compression left out, after every round: what error feedback
is worth. Sizes are exact; accuracy varies with the seed, so each is a mean over seeds with the least and the largest.
FedAvg's clients share the digits evenly (`iid`), so that one model can serve all.

    python -m figures.compression                              # what is missing (10 min)
    python -m figures.compression --only strategy=fedavg       # some of it
"""

import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message

from benchmarks.wire_bytes import weigh
from figures.pages import table_row
from figures.study import Line, Study
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import load_run_config
from hyperbloom.common.wire.orders import TrainOrder
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.server.grids.inline import InlineGrid
from hyperbloom.server.loop.listener import Listener, RoundReport
from hyperbloom.server.loop.session import Session

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo.yaml"
FORGETFUL = "/forgetful"
SETTINGS: dict[str, dict[str, Any]] = {
    "pfedhn": {
        "options": {"start": "hypernetwork", "update": "mean", "learning_rate": 0.05, "embedding_learning_rate": 0.3}
    },
    "fedavg": {"options": {}, "data.split": "iid"},
}
CODECS = {
    "pfedhn": [
        *("none", "int8", "top-k:0.1", "top-k:0.1+int8", "top-k:0.01+int8"),
        *(f"top-k:0.1+int8{FORGETFUL}", f"top-k:0.01+int8{FORGETFUL}"),
    ],
    "fedavg": ["none", "int8", "top-k:0.1+int8", "top-k:0.01+int8", f"top-k:0.01+int8{FORGETFUL}"],
}


@dataclass(frozen=True)
class Outcome:
    """What one run came to: bytes of a reply, accuracy in percent after the last round and at the selected one."""

    reply: int
    last: float
    selected: float


class Scale(Listener):
    """Weighs one training reply of a grid, keeps the last evaluation, and makes clients forgetful if it is to."""

    def __init__(self, grid: InlineGrid, folder: Path, forgetful: bool) -> None:
        self.reply, self.last = 0, 0.0
        self._folder, self._forgetful, self._pull = folder, forgetful, grid.pull_messages
        grid.pull_messages = self._weighed  # type: ignore[method-assign]

    def _weighed(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(self._pull(message_ids))
        for reply in replies:
            if not self.reply and reply.metadata.message_type == TrainOrder.message_type:
                self.reply = weigh(reply, to_client=False).size
        return replies

    def round_done(self, report: RoundReport) -> None:
        if report.outcome.refused:
            raise RuntimeError(f"round {report.number}: {report.outcome.refused}; such a run measures nothing")
        if report.outcome.evaluation:
            self.last = report.outcome.evaluation.metrics()["test_mean"]
        for path in self._folder.glob("clients/*/residual.safetensors") if self._forgetful else ():
            path.unlink()


def play(overrides: Mapping[str, Any], forgetful: bool = False) -> Outcome:
    """Play the demo with some keys changed."""
    config = load_run_config(DEMO, {"baselines": [], "gains": False, **overrides})
    with tempfile.TemporaryDirectory() as name:
        grid = inline_grid(config, Path(name))
        scale = Scale(grid, Path(name), forgetful)
        (selection,) = Session(config, grid, "benchmark", [scale]).run().values()
    client_for.cache_clear()
    return Outcome(scale.reply, scale.last, selection.metrics["test_mean"])


def measure(strategy: str, codec: str, seed: int) -> Line:
    """Run once, with a constant local rate of 0.005."""
    torch.set_num_threads(1)
    rate = {"local.learning_rate": 0.005, "local.schedule": "constant"}
    settings = {"strategy": strategy, "seed": seed, "compression": codec.removesuffix(FORGETFUL), **rate}
    return asdict(play(settings | SETTINGS[strategy], codec.endswith(FORGETFUL)))


def table(lines: Sequence[Line], strategy: str) -> str:
    """Return what there is of a strategy as Markdown: means over seeds, least and largest."""
    heads = ["compression", "bytes of a reply", "times less", "last round", "selected round"]
    rows = [table_row(heads), table_row(["---", *["---:"] * 4])]
    runs = {codec: [x for x in lines if (x["strategy"], x["codec"]) == (strategy, codec)] for codec in CODECS[strategy]}
    for codec, some in runs.items():
        if some:
            cells = [codec, f"{some[0]['reply']:,}", f"{runs['none'][0]['reply'] / some[0]['reply']:.1f}"]
            for values in ([line[key] for line in some] for key in ("last", "selected")):
                cells.append(f"{statistics.fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})")
            rows.append(table_row(cells))
    return "\n".join(rows) + "\n"


STUDY = Study(
    "compression",
    [
        {"strategy": strategy, "codec": codec, "seed": seed}
        for strategy, codecs in CODECS.items()
        for codec in codecs
        for seed in range(3)
    ],
    measure,
    {strategy: partial(table, strategy=strategy) for strategy in SETTINGS},
)

TABLES = STUDY.pages

if __name__ == "__main__":
    STUDY.main(__doc__)
