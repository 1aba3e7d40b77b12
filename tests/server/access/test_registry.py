"""The registry of clients' keys: one name, one key, and a key that is taken away never comes back."""

import json
import stat
import threading
from pathlib import Path

import pytest

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.secrecy.keys import fingerprint, make_key, public_pem
from hyperbloom.server.access.registry import ClientRegistry

KEYS = [public_pem(make_key()) for _ in range(4)]


@pytest.fixture
def registry(tmp_path: Path) -> ClientRegistry:
    return ClientRegistry(tmp_path / "certs" / "clients.json")


def test_a_missing_file_is_an_empty_registry(registry: ClientRegistry) -> None:
    assert registry.clients() == {}
    assert registry.keys() == {}


def test_clients_come_and_go(registry: ClientRegistry) -> None:
    registry.add("ward-7", KEYS[0])
    registry.add("ward-8", KEYS[1])
    assert registry.keys() == {KEYS[0]: "ward-7", KEYS[1]: "ward-8"}
    registry.revoke("ward-7")
    assert registry.keys() == {KEYS[1]: "ward-8"}
    assert registry.clients()["ward-7"].revoked is not None
    assert ClientRegistry(registry.path).clients() == registry.clients()
    assert stat.S_IMODE(registry.path.stat().st_mode) == 0o600
    assert [path.name for path in registry.path.parent.iterdir() if path.suffix != ".lock"] == ["clients.json"]


def test_a_key_that_was_taken_away_never_comes_back(registry: ClientRegistry) -> None:
    registry.add("ward-7", KEYS[0])
    registry.revoke("ward-7")
    for name in ("ward-7", "ward-8"):
        with pytest.raises(ConfigError, match=f"{name}: this key was revoked or replaced; make a new one"):
            registry.add(name, KEYS[0])
    registry.add("ward-7", KEYS[1])
    assert registry.keys() == {KEYS[1]: "ward-7"}
    registry.revoke("ward-7")
    registry.revoke("ward-7")
    assert json.loads(registry.path.read_text())["retired"] == [fingerprint(key) for key in KEYS[:2]]


def test_a_key_is_replaced_only_on_demand(registry: ClientRegistry) -> None:
    registry.add("ward-7", KEYS[0])
    with pytest.raises(ConfigError, match="ward-7 has a key already: use its state folder"):
        registry.add("ward-7", KEYS[1])
    assert registry.keys() == {KEYS[0]: "ward-7"}
    for replace in (True, True, False):  # again, as a script may do it
        registry.add("ward-7", KEYS[1], replace=replace)
        assert registry.keys() == {KEYS[1]: "ward-7"}
    with pytest.raises(ConfigError, match="was revoked or replaced"):
        registry.add("ward-7", KEYS[0], replace=True)


def test_two_clients_cannot_share_a_key(registry: ClientRegistry) -> None:
    registry.add("ward-7", KEYS[0])
    for replace in (False, True):
        with pytest.raises(ConfigError, match="this is the key of ward-7; every client needs one of its own"):
            registry.add("ward-8", KEYS[0], replace)


def test_who_is_not_there_cannot_be_revoked(registry: ClientRegistry) -> None:
    with pytest.raises(ConfigError, match="ward-7: expected one of no clients in"):
        registry.revoke("ward-7")
    registry.add("ward-8", KEYS[0])
    with pytest.raises(ConfigError, match="ward-7: expected one of ward-8 in"):
        registry.revoke("ward-7")


@pytest.mark.parametrize("name", ["", "../up", "a b", "-x", "x" * 65])
def test_a_name_is_a_name(registry: ClientRegistry, name: str) -> None:
    with pytest.raises(ConfigError, match="NAME: expected 1 to 64 letters"):
        registry.add(name, KEYS[0])


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"clients": {}}',
        '{"clients": [], "retired": []}',
        '{"clients": {"a": {"public_key": "x", "added": "2026-01-01"}}, "retired": []}',
        '{"clients": {"a": {"added": "2026-01-01"}}, "retired": []}',
        '{"clients": {"a": {"public_key": 5, "added": "2026-01-01"}}, "retired": []}',
        '{"clients": {"../a": {"public_key": "KEY", "added": "2026-01-01"}}, "retired": []}',
        '{"clients": {"a": {"public_key": " KEY", "added": "2026-01-01"}}, "retired": []}',
        '{"clients": {"a": {"public_key": "KEY", "added": "2026-01-01", "more": 1}}, "retired": []}',
    ],
)
def test_a_damaged_file_is_told_and_left_alone(registry: ClientRegistry, content: str) -> None:
    registry.path.parent.mkdir()
    content = content.replace("KEY", KEYS[0].replace("\n", "\\n"))
    registry.path.write_text(content)
    for act in (registry.clients, lambda: registry.add("ward-7", KEYS[1]), lambda: registry.revoke("a")):
        with pytest.raises(ConfigError, match="expected the registry of clients, found it damaged"):
            act()  # type: ignore[operator]
    assert registry.path.read_text() == content


def test_those_who_add_at_once_are_all_in_it(registry: ClientRegistry) -> None:
    threads = [threading.Thread(target=registry.add, args=(f"c{i}", key)) for i, key in enumerate(KEYS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(registry.keys()) == set(KEYS)
