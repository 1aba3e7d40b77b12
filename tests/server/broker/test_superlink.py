"""A SuperLink in this process: it serves while its context is open, at one port, and leaves nothing behind."""

import threading
from pathlib import Path

import pytest

from hyperbloom.client.link.connection import Connection
from hyperbloom.client.link.runtime import retries_of
from hyperbloom.client.link.server import Link
from hyperbloom.common.errors import ConnectionFailed
from hyperbloom.server.broker import superlink as superlink_module
from hyperbloom.server.broker.port import Connections
from hyperbloom.server.broker.superlink import free_port, superlink


def test_a_client_finds_it_and_its_port_is_free_afterwards(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    link = Link(address, insecure=True)
    for name in ("first", "second"):
        with superlink(address, tmp_path / name) as grid:
            client = Connection(link, retries_of(link))
            client.open()
            assert [node.node_id for node in grid.get_nodes()] == [client.node_id]
            client.close()
            with pytest.raises(ConnectionFailed, match="the port is taken"), superlink(address, tmp_path):
                raise AssertionError
        assert (tmp_path / name / "superlink.log").read_text() == ""


def test_the_look_at_the_connections_goes_on_after_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as when no file is free: else nothing would enforce the limits for the rest of the run."""
    connections, over, looks = Connections(), threading.Event(), list[int]()

    class Door:
        def cancel_overdue(self) -> None:
            looks.append(1)
            if len(looks) == 2:
                over.set()

    def fail() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(connections, "sweep", fail)
    monkeypatch.setattr(connections, "wait", lambda seconds: None)
    superlink_module._look(None, Door(), connections, over)  # type: ignore[arg-type]
    assert len(looks) == 2 and "cannot look at the connections now: Too many open files" in caplog.text


def test_the_look_at_keys_and_connections_goes_on_whatever_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connections, over, looks = Connections(), threading.Event(), list[str]()

    class Keys:
        def follow(self) -> None:
            looks.append("keys")
            raise RuntimeError("dictionary changed size during iteration")

    class Door:
        def cancel_overdue(self) -> None:
            looks.append("door")
            over.set() if len(looks) == 6 else None

    monkeypatch.setattr(connections, "sweep", lambda: looks.append("sweep"))
    monkeypatch.setattr(connections, "wait", lambda seconds: None)
    superlink_module._look(Keys(), Door(), connections, over)  # type: ignore[arg-type]
    assert looks == ["keys", "sweep", "door"] * 2 and "dictionary changed size" in caplog.text
