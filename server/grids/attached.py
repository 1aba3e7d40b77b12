"""A run on a SuperLink that somebody else has started, over its HTTP API."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from hyperbloom.common.errors import ConnectionFailed
from hyperbloom.server.broker.superlink import task
from hyperbloom.server.grids.live import LiveGrid

__all__ = ["attached"]


@contextmanager
def attached(address: str, version: str, ca: bytes | None = None) -> Iterator[LiveGrid]:
    """Start a run on a SuperLink and hold its ServerApp task, with heartbeats; yield its grid.

    Args:
        address: `HOST:PORT` of the SuperLink's HTTP API.
        version: of the app, as the run announces it.
        ca: PEM of the SuperLink's CA; None for plain text.

    Raises:
        ConnectionFailed: another process took the run's task, or the SuperLink does not answer.
    """
    try:
        with task(address, version, ca) as grid:
            yield grid
    except httpx.HTTPError as error:
        raise ConnectionFailed(f"the SuperLink at {address} does not answer ({error})") from None
