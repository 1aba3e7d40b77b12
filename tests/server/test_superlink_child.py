"""The SuperLink's process: what stands in Flower's place."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from hyperbloom.common.secrecy.keys import make_key, public_pem
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.broker import child as superlink_child
from hyperbloom.server.broker.door import Door
from hyperbloom.server.broker.limits import Fleet, Store
from hyperbloom.server.broker.port import fleet_server

IN_MEMORY = ":flwr-in-memory:"


def test_the_child_puts_ours_where_flower_has_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = SimpleNamespace(flower_superlink=lambda: None)
    monkeypatch.setattr(superlink_child.object_store_factory, "InMemoryObjectStore", None)
    real = superlink_child.importlib.import_module("flwr.superlink.cli.flower_superlink")
    monkeypatch.setattr(superlink_child.importlib, "import_module", lambda name: program)
    monkeypatch.setattr(superlink_child, "start_parent_process_monitor", lambda pid: None)
    monkeypatch.setattr(superlink_child.sys, "argv", [])
    superlink_child.main(["1", "", "--insecure"])
    assert superlink_child.sys.argv == ["flower-superlink", "--insecure"]
    assert {"NodeAuthServerInterceptor", "FleetServicer", "generic_create_grpc_server"} <= vars(real).keys()
    assert vars(program).keys() - {"flower_superlink"} <= vars(real).keys()
    assert program.FleetServicer is Fleet
    assert program.generic_create_grpc_server.func is fleet_server
    assert isinstance(ObjectStoreFactory().store(), Store)
    factory = LinkStateFactory(IN_MEMORY, NoOpFederationManager(), ObjectStoreFactory())
    assert isinstance(program.NodeAuthServerInterceptor(factory), Door), "without keys as well"
    registry = ClientRegistry(tmp_path / "clients.json")
    registry.add("ward-7", public_pem(make_key()))
    superlink_child.main(["1", f"{registry.path}\n{tmp_path / 'other.json'}", "--enable-supernode-auth"])
    factory = LinkStateFactory(IN_MEMORY, NoOpFederationManager(), ObjectStoreFactory())
    assert isinstance(program.NodeAuthServerInterceptor(factory), Door)
    assert [node.name for node in factory.state().get_node_info()] == ["ward-7"]  # before the port opens
