"""A client's state on its own disk: its identity and the personal part of its models (docs/for-sites.md, 5)."""

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch
from safetensors import SafetensorError
from torch import Tensor

from hyperbloom.common.config import Section, check
from hyperbloom.common.errors import ConfigError, DiskError, HyperbloomError, RefusedError, WireError
from hyperbloom.common.files.storage import claim, delete_unfinished, keep, write_json, write_tensors
from hyperbloom.common.layout import Layout
from hyperbloom.common.wire.orders import Scope

LONGEST_RUN_ID = 200  # bytes
CHECKPOINTS = 2
"""Number of checkpoints that a server keeps. A client ignores older resume points, which bounds its versions."""
MOST_RUNS = 500
"""Most runs of which a client keeps personal parts, and models with which it was scored."""


class Scored(Section):
    """Facts about the model with which a client was last scored.

    Attributes:
        private: the part that never left the client, one of `PRIVATE` of the wire.
        moments: means and then deviations by which targets were standardised.
        metrics: on the `total` test examples.
        adapt: what was adapted of the network with the digest `backbone`, which is not in the file.
        gain: what the federation gains this client, in a sentence.
        table: the schema by which a table was read, as JSON; a later run may have another.
    """

    model: str
    size: str
    input_shape: tuple[int, ...]
    num_classes: int
    round: int
    private: str
    task: str
    moments: tuple[float, ...]
    metrics: dict[str, float]
    total: int
    adapt: str = "all"
    backbone: str | None = None
    gain: str = ""
    table: str | None = None


class Kept:
    """A file of tensors that are of use only with the metadata with which they were saved."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write the file in place of another one; HyperbloomError if it cannot be written."""
        with _disk():
            write_tensors(self.path, tensors, metadata)

    def is_of(self, metadata: Mapping[str, str]) -> bool:
        """Return whether there is a readable file with exactly these metadata, without reading its tensors."""
        try:
            with safetensors.safe_open(self.path, framework="pt") as file:
                return bool(file.metadata() == metadata)
        except (SafetensorError, OSError):
            return False

    def load(self, metadata: Mapping[str, str]) -> dict[str, Tensor] | None:
        """Return the tensors of a file with exactly these metadata, or None if there is no such readable file."""
        try:
            found, tensors = _read(self.path)
        except (SafetensorError, OSError):
            return None
        return tensors if found == metadata else None


class _Version(NamedTuple):
    """A version of a file, written in round `round` after the server had gone back `rewinds` times."""

    path: Path
    round: int
    rewinds: int


class Versioned:
    """A file that keeps earlier versions as long as the server may go back to them, with at most three files in all.

    The newest version is at `path`. A version that a checkpoint needs is hard-linked elsewhere before it is replaced.
    """

    def __init__(self, path: Path, earlier: Path, name: str) -> None:
        self.path, self._earlier, self._name = path, earlier, name

    def find(self, scope: Scope) -> Path | None:
        """Return the path of the newest version that is part of the run, or None.

        Raises:
            SafetensorError: the file at `path` is damaged.
            OSError: the file at `path` cannot be read.
        """
        known = [version for version in [*self._kept(), *self._current()] if _is_part(version, scope)]
        return max(known, key=lambda version: version.round).path if known else None

    def write(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], scope: Scope) -> None:
        """Write a new version, and keep those earlier ones to which the server may go back."""
        try:
            current = list(self._current())
        except (SafetensorError, OSError):
            current = []  # a damaged version is not worth keeping
        kept, new = list(self._kept()), _Version(self.path, scope.round, len(scope.rewound))
        known, needed = [new, *(each for each in (*kept, *current) if _is_part(each, scope))], set[_Version]()
        for point in scope.resume_points[-CHECKPOINTS:]:
            before = [version for version in known if version.round <= point]
            needed |= {max(before, key=lambda version: version.round)} if before else set()
        for version in needed.intersection(current):
            keep(self.path, self._earlier / f"{self._name}@{version.round}-{version.rewinds}.safetensors")
        when = torch.tensor(new[1:])  # safetensors writes metadata in varying order
        write_tensors(self.path, {**tensors, "moment": when}, metadata)
        for version in kept:
            if version not in needed:
                version.path.unlink(missing_ok=True)

    def _current(self) -> Iterator[_Version]:
        if self.path.exists():
            with safetensors.safe_open(self.path, framework="pt") as file:
                yield _Version(self.path, *file.get_tensor("moment").tolist())

    def _kept(self) -> Iterator[_Version]:
        for path in sorted(self._earlier.glob("*.safetensors")) if self._earlier.exists() else ():
            name, _, when = path.stem.rpartition("@")
            with suppress(ValueError):  # a foreign file
                number, rewinds = map(int, when.split("-"))
                if name == self._name:
                    yield _Version(path, number, rewinds)


