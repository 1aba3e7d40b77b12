"""A short siege; `python -m siege.faults --minutes N` is the long one."""

import os
from pathlib import Path

import pytest

from siege.faults import besiege

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_federation_under_fire_loses_nothing(tmp_path: Path) -> None:
    """Set HYPERBLOOM_FAULT_SECONDS to 300 for the five-minute version."""
    left, seed = float(os.environ.get("HYPERBLOOM_FAULT_SECONDS", "10")), 1
    rounds = 20 if left < 60 else 400
    problems, actions = besiege(tmp_path, seed, left, rounds)
    assert not problems, (problems, (tmp_path / "actions.log").read_text())
    assert sum(actions.values()) >= 2, actions
