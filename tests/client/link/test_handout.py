"""A client fetches a backbone: it goes on where it stopped, and a hostile server writes nothing else."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hyperbloom.client.link import handout
from hyperbloom.client.link.handout import fetch_backbone
from hyperbloom.client.link.server import Link
from hyperbloom.common.errors import ConfigError, ConnectionFailed
from hyperbloom.common.handout import LIST, PIECE
from hyperbloom.server.broker.handout import Handout

WEIGHTS = bytes(range(251)) * (3 * PIECE // 251)
LINK = Link("127.0.0.1:9092", insecure=True)
Answer = Callable[[str], bytes | None]


class Server:
    """Stands for the connection to a server; what it answers is real, unless `answer` is another."""

    def __init__(self, folder: Path) -> None:
        own = Handout(folder)
        self.answer: Answer = lambda name: own.answer(name, 1)
        self.asked: list[str] = []

    def open(self) -> None:
        """Connect."""

    def close(self) -> None:
        """Leave."""

    def piece(self, name: str) -> bytes | None:
        self.asked.append(name)
        return self.answer(name)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    made = Server(folder)
    monkeypatch.setattr(handout, "Connection", lambda link, retries: made)
    return made


def test_it_goes_on_where_it_stopped_and_fetches_nothing_twice(server: Server, tmp_path: Path) -> None:
    folder, whole = tmp_path / "new" / "vit", server.answer
    server.answer = lambda name: None if name.endswith(f"/{2 * PIECE}") else whole(name)
    with pytest.raises(
        ConnectionFailed, match=f"stopped at {2 * PIECE:,} of {len(WEIGHTS):,} bytes of .*model.safetensors"
    ):
        fetch_backbone(LINK, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors.part"]
    server.answer, server.asked = whole, []
    fetch_backbone(LINK, folder)
    assert server.asked == [LIST, f"{LIST}model.safetensors/{2 * PIECE}"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    server.asked = []
    fetch_backbone(LINK, folder)
    assert server.asked == [LIST]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_damage_is_noticed_and_thrown_away(server: Server, tmp_path: Path) -> None:
    whole = server.answer
    server.answer = lambda name: (whole(name) or b"")[::-1] if "/" in name else whole(name)
    with pytest.raises(ConnectionFailed, match="came damaged; start again"):
        fetch_backbone(LINK, tmp_path / "vit")
    assert list((tmp_path / "vit").iterdir()) == []
    (tmp_path / "vit" / "config.json").write_text('{"other": 1}')
    with pytest.raises(ConfigError, match=r"config\.json is not the server's; name another folder"):
        fetch_backbone(LINK, tmp_path / "vit")


NAMES = ["../x.json", "x.py", "/x.json"]
LISTS = [
    *({name: [1, "0"]} for name in NAMES),
    {"x.json": [-1, "0"]},
    {"x.json": [1e999, "0"]},
    {f"{i}.json": [1, "0"] for i in range(101)},
]


@pytest.mark.parametrize("listed", [b"", b"[]", b"{}", b"\xff", *(json.dumps(each).encode() for each in LISTS)])
def test_a_hostile_list_writes_nothing(listed: bytes, server: Server, tmp_path: Path) -> None:
    server.answer = lambda name: listed
    with pytest.raises(ConnectionFailed, match="expected a list of a network's files"):
        fetch_backbone(LINK, tmp_path / "vit")
    assert list((tmp_path / "vit").iterdir()) == []


def test_too_much_and_nothing_are_told(server: Server, tmp_path: Path) -> None:
    server.answer = lambda name: json.dumps({"model.safetensors": [10**18, "0"]}).encode()
    with pytest.raises(ConfigError, match="needs 1,000,000,000,000 MB, and has less on its disk"):
        fetch_backbone(LINK, tmp_path / "vit")
    server.answer = lambda name: None
    with pytest.raises(ConnectionFailed, match=r"hands out no backbone \(flower-server --serve-backbone\)"):
        fetch_backbone(LINK, tmp_path / "vit")


def test_a_piece_beyond_the_end_is_refused(server: Server, tmp_path: Path) -> None:
    whole = server.answer
    server.answer = lambda name: b"x" * 10 if "config" in name else whole(name)
    with pytest.raises(ConnectionFailed, match=r"stopped at 0 of 2 bytes of .*config"):
        fetch_backbone(LINK, tmp_path / "vit")
