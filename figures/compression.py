"""What compression saves and costs: bytes of a client's reply, and accuracy after the same rounds.

The demo (`examples/demo.yaml`: scikit-learn's digits, six clients, 60 rounds) in the inline engine, on one thread, once
per codec and seed. Bytes are those of the whole message with the reply, as `wire_bytes` counts them. Accuracy is the
mean over clients on their test examples, in percent: after the last round, and at the round that validation selected.
`/forgetful` is the same codec on clients that lose what compression left out, after every round: what error feedback
is worth. Sizes are exact; accuracy varies with the seed, so each is a mean over seeds with the least and the largest.

    python -m figures.compression [--quick] [--strategy fedavg --set data.split=iid]
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message

from benchmarks.measure import machine
from benchmarks.wire_bytes import weigh
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import load_run_config, parse_assignment
from hyperbloom.common.wire.orders import TrainOrder
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.server.grids.inline import InlineGrid
from hyperbloom.server.loop.listener import Listener, RoundReport
from hyperbloom.server.loop.session import Session

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo.yaml"
FORGETFUL = "/forgetful"
OPTIONS = {"start": "hypernetwork", "update": "mean", "learning_rate": 0.05, "embedding_learning_rate": 0.3}
CODECS = [
    *("none", "int8", "top-k:0.1", "top-k:0.1+int8", "top-k:0.01+int8"),
    *(f"top-k:0.1+int8{FORGETFUL}", f"top-k:0.01+int8{FORGETFUL}"),
]


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


def row(codec: str, outcomes: list[Outcome], plain: int) -> str:
    """Return a line of the table; `plain` is the size of a reply of the first codec, which is `none`."""
    reply = outcomes[0].reply
    columns = [codec, f"{reply:,}", f"{plain / reply:.1f}"]
    for values in ([each.last for each in outcomes], [each.selected for each in outcomes]):
        columns.append(f"{statistics.fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})")
    return f"| {' | '.join(columns)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short settings: to see that it works, not to quote")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each codec (default: %(default)s)")
    parser.add_argument("--strategy", default="pfedhn", help="which replies to compress (default: %(default)s)")
    parser.add_argument("--codecs", default=",".join(CODECS), metavar="A,B", help="which ones (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set any other key of the run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    given = dict(parse_assignment(text) for text in args.set)
    given = {
        "strategy": args.strategy,
        "options": OPTIONS if args.strategy == "pfedhn" else {},
        "gains": False,
        "local.learning_rate": 0.005,
        "local.schedule": "constant",
        **given,
    }
    if args.quick:
        given |= {"rounds": 4, "eval_every": 2}
    print(f"{machine()}\n\n| compression | bytes of a reply | times less | last round | selected round |")
    print("|---|---:|---:|---:|---:|", flush=True)
    plain = 0
    for codec in args.codecs.split(","):
        name, forgetful = codec.removesuffix(FORGETFUL), codec.endswith(FORGETFUL)
        seeds = range(1 if args.quick else args.seeds)
        outcomes = [play({"compression": name, "seed": seed, **given}, forgetful) for seed in seeds]
        plain = plain or outcomes[0].reply
        print(row(codec, outcomes, plain), flush=True)


if __name__ == "__main__":
    main()
