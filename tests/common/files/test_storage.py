"""Files that are whole or absent, and readable by whom they are meant for."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread, Timer
from typing import Any

import pytest
import torch
from safetensors import safe_open

from hyperbloom.common.files.storage import claim, file_state, keep, locked, write_bytes, write_json, write_tensors


def mode(path: Path) -> int:
    """Return a file's permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_are_made_and_files_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_bytes(path, b"first, and longer")
    write_bytes(path, b"second")
    assert path.read_bytes() == b"second"
    assert [item.name for item in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(error)):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_a_failed_first_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_bytes(tmp_path / "file", b"new")
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_of_two_names_is_written_under_both(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    tensors = {"one": whole, "same": whole, "start": whole[:2], "rest": whole[2:]}
    write_tensors(tmp_path / "file", tensors, {})
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert {name: file.get_tensor(name).tolist() for name in tensors} == {n: t.tolist() for n, t in tensors.items()}


def noted(name: str, function: Callable[..., None], calls: list[str]) -> Callable[..., None]:
    """Return a function that notes that it was called."""

    def call(*arguments: Any) -> None:
        calls.append(name)
        function(*arguments)

    return call


def test_the_content_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name), calls))
    write_bytes(tmp_path / "file", b"new")
    assert calls == ["fsync", "replace", "fsync"]  # the last one of the folder, or the name may be lost


def test_all_of_the_content_is_flushed_and_nothing_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    fsync = os.fsync

    def look(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            sizes.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    before = len(os.listdir("/proc/self/fd"))
    write_bytes(tmp_path / "file", b"new")
    assert sizes == [3] and len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_permissions_are_what_was_asked_for_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    previous = os.umask(umask)
    try:
        write_json(tmp_path / "secret.json", {}, mode=0o600)
        write_bytes(tmp_path / "public", b"")
    finally:
        os.umask(previous)
    assert (mode(tmp_path / "secret.json"), mode(tmp_path / "public")) == (0o600, 0o644)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
def test_what_root_writes_belongs_to_the_owner_of_the_folder(tmp_path: Path) -> None:
    """Else a server that runs as another user could not read who was revoked."""
    os.chown(tmp_path, 12345, 54321)
    write_bytes(tmp_path / "clients.json", b"{}", mode=0o600)
    found = (tmp_path / "clients.json").stat()
    assert (found.st_uid, found.st_gid) == (12345, 54321)


def test_a_secret_is_never_readable_by_others_not_even_while_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    fsync = os.fsync

    def look(descriptor: int) -> None:
        found = os.fstat(descriptor).st_mode
        if stat.S_ISREG(found):
            seen.append(stat.S_IMODE(found))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    write_json(tmp_path / "secret.json", {"token": "x"}, mode=0o600)
    assert seen == [0o600]


def test_json_is_indented_and_ends_with_a_line(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": [1, 2.5], "b": None})
    text = (tmp_path / "x.json").read_text()
    assert text == '{\n  "a": [\n    1,\n    2.5\n  ],\n  "b": null\n}\n'
    assert json.loads(text) == {"a": [1, 2.5], "b": None}


def test_what_is_no_json_leaves_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", 1)
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {1, 2})
    assert (tmp_path / "x.json").read_text() == "1\n"


def test_tensors_come_back_bit_for_bit_with_their_metadata(tmp_path: Path) -> None:
    flat = torch.randn(6, generator=torch.Generator().manual_seed(0))
    tensors = {
        "view": flat[:4].view(2, 2),  # two views of one storage, one of them strided, one that wants gradients
        "strided": flat[4:].expand(3, 2).T,
        "parameter": torch.nn.Parameter(torch.tensor([1.5], dtype=torch.float64)),
        "empty": torch.empty(0, 3),
    }
    write_tensors(tmp_path / "x.safetensors", tensors, {"round": "7"})
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"round": "7"}
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


def test_a_write_changes_a_files_state_though_size_and_time_are_the_same(tmp_path: Path) -> None:
    path, states = tmp_path / "file", []
    assert file_state(path) is None
    for content in (b"one", b"two"):
        write_bytes(path, content)
        os.utime(path, ns=(0, 0))
        states.append(file_state(path))
    assert states[0] != states[1] == file_state(path)


@pytest.mark.parametrize("links", [True, False])
def test_what_is_kept_stays_when_the_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    if not links:
        monkeypatch.setattr(os, "link", fail)
    path, kept = tmp_path / "file", tmp_path / "earlier" / "kept"
    for content in (b"one", b"two"):
        write_bytes(path, content)
        keep(path, kept)
        assert os.path.samefile(path, kept) == links
    write_bytes(path, b"three")
    assert kept.read_bytes() == b"two"


def test_one_at_a_time_has_a_lock_and_the_others_wait(tmp_path: Path) -> None:
    path, entered = tmp_path / "folder" / "file.json", Event()

    def enter() -> None:
        with locked(path):
            entered.set()

    with locked(path), (path.parent / "file.lock").open("a") as file:
        assert not claim(file) and not claim(file, 0.05)
        other = Thread(target=enter)
        other.start()
        assert not entered.wait(0.1)
    other.join()
    assert entered.is_set()
    holder = (path.parent / "file.lock").open("a")
    with (path.parent / "file.lock").open("a") as file:
        assert claim(holder)
        Timer(0.05, holder.close).start()
        assert claim(file, 60.0)
