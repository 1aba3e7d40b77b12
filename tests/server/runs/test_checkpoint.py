"""Checkpoints as files: what is on the disk before one counts, how many stay, and which folders are left alone."""

import os
from pathlib import Path

import pytest
import torch

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.server.loop.listener import Checkpoint, Progress
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.runs.checkpoint import locked, read_resume
from hyperbloom.server.runs.folder import RunFolder
from hyperbloom.server.runs.lines import CLIENTS, METRICS

CONFIG = RunConfig(strategy="fedavg", rounds=20)


def checkpoint(phase: int, number: int) -> Checkpoint:
    """Return what a run without clients has to say after a round."""
    tensors = {} if phase else {"w": torch.tensor([float(number)])}
    return Checkpoint("run", phase, Progress(number, orders=number), {}, Roster().to_json(), 0, tensors)


def numbers(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("0*"))


def test_lines_are_on_the_disk_before_the_checkpoint_that_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, flush, flushed = RunFolder(tmp_path, CONFIG, "run"), os.fsync, dict[int, bool]()
    for name in (METRICS, CLIENTS):
        (tmp_path / name).write_text('{"round": 1}\n')

    def fsync(descriptor: int) -> None:
        counts = (tmp_path / "checkpoints" / "000001.json").exists()
        flushed.setdefault(os.fstat(descriptor).st_ino, counts)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    folder.checkpoint(checkpoint(0, 1))
    assert [flushed.get((tmp_path / name).stat().st_ino) for name in (METRICS, CLIENTS)] == [False, False]


def test_two_stay_and_of_a_run_that_is_over_the_last_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG, "run")
    for number in range(1, 4):
        folder.checkpoint(checkpoint(0, number))
    assert numbers(tmp_path) == ["000002.json", "000002.safetensors", "000003.json", "000003.safetensors"]
    assert read_resume(tmp_path, CONFIG, print)[0].points == [(0, 2), (0, 3)], "the oldest first"
    folder.checkpoint(checkpoint(1, 9))
    assert numbers(tmp_path) == ["000004.json"]


def test_what_a_killed_server_left_of_a_checkpoint_is_deleted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG, "run")
    folder.checkpoint(checkpoint(0, 1))
    (tmp_path / "checkpoints" / "000001.json").unlink()  # it is the first to go
    (tmp_path / "checkpoints" / "999999.json").write_text("{}")
    folder.checkpoint(checkpoint(0, 2))
    found = sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]*"))
    assert found == ["1000000.json", "1000000.safetensors", "999999.json"]


def test_a_damaged_checkpoint_is_deleted_once_another_one_is_sound(tmp_path: Path) -> None:
    """It would count as one of the two that stay, and a sound one would go in its place."""
    folder, said = RunFolder(tmp_path, CONFIG, "run"), list[str]()
    for number in (1, 2):
        folder.checkpoint(checkpoint(0, number))
    (tmp_path / "checkpoints" / "000002.safetensors").write_bytes(b"")
    assert read_resume(tmp_path, CONFIG, said.append)[1] == 1 and len(said) == 1
    assert numbers(tmp_path) == ["000001.json", "000001.safetensors"]


@pytest.mark.parametrize("name", ["baselines/local", METRICS, "checkpoints/lock"])
def test_a_run_with_a_symbolic_link_is_not_touched(tmp_path: Path, name: str) -> None:
    link, outside = tmp_path / "run" / name, tmp_path / "outside"
    outside.mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(outside if name.startswith("baselines") else outside / "file")
    before = sorted((tmp_path / "run").rglob("*"))
    with pytest.raises(ConfigError, match=r"found the symbolic link .*; delete it"), locked(tmp_path / "run"):
        raise AssertionError
    assert sorted((tmp_path / "run").rglob("*")) == before and not list(outside.iterdir())
