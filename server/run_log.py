"""The log file of a run, `server.log`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["log_to"]


class _LogFile(logging.FileHandler):
    """A line that the disk does not take is lost; the files of the run itself tell that the disk is full."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Go on."""


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Write our log, and Flower's, into a file."""
    handler = _LogFile(path)
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("hyperbloom", "flwr")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()
