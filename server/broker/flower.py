"""What the server uses of Flower's internals, in one place: flwr 1.39 to 1.42 have all of it.

Names outside `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and `flwr.simulation` may move with any release of Flower.
`tests/server/broker/test_flower.py` says for an installed version what is missing, and what behaves in another way.
"""

from flwr.app.message import make_message, remove_content_from_message
from flwr.cli.build import build_fab_from_files
from flwr.common import constant
from flwr.common.serde import fab_to_proto, message_to_proto
from flwr.proto import control_pb2 as control
from flwr.proto import fleet_pb2 as fleet
from flwr.proto import message_pb2 as message
from flwr.proto import node_pb2 as node
from flwr.proto import runtime_pb2 as runtime
from flwr.proto.fleet_pb2_grpc import add_FleetServicer_to_server
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.server.superlink.linkstate import LinkState, LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore import constant as supercore
from flwr.supercore.address import is_port_in_use
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.date import now
from flwr.supercore.error import rpc_error_translator
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable import inflatable_object as objects
from flwr.supercore.inflatable import inflatable_protobuf_utils as transfer
from flwr.supercore.inflatable import inflatable_utils as inflation
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStoreFactory
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supercore.utils import get_metadata_bytes, get_metadata_str
from flwr.superlink.federation import NoOpFederationManager
