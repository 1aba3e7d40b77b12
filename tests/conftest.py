import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

# Before Flower is imported anywhere: it reads both when it is.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")

import pytest
import torch

import figures.paper_tables  # noqa: F401 - it registers what papers alone need, and many tests use
from hyperbloom.common.config import RunConfig

# Most tests are of other things: a run in this process does not compare with training alone unless it says so.
RunConfig.model_fields["gains"].default = False
RunConfig.model_rebuild(force=True)

# Small products are many times slower on several threads of a busy machine, and equal to the bit on one.
torch.set_num_threads(1)

# A shell's background jobs ignore Ctrl-C, and so would all that the tests start and stop by it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def restored_loggers() -> Iterator[None]:
    """Put handlers and levels of the loggers back, and close files that were opened meanwhile."""
    loggers = (logging.getLogger("hyperbloom"), logging.getLogger("flwr"))
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        for logger, handlers, level, propagate in before:
            for handler in set(logger.handlers) - set(handlers):
                handler.close()
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


@pytest.fixture(autouse=True)
def own_loggers() -> Iterator[None]:
    """Leave no handler behind that writes where a test's output went."""
    with restored_loggers():
        yield


@pytest.fixture
def clean_process() -> Iterator[None]:
    """Forget the virtual clients that a test has made in this process."""
    from hyperbloom.client.work.client import client_for

    yield
    torch.set_num_threads(1)  # a benchmark may have set another number
    client_for.cache_clear()


@pytest.fixture
def torchvision() -> ModuleType:
    """Return torchvision; skip the test where it is not installed, or was built for another torch."""
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"torchvision cannot be imported: {error}")
    return torchvision
