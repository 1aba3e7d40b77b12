"""A disk that is full: one line, code 6, nothing half-written, and the run goes on when there is room again."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from hyperbloom.common.files import storage
from hyperbloom.server.cli import main
from hyperbloom.server.runs import folder
from tests.conftest import restored_loggers

RUN = ["--engine", "inline", "--clients", "2", "--rounds", "6", "--eval-every", "2", "--set", "local.steps=2"]


class FullDisk:
    """Takes so many more writes, and half of the next one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
        self.left = writes
        self._fsync = os.fsync
        monkeypatch.setattr(storage.os, "fsync", self.fsync)

    def fsync(self, descriptor: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._fsync(descriptor)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with room enough."""
    path = tmp_path_factory.mktemp("disk") / "whole"
    with restored_loggers():
        assert main([*RUN, "--set", "checkpoint_every=2", "--run-dir", str(path)]) == 0
    return path


@pytest.mark.parametrize("writes", [12, 15, 18, 21])
def test_a_full_disk_ends_a_run_that_can_go_on(
    writes: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        FullDisk(patch, writes)
        assert main([*RUN, "--set", "checkpoint_every=2", "--run-dir", str(tmp_path / "run")]) == 6
    error = capsys.readouterr().err
    assert f"cannot write to {tmp_path / 'run'}: No space left on device" in error
    assert "Traceback" not in error and len(error.splitlines()) == 1
    assert not list((tmp_path / "run").rglob(".*.safetensors.*"))
    assert main(["--resume", str(tmp_path / "run")]) == 0
    for name in ("summary.json", "hypernetwork-last.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes()


def test_before_the_first_checkpoint_a_full_disk_names_a_way_that_works(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*RUN, "--set", "checkpoint_every=2", "--run-dir", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        FullDisk(patch, 3)
        assert main(command) == 6
    error = capsys.readouterr().err
    assert "--resume" not in error
    assert f"begin again with the same command, after you have deleted {tmp_path / 'run'}" in error
    shutil.rmtree(tmp_path / "run")
    assert main(command) == 0


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full takes no byte; a file-size limit takes some: the file is as long as before."""
    import resource
    import signal

    path = tmp_path / "metrics.jsonl"
    folder._append(path, [{"round": 1}])
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            folder._append(path, [{"round": 2}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "command", [["compare", "--strategies", "fedavg,local"], ["tune", "--over", "local.steps=2,3"]]
)
def test_a_full_disk_ends_what_compares_runs_in_one_line_too(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *command,
        "--out",
        str(tmp_path / "out"),
        "--set",
        "clients=2",
        "--set",
        "rounds=4",
        "--set",
        "local.steps=2",
    ]
    with monkeypatch.context() as patch:
        FullDisk(patch, 18)
        assert main(words) == 6
    error = capsys.readouterr().err
    assert "No space left on device. Nothing is half-written" in error and len(error.splitlines()) == 1
    assert main(words) == 0
