"""Peak memory of the server in rounds of a thousand clients: in slices and chunks, as shipped, against all at once.

`pfedhn` with the shipped round loop over a grid whose thousand clients answer at once with a random change, so that
nothing but the server is measured: cohort 1,000, LeNet of 121,182 floats (0.45 GiB for the weights of all), two
rounds and no evaluation but the last. Each side runs in a process of its own. The other side is the same with no
bound on what is worked on at once.

    python -m benchmarks.server_memory [--quick]
"""

import json
import resource
import subprocess
import sys
from collections.abc import Iterable
from functools import partial

import torch
from flwr.app import Context, Message, RecordDict

from benchmarks.federation import LENET_FLOATS
from benchmarks.measure import Comparison, main
from hyperbloom.common.config import RunConfig
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.models import ModelSpec, full_layout
from hyperbloom.common.wire.orders import EvaluateResult, Greeting, Introduction, SplitScore, TrainOrder, TrainResult
from hyperbloom.common.wire.pack import pack
from hyperbloom.server.grids.inline import InlineGrid
from hyperbloom.server.loop import exchange
from hyperbloom.server.loop.session import Session
from hyperbloom.strategies.hypernetworks import learner

ANSWERS_AT_ONCE = 32


def run(quick: bool = False) -> list[Comparison]:
    clients = 100 if quick else 1000
    ours, other = (_in_a_process(clients, bounded) for bounded in (True, False))
    conditions = (
        f"cohort of {clients:,}, LeNet of {LENET_FLOATS:,} floats, rule proximal, 2 rounds; peak of the process"
    )
    return [Comparison("peak memory of the server", "MiB", ours, other, conditions)]


def _in_a_process(clients: int, bounded: bool) -> float:
    words = [sys.executable, "-m", "benchmarks.server_memory", "--serve", str(clients), str(int(bounded))]
    return float(json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout))


def serve(clients: int, bounded: bool) -> float:
    """Play two rounds and return the peak resident memory of this process in MiB."""
    if not bounded:
        exchange.BYTES_AT_ONCE = learner.BYTES_AT_ONCE = 2**40
        exchange.MOST_AT_ONCE = 2**40
    config = RunConfig(
        gains=False, clients=clients, cohort=clients, rounds=2, eval_every=2, model="lenet", checkpoint_every=0
    )
    Session(config, _Crowd(clients), "benchmark", []).run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class _Crowd(InlineGrid):
    """Clients that answer at once; a message's content is forgotten as soon as it is sent."""

    def __init__(self, clients: int) -> None:
        layout = full_layout(ModelSpec("lenet", "M", (3, 32, 32), 10))
        super().__init__(partial(_answer, layout), [{}] * clients)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = list(super().push_messages(messages))
        for message_id in ids:
            about = self._waiting[message_id].metadata
            envelope = Message(RecordDict(), about.dst_node_id, about.message_type)
            envelope.metadata.__dict__["_message_id"] = message_id
            self._waiting[message_id] = envelope
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return super().pull_messages([name for name in message_ids if name in self._waiting][:ANSWERS_AT_ONCE])


def _answer(layout: Layout, message: Message, context: Context) -> Message:
    name, kind = f"client-{message.metadata.dst_node_id}", message.metadata.message_type
    content: object = EvaluateResult(*2 * [SplitScore(2, 1.0, ("accuracy",), (0.5,))])
    if kind == Greeting.message_type:
        content = Introduction(name, name, "", "M", (3, 32, 32), 10, 10, 10, 10, ())
    elif kind == TrainOrder.message_type:
        content = TrainResult(0.1, Weights(layout, 1e-3 * torch.randn(layout.numel)), 1.0)
    return Message(pack(content), reply_to=message)


if __name__ == "__main__":
    if "--serve" in sys.argv:
        print(serve(int(sys.argv[-2]), bool(int(sys.argv[-1]))))
    else:
        main(run, __doc__)
