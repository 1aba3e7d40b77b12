"""Atomic writes, by a temporary file that is flushed to the disk and then renamed; locks between processes."""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from filelock import lock_descriptor

if TYPE_CHECKING:
    from torch import Tensor


def write_bytes(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write `content` to `path` atomically: a crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".unfinished")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.chmod(temporary, mode)
            _give_to_owner(descriptor, path.parent)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if directory := getattr(os, "O_DIRECTORY", 0):  # flush the new name, too; Windows opens no folders
        folder = os.open(path.parent, directory)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _give_to_owner(descriptor: int, folder: Path) -> None:
    """Give root's file to the owner of its folder, who runs the server that reads it."""
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        with suppress(PermissionError):  # in a namespace, or on a share, root may not
            os.fchown(descriptor, *folder.stat()[4:6])


def delete_unfinished(folder: Path, but: str = "") -> None:
    """Delete what killed processes have left in a folder and below, but not below folders that are named `but`.

    Call it under the folder's lock: a file that is being written looks the same.
    """
    for path in folder.rglob(".*.unfinished"):
        if but not in path.relative_to(folder).parts:
            path.unlink(missing_ok=True)


FileState = tuple[int, int, int] | None
"""Inode, time of change (ns) and size (bytes) of a file; None if there is none."""


def file_state(path: Path) -> FileState:
    """Return the state of a file, which changes with every write."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def claim(file: IO[str], patience_s: float = 0.0) -> bool:
    """Lock an open file until it is closed. Return False if another holds it, still after `patience_s` seconds.

    The lock is the system's own (`flock`, on Windows the first byte), and so ends with its process.

    Raises:
        OSError: the file system has no locks.
    """
    deadline = time.monotonic() + patience_s
    while not lock_descriptor(file.fileno(), blocking=False):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock beside `path` while the body reads and replaces it; other processes wait."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.with_suffix(".lock").open("a") as lock:
        _give_to_owner(lock.fileno(), path.parent)
        lock_descriptor(lock.fileno(), poll_interval=0.01)
        yield


def keep(source: Path, target: Path) -> None:
    """Keep the current content of `source` at `target`, as a hard link or, where links fail, a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        write_bytes(target, source.read_bytes())


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """Write `value` as indented JSON, atomically."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode(), mode)


def write_tensors(path: Path, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]) -> None:
    """Write tensors in the safetensors format, atomically; a shared tensor is written under each of its names."""
    import safetensors.torch  # late: it imports torch, which slows commands that write no tensors

    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    end = 0
    for name, tensor in sorted(contiguous.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:  # safetensors refuses overlapping tensors
            contiguous[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    write_bytes(path, safetensors.torch.save(contiguous, dict(metadata)))
