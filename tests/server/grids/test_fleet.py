"""What a server takes from its machine: its logs."""

import logging
from pathlib import Path

import pytest

from hyperbloom.server.grids import fleet


def test_the_log_of_a_run_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "LARGEST_LOG", 1000)
    with fleet.log_to(tmp_path / "server.log"):
        for number in range(1000):
            logging.getLogger("hyperbloom").warning("line %d of a client that talks", number)
    files = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert files.keys() == {"server.log", "server.log.1", "server.log.2", "server.log.3"}
    assert max(files.values()) <= 1000
    assert "line 999 of" in (tmp_path / "server.log").read_text()
