"""The client's side of `common/handout.py`: `flower-client --backbone FOLDER --fetch-backbone`."""

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import grpc

from hyperbloom.client.link.connection import Connection
from hyperbloom.client.link.runtime import retries_of
from hyperbloom.client.link.server import Link, explanation
from hyperbloom.common.errors import ConfigError, ConnectionFailed
from hyperbloom.common.handout import LIST, PIECE, travels

log = logging.getLogger("hyperbloom.client")

SPARE = 2**28
"""Bytes that stay free on the disk."""

MOST_FILES = 100


def fetch_backbone(link: Link, folder: Path) -> None:
    """Fetch the folder that the server hands out; go on where an earlier fetch stopped, and keep what is there.

    The digest of the network is compared as ever, when the client joins.

    Raises:
        ConfigError: the disk is too small, or another file of the same name is there.
        ConnectionFailed: the server hands out nothing, or what came is damaged.
    """
    connection = Connection(link, retries_of(link))
    try:
        connection.open()
        folder.mkdir(parents=True, exist_ok=True)
        files = _listed(connection.piece(LIST))
        missing = {name: about for name, about in files.items() if not _is_here(folder / name, about[1])}
        there = sum(part.stat().st_size for name in missing if (part := _part(folder / name)).exists())
        rest = sum(size for size, _ in missing.values()) - there
        if rest + SPARE > shutil.disk_usage(folder).free:
            raise ConfigError(f"--fetch-backbone: {folder} needs {rest // 10**6:,} MB, and has less on its disk")
        if missing:
            log.info("fetching the backbone into %s: %.1f MB, and %.1f MB are here", folder, rest / 1e6, there / 1e6)
        for name, (size, digest) in missing.items():
            _fetch(connection, folder / name, size, digest)
    except grpc.RpcError as error:
        raise explanation(link, error) from None
    except OSError as error:
        raise ConfigError(f"--fetch-backbone: cannot write {folder}: {error.strerror}") from None
    finally:
        connection.close()


def _fetch(connection: Connection, path: Path, size: int, digest: str) -> None:
    """Fetch the rest of a file, and give it its name when it is whole."""
    part, told = _part(path), 0
    with part.open("ab") as file:
        while (have := file.tell()) < size:
            piece = connection.piece(f"{LIST}{path.name}/{have}")
            if not piece or len(piece) > min(PIECE, size - have):
                raise ConnectionFailed(f"--fetch-backbone: the server stopped at {have:,} of {size:,} bytes of {path}")
            file.write(piece)
            if 10 * file.tell() // size > told:
                told = 10 * file.tell() // size
                log.info("%s: %d %% of %.1f MB", path.name, 10 * told, size / 1e6)
    if not _is_here(part, digest):
        part.unlink()
        raise ConnectionFailed(f"--fetch-backbone: {path.name} came damaged; start again")
    part.replace(path)


def _listed(content: bytes | None) -> dict[str, tuple[int, str]]:
    """Return the files that a server lists, which may be any bytes."""
    if content is None:
        raise ConnectionFailed(
            "--fetch-backbone: the server hands out no backbone (flower-server --serve-backbone); get the folder from "
            "whoever runs it"
        )
    try:
        files: dict[str, Any] = json.loads(content)
        listed = {name: (int(size), str(digest)) for name, (size, digest) in files.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        listed = {}
    if not 0 < len(listed) <= MOST_FILES or not all(map(travels, listed)) or min(s for s, _ in listed.values()) < 0:
        raise ConnectionFailed("--fetch-backbone: expected a list of a network's files from the server")
    return listed


def _is_here(path: Path, digest: str) -> bool:
    """Return whether a file is there whole; a finished one must be the server's."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        same = hashlib.file_digest(file, "sha256").hexdigest() == digest
    if not same and not path.name.endswith(".part"):
        raise ConfigError(f"--fetch-backbone: {path} is not the server's; name another folder")
    return same


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")
