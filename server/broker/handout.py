"""The server's side of `common/handout.py`: `flower-server --serve-backbone`."""

import hashlib
import json
from collections import Counter
from pathlib import Path

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.handout import LIST, PIECE, travels
from hyperbloom.server.broker.log import say

TIMES = 3
"""How often a client may fetch all of it; more is a flood."""


class Handout:
    """A folder for clients that lack it; ConfigError if it is no folder, or has nothing to hand out."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        self._files = {path.name: path for path in files if travels(path.name) and path.is_file()}
        if not self._files:
            raise ConfigError(f"--serve-backbone: expected the run's backbone in a folder, found {folder}")
        listed = dict[str, tuple[int, str]]()
        for name, path in self._files.items():
            with path.open("rb") as file:
                listed[name] = path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
        self._list, self.bytes = json.dumps(listed).encode(), sum(size for size, _ in listed.values())
        self._sent = Counter[int]()

    def answer(self, name: str, node: int) -> bytes | None:
        """Return the list or a piece for a node; None if there is no such piece, or it has had enough."""
        if name == LIST:
            say(f"node {node} asks for the backbone")
            return self._list
        file, _, offset = name.removeprefix(LIST).rpartition("/")
        is_piece = file in self._files and offset.isdecimal() and len(offset) <= 19
        if not is_piece or self._sent[node] > TIMES * self.bytes:
            return None
        with self._files[file].open("rb") as content:
            content.seek(min(int(offset), self.bytes))
            piece = content.read(PIECE)
        self._sent[node] += len(piece)
        return piece
