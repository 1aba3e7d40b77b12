"""Atomic writes: a temporary file beside the target is flushed to the disk and then renamed."""

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["keep", "locked", "write_bytes", "write_json", "write_tensors"]


def write_bytes(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write `content` to `path` atomically: a crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # flush the new name, too
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock beside `path` while the body reads and replaces it; other processes wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
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
