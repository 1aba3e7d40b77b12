"""What a client keeps on its own disk: its identity and the personal part of its models.

    STATE/identity.json                  the secret by which the server knows this client again (mode 0600)
    STATE/lock                           held while a process runs as this client
    STATE/personal/RUN.safetensors       personal parameters and their momentum, per run
    STATE/residual.safetensors           what compression left out of the replies, of the last run only
    STATE/encoder.safetensors            the encoder of the round under way, until its gradient is computed (ODPFL-HN)

None of it is ever sent, but the secret, which goes to the server and nowhere else.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import safetensors
from safetensors import SafetensorError
from torch import Tensor

from hyperbloom.client.training import FlatPart
from hyperbloom.common.errors import ConfigError, HyperbloomError, RefusedError
from hyperbloom.common.layout import Layout
from hyperbloom.common.storage import write_json, write_tensors

__all__ = ["ClientState", "FileState", "default_state_dir"]

FileState = tuple[int, int, int] | None
"""Inode, time of change and size of a file; None if there is none."""


def default_state_dir(client_id: str) -> Path:
    """Return where a client of this name keeps its state unless told otherwise (XDG's state folder)."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "hyperbloom" / client_id


class ClientState:
    """The folder in which one client's identity and personal parameters survive restarts."""

    def __init__(self, folder: Path) -> None:
        """Use `folder`, which is made when something is first written."""
        self.folder = folder

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for this process.

        Raises:
            RefusedError: another process on this machine runs as this client.
        """
        with self._open_lock() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise RefusedError(
                    f"process {file.read().strip() or '?'} already runs as this client (state in {self.folder}); "
                    "stop it, or choose another --client-id or --state-dir"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def _open_lock(self) -> IO[str]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return (self.folder / "lock").open("a+")
        except OSError as error:
            raise ConfigError(f"--state-dir: cannot use {self.folder}: {error.strerror}") from None

    def token(self) -> str:
        """Return this client's secret, made on first use.

        Raises:
            HyperbloomError: the file that holds it is damaged.
        """
        path = self.folder / "identity.json"
        if not path.exists():
            write_json(path, {"token": secrets.token_hex(32)}, mode=0o600)
        try:
            return str(json.loads(path.read_text())["token"])
        except (ValueError, KeyError, TypeError):
            raise HyperbloomError(
                f"{path} is damaged: expected JSON with a token. Restore it from a backup, or move it away and ask "
                "the server's operator to admit this client anew"
            ) from None

    def personal_file(self, run_id: str) -> FileState:
        """Return what changes whenever anybody writes this run's personal part."""
        try:
            status = self._personal_path(run_id).stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def load_personal(self, run_id: str, part: FlatPart) -> bool:
        """Fill the personal part and its momentum from the disk; False if this run has left nothing yet.

        Raises:
            HyperbloomError: the file is damaged or belongs to another architecture.
        """
        path = self._personal_path(run_id)
        if not path.exists():
            return False
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                layout = (file.metadata() or {}).get("layout")
                tensors = {name: file.get_tensor(name).to(part.values.device) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise HyperbloomError(
                f"{path} cannot be read ({error}); move it away to start from fresh weights"
            ) from None
        if layout != part.layout.digest or tensors.get("values", part.values[:0]).shape != part.values.shape:
            raise HyperbloomError(f"{path} belongs to another architecture; move it away to start from fresh weights")
        part.load(tensors["values"])
        part.momentum = tensors.get("momentum")
        return True

    def save_personal(self, run_id: str, part: FlatPart) -> None:
        """Write the personal part and its momentum."""
        tensors = {"values": part.values} | ({} if part.momentum is None else {"momentum": part.momentum})
        write_tensors(self._personal_path(run_id), tensors, {"layout": part.layout.digest})

    def load_residual(self, run_id: str, layout: Layout) -> Tensor | None:
        """Return the `(P,)` values that compression still owes this run, or None if there are none that fit.

        Unlike the personal part they can be done without: a file that cannot be read is as good as none.
        """
        try:
            with safetensors.safe_open(self._residual_path, framework="pt") as file:
                if file.metadata() != {"run": run_id, "layout": layout.digest}:
                    return None
                values: Tensor = file.get_tensor("values")
        except (SafetensorError, OSError):
            return None
        return values if values.shape == (layout.numel,) else None

    def save_residual(self, run_id: str, layout: Layout, values: Tensor) -> None:
        """Write what compression owes this run, over what it owed another one."""
        write_tensors(self._residual_path, {"values": values}, {"run": run_id, "layout": layout.digest})

    def forget_residual(self) -> None:
        """Owe nothing any more."""
        self._residual_path.unlink(missing_ok=True)

    def save_encoder(self, run_id: str, version: str, values: Tensor, descriptor: Tensor) -> None:
        """Write the encoder `(numel,)` that made a descriptor `(k,)`, over any other."""
        tensors = {"values": values, "descriptor": descriptor}
        write_tensors(self._encoder_path, tensors, {"run": run_id, "version": version})

    def load_encoder(self, run_id: str, version: str) -> tuple[Tensor, Tensor] | None:
        """Return encoder and descriptor, or None if what is kept is not of this run and version, or damaged."""
        try:
            with safetensors.safe_open(self._encoder_path, framework="pt") as file:
                if file.metadata() != {"run": run_id, "version": version}:
                    return None
                return file.get_tensor("values"), file.get_tensor("descriptor")
        except (SafetensorError, OSError):
            return None

    def forget_encoder(self) -> None:
        """Keep no encoder any more."""
        self._encoder_path.unlink(missing_ok=True)

    @property
    def _encoder_path(self) -> Path:
        return self.folder / "encoder.safetensors"

    @property
    def _residual_path(self) -> Path:
        return self.folder / "residual.safetensors"

    def _personal_path(self, run_id: str) -> Path:
        return self.folder / "personal" / f"{run_id}.safetensors"
