"""What the client uses of Flower's internals, in one place: flwr 1.39 to 1.42 have all of it.

`tests/client/link/test_internals.py` says for an installed version what is missing, and what behaves in another way.
"""

from flwr.app.message import remove_content_from_message
from flwr.common import constant
from flwr.common.serde import message_to_proto
from flwr.proto import fleet_pb2 as fleet
from flwr.proto import heartbeat_pb2 as heartbeat
from flwr.proto import message_pb2 as message
from flwr.proto import node_pb2 as node
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.supercore.date import now
from flwr.supercore.inflatable import inflatable_object as objects
from flwr.supercore.inflatable import inflatable_protobuf_utils as transfer
from flwr.supercore.inflatable import inflatable_utils as inflation
from flwr.supercore.retry import RetryInvoker
from flwr.supercore.retry.retry_invoker import RetryState, exponential
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata
