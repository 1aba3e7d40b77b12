"""The limit on networks of which a client decides how large they are."""

import pytest
from torch import nn

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import ModelError
from hyperbloom.server.loop import ration
from hyperbloom.server.loop.ration import Ration


def test_parameters_are_counted_together_and_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ration, "MOST_BYTES", 4 * (3 * 20 + 20))
    with Ration(RunConfig()):
        nn.Linear(3, 20)
    with pytest.raises(ModelError, match="are beyond"), Ration(RunConfig()):
        nn.Linear(3, 20)
        nn.Linear(1, 1)
    monkeypatch.undo()
    with pytest.raises(ModelError, match="are beyond 1024 MiB"), Ration(RunConfig(num_classes=10)):
        nn.Linear(2**20, 2**20)  # four TiB, which no machine gives


def test_what_the_run_declares_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ration, "MOST_BYTES", 1)
    with Ration(RunConfig(input_shape=(3,), num_classes=20)):
        nn.Linear(3, 20)
