import os
import signal
from collections.abc import Iterator
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
