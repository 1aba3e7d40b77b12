"""What a server hands out: plain files of a network, piece by piece, and not without end."""

import hashlib
import json
from pathlib import Path

import pytest

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.handout import LIST, PIECE, travels
from hyperbloom.server.broker.handout import TIMES, Handout

WEIGHTS = bytes(range(256)) * (PIECE // 256) + b"rest"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in {
        "model.safetensors": WEIGHTS,
        "config.json": b"{}",
        "model.bin": b"no",
        ".env": b"no",
    }.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_pieces_are_the_files(folder: Path) -> None:
    handout = Handout(folder)
    listed = json.loads(handout.answer(LIST, 1) or b"")
    contents = {"config.json": b"{}", "model.safetensors": WEIGHTS}
    assert listed == {name: [len(each), hashlib.sha256(each).hexdigest()] for name, each in contents.items()}
    pieces = [handout.answer(f"{LIST}model.safetensors/{offset}", 1) for offset in (0, PIECE, len(WEIGHTS))]
    assert pieces == [WEIGHTS[:PIECE], b"rest", b""]
    assert handout.answer(f"{LIST}model.safetensors/{10**18}", 1) == b""
    assert handout.answer(f"{LIST}model.safetensors/{'9' * 5000}", 1) is None, "Python reads no number of that length"
    names = ("model.bin/0", ".env/0", "../config.json/0", "config.json/-1", "config.json/x", "config.json/", "/0x")
    assert [handout.answer(f"{LIST}{name}", 1) for name in names] == [None] * len(names)


def test_a_client_that_fetches_again_and_again_gets_no_more(folder: Path) -> None:
    handout = Handout(folder)
    name = f"{LIST}model.safetensors/0"
    assert all(handout.answer(name, 1) for _ in range(TIMES))
    got = [handout.answer(name, 1) is None for _ in range(3)]
    assert got[-1] and handout.answer(name, 2) is not None


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="--serve-backbone: expected the run's backbone in a folder"):
            Handout(place)


@pytest.mark.parametrize(
    "name", ["../config.json", "a/b.json", "a\\b.json", "C:b.json", ".x.json", "x.py", "x.bin", "\n.json"]
)
def test_names_that_do_not_travel(name: str) -> None:
    assert not travels(name)
