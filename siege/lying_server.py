"""A server that lies to its clients: it orders what they must refuse, again and again.

* changes without noise, scores of models that were refined on training examples, and changes with noise more often than
  a client's user allows;
* private parts for one made-up run after the other, also with names that are paths;
* networks that are code, shapes of 10^15 numbers, schemas that nest 10,000 deep, bytes at random;
* texts with control characters, for the terminal.
"""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

from flwr.app import ConfigRecord, Message, RecordDict

from hyperbloom.common.layout import Weights
from hyperbloom.common.models import ModelSpec, body_layout, build, full_layout
from hyperbloom.common.wire.orders import (
    SGD,
    EvaluateOrder,
    Greeting,
    Noise,
    Notice,
    Order,
    Refinement,
    Scope,
    Target,
    TrainOrder,
)
from hyperbloom.common.wire.pack import pack
from hyperbloom.server.grids.live import LiveGrid

SPEC = ModelSpec("mlp", "M", (1, 8, 8), 10)
STEPS = SGD(steps=2, batch_size=8, learning_rate=0.1, momentum=0.0, weight_decay=0.0, clip=50.0)
ESCAPE = "\x1b[2J\x1b]0;owned\x07"
ANSWER_S = 20.0
EMPTY_S = 0.2


def lie(grid: LiveGrid, seconds: float) -> dict[str, Counter[str]]:
    """Send all lies to all clients, again and again; return how often which client has carried out which lie."""
    done, end = dict[str, Counter[str]](), time.monotonic() + seconds
    while time.monotonic() < end:
        for what in LIES:
            for name, carried_out in tell(grid, what).items():
                done.setdefault(name, Counter())[what] += carried_out
    return done


def tell(grid: LiveGrid, what: str) -> dict[str, bool]:
    """Send a lie to all clients; return who has answered, and whether it has carried it out.

    Clients are called by the names that their keys have, else by the numbers of their nodes.
    """
    nodes = {node.node_id: node.name or str(node.node_id) for node in grid.get_nodes()}
    kind, content = LIES[what]()
    orders = [Message(content, node, kind) for node in nodes]
    left, replies, until = (
        {name for name in grid.push_messages(orders) if name},
        list[Message](),
        time.monotonic() + ANSWER_S,
    )
    while left and time.monotonic() < until:
        grid.wait(1.0)
        replies += grid.pull_messages(left)
        left -= {reply.metadata.reply_to_message_id for reply in replies}
    if not replies:
        time.sleep(EMPTY_S)
    asked = {order.metadata.message_id: nodes[order.metadata.dst_node_id] for order in orders}
    # A `Failed` is in a record of another name.
    return {asked[each.metadata.reply_to_message_id]: "hyperbloom" in _records(each) for each in replies}


def _records(reply: Message) -> RecordDict:
    return reply.content if reply.has_content() else RecordDict()


def _packed(order: Order) -> tuple[str, RecordDict]:
    return order.message_type, pack(order)


def _train(run: str = "run-1", private: str = "none", noise: Noise | None = None) -> tuple[str, RecordDict]:
    target = Target(SPEC.name, SPEC.num_classes, private)
    return _packed(TrainOrder(Scope(run, 1, 0), target, STEPS, "delta", _weights(private), noise=noise, quiet=True))


def _score(model: str = SPEC.name, refinement: Refinement | None = None) -> tuple[str, RecordDict]:
    return _packed(EvaluateOrder(Scope("run-1", 1, 0), Target(model, 10, "none"), _weights(), refinement))


def _weights(private: str = "none") -> Weights:
    layout = body_layout(SPEC) if private == "head" else full_layout(SPEC)
    return Weights(layout, layout.flatten(dict(build(SPEC).named_parameters())))


def _shaped(shape: Sequence[int]) -> tuple[str, RecordDict]:
    kind, content = _train()
    content.config_records["hyperbloom"]["tensors"] = json.dumps([["fc1.weight", shape]])
    return kind, content


LIES: dict[str, Callable[[], tuple[str, RecordDict]]] = {
    "a change without noise": _train,
    "a change with noise": lambda: _train(noise=Noise(clip=1.0, scale=8.0)),
    "a score of a refined model": lambda: _score(refinement=Refinement(1, 0.05, 8, "all")),
    "a private part": lambda: _train(f"run-{random.random()}", "head"),
    "a private part at a path": lambda: _train(f"../../../{ESCAPE}", "head"),
    "code": lambda: _score("os:system"),
    "a huge shape": lambda: _shaped([10**8, 10**7]),
    "a deep schema": lambda: _packed(Greeting("1", schema="[" * 10_000)),
    "control characters": lambda: _packed(Notice("finished", ESCAPE)),
    "bytes": lambda: ("train", RecordDict({"hyperbloom": ConfigRecord({"values": os.urandom(64)})})),
}
HARMLESS = {"a change with noise", "a deep schema", "control characters"}
"""What any client may carry out; a schema means nothing to a client without a table."""

TRUSTING = {"a change without noise", "a score of a refined model", "a private part"}
"""What a client may carry out besides if its user demands nothing."""
