"""Exceptions as values, so that one client's failure does not stop the others."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def attempt(function: Callable[..., T], *arguments: object) -> T | Exception:
    """Return what a function returns, or the exception that it raises."""
    try:
        return function(*arguments)
    except Exception as error:
        return error
