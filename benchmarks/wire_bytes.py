"""Bytes of a training round's two messages between SuperLink and client, over the bytes of the tensors in them.

An order (weights out) and a result (change back) for an MLP, the paper's LeNet and a model of 11 million floats:

* ours: `common.wire`: one record, all tensors as one run of bytes;
* other: the same tensors the way Flower's examples send them: `ArrayRecord(state_dict)` beside a `ConfigRecord`.

Counted is the body of every Fleet API call that carries a part of a message: its metadata and tree of objects, and
each object in a call of its own. Not counted: the small requests for them, gRPC's headers (the same for every
call, so they grow with the number of objects), polls and heartbeats. Nothing is sent; sizes are exact and do not vary.

    python -m benchmarks.wire_bytes [--quick]
"""

from dataclasses import dataclass, replace

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.clientapp import ClientApp
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import PullObjectResponse, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from torch import nn

from benchmarks.measure import Comparison, main, sgd_of
from hyperbloom.common.config import LocalConfig
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.models import MLP, LeNet
from hyperbloom.common.wire.orders import Scope, Target, TrainOrder, TrainResult
from hyperbloom.common.wire.pack import pack
from hyperbloom.server.grids.inline import InlineGrid

NODE = 2**63 + 1  # node ids are random and 64 bits wide


@dataclass(frozen=True)
class Exchange:
    """What an order and the result together cost: bytes, and objects, each of which is a call of its own."""

    size: int
    objects: int


def run(quick: bool = False) -> list[Comparison]:
    InlineGrid(ClientApp(), [])  # a message can only be made inside a run; this is one
    models: dict[str, nn.Module] = {
        "MLP": MLP((1, 28, 28), 10),
        "LeNet": LeNet((3, 32, 32), 10),
    }
    if not quick:
        models["MLP, 3,580 wide"] = MLP((3, 32, 32), 10, width=3580)
    return [compare(name, module) for name, module in models.items()]


def compare(name: str, module: nn.Module) -> Comparison:
    """Weigh both ways of sending one model's parameters there and back."""
    floats = sum(parameter.numel() for parameter in module.parameters())
    tensors = 2 * 4 * floats
    ours, flowers = measure(*our_contents(module)), measure(*flowers_contents(module))
    conditions = (
        f"{floats:,} floats in {len(list(module.parameters()))} tensors, there and back; "
        f"{ours.objects} objects of {ours.size:,} bytes against {flowers.objects} of {flowers.size:,}"
    )
    return Comparison(f"wire, {name}", "bytes/byte", ours.size / tensors, flowers.size / tensors, conditions)


def our_contents(module: nn.Module) -> tuple[RecordDict, RecordDict]:
    """Return the contents of an order and of the result, as `flower-server` and `flower-client` write them."""
    layout = Layout.of(module)
    weights = Weights(layout, layout.flatten(dict(module.named_parameters())))
    return pack(replace(_order(), weights=weights)), pack(TrainResult(0.5, weights, 2.3))


def flowers_contents(module: nn.Module) -> tuple[RecordDict, RecordDict]:
    """Return the same as Flower's examples send it, with the same scalars."""
    arrays = ArrayRecord(module.state_dict())
    scalars, result = pack(_order())["hyperbloom"], ConfigRecord({"loss": 2.3, "seconds": 0.5})
    return RecordDict({"arrays": arrays, "config": scalars}), RecordDict({"arrays": arrays, "metrics": result})


def measure(order: RecordDict, result: RecordDict) -> Exchange:
    """Wrap two contents as Flower does and weigh them."""
    with no_object_id_recompute():
        sent = Message(order, NODE, TrainOrder.message_type, group_id="1")
        sent.metadata.__dict__["_message_id"] = sent.object_id
        parts = [weigh(sent, to_client=True), weigh(Message(result, reply_to=sent), to_client=False)]
    return Exchange(sum(part.size for part in parts), sum(part.objects for part in parts))


def weigh(message: Message, to_client: bool) -> Exchange:
    """Return what Flower sends for one message."""
    objects = {key: each.deflate() for key, each in get_all_nested_objects(message).items()}
    tree, proto = get_object_tree(message), message_to_proto(remove_content_from_message(message))
    node, run_id = Node(node_id=NODE), message.metadata.run_id
    if to_client:
        size = PullMessagesResponse(messages_list=[proto], message_object_trees=[tree]).ByteSize()
        calls = [
            PullObjectResponse(object_found=True, object_available=True, object_content=c) for c in objects.values()
        ]
        return Exchange(size + sum(call.ByteSize() for call in calls), len(objects))
    size = PushMessagesRequest(node=node, messages_list=[proto], message_object_trees=[tree]).ByteSize()
    for key, content in objects.items():
        size += PushObjectRequest(node=node, run_id=run_id, object_id=key, object_content=content).ByteSize()
    return Exchange(size, len(objects))


def _order() -> TrainOrder:
    """Return an order to train without weights."""
    scope = Scope("20260101-120000-pfedhn-0123abcd", 100, 0)
    return TrainOrder(scope, Target("lenet", 10, "none"), sgd_of(LocalConfig()), "delta")


if __name__ == "__main__":
    main(run, __doc__)
