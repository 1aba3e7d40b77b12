"""What the client uses of Flower's internals, in one place: flwr 1.39 to 1.42 have all of it.

`tests/client/link/test_internals.py` says for an installed version what is missing, and what behaves in another way.
"""

from flwr.app.message import remove_content_from_message
from flwr.common.constant import (
    HEARTBEAT_CALL_TIMEOUT,
    HEARTBEAT_DEFAULT_INTERVAL,
    PUBLIC_KEY_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    ErrorCode,
)
from flwr.common.serde import message_to_proto
from flwr.proto import fleet_pb2 as fleet
from flwr.proto import heartbeat_pb2 as heartbeat
from flwr.proto import message_pb2 as message
from flwr.proto import node_pb2 as node
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    inflate_object_from_contents,
    pull_objects,
    push_object_contents_from_iterable,
)
from flwr.supercore.retry import RetryInvoker
from flwr.supercore.retry.retry_invoker import RetryState, exponential
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata
