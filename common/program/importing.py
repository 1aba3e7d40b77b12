"""Import of users' own functions, which the command line names as `package.module:function`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from hyperbloom.common.errors import HyperbloomError


@contextmanager
def current_directory() -> Iterator[None]:
    """Make the current directory importable. An installed command does not search the folder in which it starts."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def find_function(name: str, what: str, error: type[HyperbloomError]) -> Callable[..., object]:
    """Import and return the function `package.module:function`; `what` describes the expected one in errors.

    Raises:
        error: the function cannot be imported, or is not callable.
    """
    try:
        found: Any = resolve_name(name)
    except Exception as cause:
        raise error(f"{name}: expected {what}, found {describe(cause)}; searched from {Path.cwd()}") from cause
    if not callable(found):
        raise error(f"{name}: expected {what}, found {describe(found)}")
    return found


def describe(value: object) -> str:
    """Return one line about a value: the type and text of an error, or the type of any other value."""
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {' '.join(str(value).split())}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
