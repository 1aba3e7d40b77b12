"""Every error that Hyperbloom raises for something a person can mend.

    HyperbloomError
    |-- ConfigError        the description of the run is wrong                (exit code 2)
    |-- DataError          a data set is missing, unreadable or unusable      (exit code 2)
    |-- ModelError         a model does not fit the data or cannot be built   (exit code 2)
    |-- WireError          a message has the wrong names, shapes, types or values
    |-- RefusedError       the server does not admit this client              (exit code 3)
    |-- CohortError        not enough clients came, or all of them failed     (exit code 4)
    |-- ConnectionFailed   the other side cannot be reached or started        (exit code 5)
    |-- DiskError          the disk is full, or a write to it fails        (exit code 6)

A message says what was expected, what was found, and what to do. Asserts are for our own mistakes only.
"""

import errno
from collections.abc import Callable
from typing import ClassVar, TypeVar

from hyperbloom.common.reasons import Reason

T = TypeVar("T")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)  # a disk that takes no more


class HyperbloomError(Exception):
    """Base of all errors that a program reports to the user in one line.

    Attributes:
        exit_code: exit code of the process.
        reason: reason that a client reports to the server if this error stops it from carrying out an order.
    """

    exit_code: ClassVar[int] = 1
    reason: Reason = Reason.FAILED

    def __init__(self, *args: object, reason: Reason | None = None) -> None:
        super().__init__(*args)
        if reason is not None:
            self.reason = reason


class ConfigError(HyperbloomError, ValueError):
    """A key of the run's configuration is unknown, of the wrong type, out of range or impossible."""

    exit_code = 2


class DataError(HyperbloomError):
    """A data set cannot be found, read or split."""

    exit_code = 2


class ModelError(HyperbloomError):
    """A target network cannot be built for the data at hand."""

    exit_code = 2
    reason = Reason.UNFIT


class WireError(HyperbloomError):
    """A message was refused before it touched any state."""

    reason = Reason.UNFIT


class RefusedError(HyperbloomError):
    """The server does not admit this client; trying again will not help."""

    exit_code = 3


class CohortError(HyperbloomError):
    """Fewer clients joined or answered than the run needs."""

    exit_code = 4


class ConnectionFailed(HyperbloomError):
    """The SuperLink, or the server behind an address, cannot be reached or started."""

    exit_code = 5


class DiskError(HyperbloomError):
    """The disk does not take what a run has to write. Earlier files are intact."""

    exit_code = 6


def printable(text: str) -> str:
    """Return a text from elsewhere as it may stand on a terminal: with spaces for control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def attempt(function: Callable[..., T], *arguments: object) -> T | Exception:
    """Return what a function returns, or the exception that it raises, so that one failure does not stop others."""
    try:
        return function(*arguments)
    except Exception as error:
        return error


def describe(value: object) -> str:
    """Return one line about a value: the type and text of an error, or the type of any other value."""
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {' '.join(str(value).split())}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
