"""Clients on a small share of the digits, each with a state folder of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.client import client_for
from hyperbloom.common.data import DataSpec

from .orders import Worker

SHARE = DataSpec(split="iid", partition=0, partitions=6, max_train=40, seed=1)


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Let no test of small tensors wait for threads that share few cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Undo what a command does to its process: environment, loaded clients."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("FLWR_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    client_for.cache_clear()
    yield
    client_for.cache_clear()


@pytest.fixture
def make_worker(tmp_path: Path) -> Callable[..., Worker]:
    """Return a function that makes a worker, as a process that starts does; state lies under its name."""

    def make(client_id: str = "client-0", data: DataSpec = SHARE, size: str = "M", disclose: bool = False) -> Worker:
        settings = ClientSettings(client_id, data, "cpu", size, tmp_path / client_id, disclose)
        return Worker(settings)

    return make
