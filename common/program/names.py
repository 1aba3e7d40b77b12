"""What a client may be called: the name becomes a folder's and a file's."""

import re

from hyperbloom.common.errors import ConfigError

__all__ = ["check_name"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str, where: str) -> str:
    """Return a client's name as it is; `where` says in an error what was set to it.

    Raises:
        ConfigError: it is no name.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: expected 1 to 64 letters, digits, dots, hyphens and underscores, starting with a letter "
            f"or digit; found {name!r}"
        )
    return name
