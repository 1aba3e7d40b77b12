"""What the client needs of Flower's internals: that it is there, and does what the client takes for granted."""

import grpc

from hyperbloom.client.link import internals
from hyperbloom.client.link.internals import FleetStub, RuntimeVersionMetadata


def test_the_stub_has_the_calls_of_a_session() -> None:
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        calls = set(vars(FleetStub(channel)))
    session = {"RegisterNode", "ActivateNode", "DeactivateNode", "UnregisterNode", "SendNodeHeartbeat"}
    assert session | {"PullMessages", "PushMessages", "PullObject", "PushObject", "ConfirmMessageReceived"} <= calls


def test_the_version_is_told_as_text_beside_other_headers() -> None:
    told = RuntimeVersionMetadata.from_local_component("SuperNode").append_to_grpc_metadata((("a", "b"),))
    assert told[0] == ("a", "b")
    assert len(told) > 1 and all(isinstance(value, str) for _, value in told)


def test_a_node_counts_as_here_for_longer_than_a_heartbeat_may_take() -> None:
    assert 0 < internals.constant.HEARTBEAT_CALL_TIMEOUT < internals.constant.HEARTBEAT_DEFAULT_INTERVAL / 2