def _is_part(version: _Version, scope: Scope) -> bool:
    """Return whether a version is still part of the run: the server has not gone back to an earlier round since."""
    return all(version.round <= point for point in scope.rewound[version.rewinds :])


class ClientState:
    """The state folder of one client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._earlier, self._scored = folder / "earlier", folder / "scored"
        self.residual_path = folder / "residual.safetensors"
        self.encoder = Kept(folder / "encoder.safetensors")  # its values `(numel,)`, and its descriptor `(k,)`
        self.reference = Kept(folder / "reference.safetensors")  # inputs `(n, *shape)`

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for this process.

        Raises:
            RefusedError: another process on this machine runs as this client.
            ConfigError: the folder cannot be used.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):  # another user has made it for this one, or the file system has no modes
                self.folder.chmod(0o700)
            opened = (self.folder / "lock").open("a+")
        except OSError as error:
            raise ConfigError(f"--state-dir: cannot use {self.folder}: {error.strerror}") from None
        with opened as file:
            if not claim(file, 0.2):  # a page looks for a moment
                file.seek(1)  # Windows lets nobody read the byte that is locked
                raise RefusedError(
                    f"process {file.read().strip() or '?'} already runs as this client (state in {self.folder}); "
                    "stop it, or choose another --client-id or --state-dir"
                )
            file.truncate(0)
            file.write(f" {os.getpid()}")
            file.flush()
            delete_unfinished(self.folder)
            yield

    def token(self, server: str = "", address: str = "") -> str:
        """Return this client's secret for one server, made on first use: what a server is told helps at no other.

        Args:
            server: the server's name (`server_of`); all servers without TLS share the empty one.
            address: where it was reached. A server that has a new CA there keeps its secret.

        Raises:
            HyperbloomError: the file that holds it is damaged.
        """
        path = self.folder / "identity.json"
        try:
            known = json.loads(path.read_text())["secrets"] if path.exists() else {}
            there = [name for name, one in known.items() if name and server and one["address"] == address]
            old = server if server in known else next(iter(there), None)
            secret = str(known[old]["secret"]) if old is not None else secrets.token_hex(32)
            now = {name: one for name, one in known.items() if name != old}
            now[server] = {"secret": secret, "address": address}
            if now != known:
                with _disk():
                    write_json(path, {"secrets": now}, mode=0o600)
            return secret
        except (ValueError, KeyError, TypeError, AttributeError):
            raise HyperbloomError(
                "identity.json in the client's state folder is damaged: expected JSON with secrets. Restore it from a "
                "backup, or move it away and ask the server's operator to admit this client anew"
            ) from None

    def load_personal(self, scope: Scope, layout: Layout) -> tuple[Tensor, Tensor | None] | None:
        """Return the `(P,)` personal parameters and their momentum, or None if this run has none yet.

        If the server has gone back to a checkpoint, this returns the parameters of that time.

        Raises:
            HyperbloomError: the file is damaged or belongs to another architecture.
        """
        file, how = self.personal_path(scope.run_id), "move it away to start from fresh weights"
        try:
            found = self._personal(scope.run_id).find(scope)
            if found is None:
                return None
            file = found
            metadata, tensors = _read(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise HyperbloomError(f"{self._named(file)} is unreadable ({_why(error)}); {how}") from None
        values = tensors.get("values")
        if metadata.get("layout") != layout.digest or values is None or values.shape != (layout.numel,):
            raise HyperbloomError(f"{self._named(file)} belongs to another architecture; {how}")
        return values, tensors.get("momentum")

    def save_personal(self, scope: Scope, layout: Layout, values: Tensor, momentum: Tensor | None = None) -> None:
        """Write the `(P,)` personal parameters and their momentum; HyperbloomError if they cannot be written."""
        tensors = {"values": values} | ({} if momentum is None else {"momentum": momentum})
        _check_room(self.personal_path(scope.run_id))
        with _disk():
            self._personal(scope.run_id).write(tensors, {"layout": layout.digest}, scope)

    def load_residual(self, scope: Scope, layout: Layout, noise: str = "") -> Tensor | None:
        """Return the `(P,)` residual of compression for this run and its `noise`, or None if there is none that fits.

        Unlike the personal part the residual is optional, so an unreadable file counts as none. If the last one is
        gone, or another run's, an earlier one has been sent since.
        """
        metadata = {"run": scope.run_id, "layout": layout.digest, "noise": noise}
        try:
            path = self._residual(scope.run_id).find(scope) if Kept(self.residual_path).is_of(metadata) else None
        except (SafetensorError, OSError, ValueError):
            return None
        tensors = path and Kept(path).load(metadata)
        values = tensors.get("values") if tensors else None
        return values if values is not None and values.shape == (layout.numel,) else None

    def save_residual(self, scope: Scope, layout: Layout, values: Tensor, noise: str = "") -> None:
        """Write the `(P,)` residual for this run in place of any other; HyperbloomError if it cannot be written."""
        with _disk():
            for path in self._earlier.glob("residual-*"):  # of another run: `load_residual` takes none of these
                if not path.name.startswith(f"residual-{_file_name(scope.run_id)}@"):
                    path.unlink(missing_ok=True)
            metadata = {"run": scope.run_id, "layout": layout.digest, "noise": noise}
            self._residual(scope.run_id).write({"values": values}, metadata, scope)

    def forget_earlier(self, run_id: str) -> None:
        """Delete the earlier versions for a complete run and its baselines, which nobody will resume."""
        # An id ends with eight random digits. If they are still to come, it is the beginning of another server's id.
        complete = re.compile(f"(residual-)?{re.escape(run_id)}-(?!.*[0-9a-f]{{8}}-)")
        for path in self._earlier.glob("*.safetensors"):
            if complete.match(path.name):
                path.unlink(missing_ok=True)

    def save_scored(self, run_id: str, tensors: Mapping[str, Tensor], facts: Scored) -> None:
        """Write the model with which this client was scored in place of the last one; HyperbloomError if that fails."""
        path = self._scored / f"{_file_name(run_id)}.safetensors"
        _check_room(path)
        with _disk():
            write_tensors(path, tensors, {"facts": facts.model_dump_json()})

    def load_scored(self, run_id: str) -> tuple[dict[str, Tensor], Scored]:
        """Return the tensors and facts that `save_scored` wrote; HyperbloomError if the file is damaged."""
        path = self._scored / f"{run_id}.safetensors"
        try:
            metadata, tensors = _read(path)
            return tensors, check(Scored, metadata["facts"], str(path))
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise HyperbloomError(f"{path} cannot be read ({error})") from None

    def scored_runs(self) -> list[str]:
        """Return the ids of the runs with such a model."""
        return sorted(path.stem for path in self._scored.glob("*.safetensors"))

    def _personal(self, run_id: str) -> Versioned:
        return Versioned(self.personal_path(run_id), self._earlier, run_id)

    def _residual(self, run_id: str) -> Versioned:
        return Versioned(self.residual_path, self._earlier, f"residual-{_file_name(run_id)}")

    def _named(self, path: Path) -> str:
        """Return a file's name in this folder: servers read the texts of errors, and a path has a user's name."""
        return f"{path.relative_to(self.folder)} in the client's state folder"

    def personal_path(self, run_id: str) -> Path:
        """Return where this run's personal part is."""
        return self.folder / "personal" / f"{_file_name(run_id)}.safetensors"


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return metadata and tensors of a file; SafetensorError or OSError if it cannot be read."""
    with safetensors.safe_open(path, framework="pt") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _file_name(run_id: str) -> str:
    """Return a run's id, which servers choose; WireError if it is too long, or would lead out of the folder."""
    is_name = run_id.strip(".") and Path(run_id).name == run_id and run_id.isprintable()
    if not is_name or len(os.fsencode(run_id)) > LONGEST_RUN_ID:
        raise WireError(f"run_id: expected the name of a run, found {run_id[:60]!r}")
    return run_id


def _check_room(path: Path) -> None:
    """Raise a HyperbloomError for the file of one more run than `MOST_RUNS`: servers choose the names of runs."""
    if not path.exists() and sum(1 for _ in path.parent.glob("*.safetensors")) >= MOST_RUNS:
        raise HyperbloomError(f"the client keeps models of {MOST_RUNS} runs already; its user can delete old ones")


@contextmanager
def _disk() -> Iterator[None]:
    """Convert disk errors to a DiskError without paths, because the server reads its text."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise DiskError(f"the client cannot write its state: {_why(error)}") from error


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
