"""Names of clients, which also become names of folders and files."""

import os
import re
from pathlib import Path

from hyperbloom.common.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str, where: str) -> str:
    """Check a client's name and return it; ConfigError, with its source `where`, if it is not valid."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: expected 1 to 64 letters, digits, dots, hyphens and underscores, starting with a letter "
            f"or digit; found {name!r}"
        )
    return name


def by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts client-2 before client-10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split("([0-9]+)", name)]


def default_state_dir(client_id: str) -> Path:
    """Return the default state folder of a client with this name, in XDG's state folder."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "hyperbloom" / client_id
