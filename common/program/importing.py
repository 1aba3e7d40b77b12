"""Users' own functions, named `package.module:function` on the command line."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hyperbloom.common.errors import HyperbloomError

__all__ = ["current_directory", "describe", "find_function"]


@contextmanager
def current_directory() -> Iterator[None]:
    """Make the current directory importable: an installed command does not search the folder it is started in."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def find_function(name: str, what: str, error: type[HyperbloomError]) -> Callable[..., object]:
    """Import and return the function that `name` names.

    Args:
        name: `package.module:function`.
        what: what is expected there, such as 'a function without arguments'.
        error: what to raise.

    Raises:
        error: it cannot be imported, or is no function.
    """
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as cause:
        searched = f"searched from {Path.cwd()}"
        raise error(f"{name}: expected to import {module_name!r}, found {describe(cause)}; {searched}") from cause
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise error(f"{name}: expected a function {attribute!r} in {module_name!r}, found no such name")
        found = getattr(found, part)
    if not callable(found):
        raise error(f"{name}: expected {what}, found {describe(found)}")
    function: Callable[..., object] = found
    return function


def describe(value: object) -> str:
    """Return in one line what a value is: an error's type and text, or a type."""
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {' '.join(str(value).split())}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
