"""What a client keeps on its own disk: its identity and the personal part of its models.

    STATE/identity.json                  the secret by which the server knows this client again (mode 0600)
    STATE/lock                           held while a process runs as this client
    STATE/personal/RUN.safetensors       personal parameters and their momentum, per run
    STATE/residual.safetensors           what compression left out of the replies, of the last run only
    STATE/encoder.safetensors            the encoder of the round under way, until its gradient is computed (ODPFL-HN)
    STATE/earlier/                       earlier versions of the two, to which a server that crashes may go back
    STATE/scored/RUN.safetensors         the model with which the client was last scored, if no one else has it whole
    STATE/reference.safetensors          the public inputs on which FedHeNN compares networks, the last ones only

None of it is ever sent, but the secret, which goes to the server and nowhere else.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import safetensors
import torch
from safetensors import SafetensorError
from torch import Tensor

from hyperbloom.client.training import Flat
from hyperbloom.common.config import Section, check
from hyperbloom.common.errors import ConfigError, HyperbloomError, RefusedError, WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import Weights
from hyperbloom.common.storage import keep, write_json, write_tensors

__all__ = ["NO_MOMENT", "ClientState", "FileState", "Moment", "Scored", "default_state_dir"]

FileState = tuple[int, int, int] | None
"""Inode, time of change and size of a file; None if there is none."""


@dataclass(frozen=True)
class Moment:
    """Where in a run an order belongs.

    Attributes:
        round: number of the order.
        resume_points: numbers of the last orders before the server's checkpoints, to which it may go back.
        rewound: such numbers to which it has gone back already, in order of time.
    """

    round: int = 0
    resume_points: tuple[int, ...] = ()
    rewound: tuple[int, ...] = ()

    def remembers(self, version: "_Version") -> bool:
        """Return whether what was written then is still part of the run: the server has not gone back behind it."""
        return all(version.round <= point for point in self.rewound[version.rewinds :])


class Scored(Section):
    """What a client knows of the model that it was last scored with.

    Attributes:
        round: number of the order to score it.
        private: what of it never left the client, one of `messages.PRIVATE`.
        correct: test examples that it classified correctly, of `total`.
    """

    model: str
    size: str
    input_shape: tuple[int, ...]
    num_classes: int
    round: int
    private: str
    correct: int
    total: int


NO_MOMENT = Moment()
LONGEST_RUN_ID = 200
"""Of a run that never goes back."""


@dataclass(frozen=True)
class _Version:
    """A file as it was written for order `round`, after the server had gone back `rewinds` times."""

    path: Path
    round: int
    rewinds: int


class _Versioned:
    """A file whose earlier versions are kept for as long as the server may go back to them: three of them at most.

    The newest lies at `path`; a version that a checkpoint stands on is linked beside before it is replaced.
    """

    def __init__(self, path: Path, earlier: Path, name: str) -> None:
        self.path, self._earlier, self._name = path, earlier, name

    def find(self, moment: Moment) -> Path | None:
        """Return the newest version that is part of the run, or None.

        Raises:
            SafetensorError, OSError: the newest cannot be read.
        """
        known = [version for version in [*self._kept(), *self._current()] if moment.remembers(version)]
        return max(known, key=lambda version: version.round).path if known else None

    def write(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], moment: Moment) -> None:
        """Write a new version, and keep of the others what the server may go back to."""
        rewinds = len(moment.rewound)
        try:
            current = [version for version in self._current() if moment.remembers(version)]
        except (SafetensorError, OSError):
            current = []  # damaged: of no use to anybody
        for version in current:
            kept = self._earlier / f"{self._name}@{version.round}-{version.rewinds}.safetensors"
            if any(version.round <= point < moment.round for point in moment.resume_points):
                keep(version.path, kept)
        when = torch.tensor([moment.round, rewinds])  # as metadata they would lie in any order
        write_tensors(self.path, {**tensors, "moment": when}, metadata)
        self._prune(moment)

    def _prune(self, moment: Moment) -> None:
        kept = list(self._kept())
        if not kept:
            return
        known = [version for version in kept if moment.remembers(version)]
        known.append(_Version(self.path, moment.round, len(moment.rewound)))
        needed = set()
        for point in moment.resume_points:
            before = [version for version in known if version.round <= point]
            if before:
                needed.add(max(before, key=lambda version: version.round).path)
        for version in kept:
            if version.path not in needed:
                version.path.unlink(missing_ok=True)

    def _current(self) -> Iterator[_Version]:
        if self.path.exists():
            with safetensors.safe_open(self.path, framework="pt") as file:
                when = file.get_tensor("moment").tolist() if "moment" in file.keys() else [0, 0]  # noqa: SIM118
            yield _Version(self.path, *when)

    def _kept(self) -> Iterator[_Version]:
        for path in sorted(self._earlier.glob("*.safetensors")) if self._earlier.exists() else ():
            name, _, when = path.stem.rpartition("@")
            with suppress(ValueError):  # nothing of ours
                number, rewinds = map(int, when.split("-"))
                if name == self._name:
                    yield _Version(path, number, rewinds)


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

    def load_personal(self, run_id: str, part: Flat, moment: Moment = NO_MOMENT) -> bool:
        """Fill the personal part and its momentum from the disk; False if this run has left nothing yet.

        After the server has gone back to a checkpoint, they are those that the client had then.

        Raises:
            HyperbloomError: the file is damaged or belongs to another architecture.
        """
        path = self._personal_path(run_id)
        try:
            found = self._personal(run_id).find(moment)
            if found is None:
                return False
            path = found
            with safetensors.safe_open(path, framework="pt") as file:
                layout = (file.metadata() or {}).get("layout")
                tensors = {name: file.get_tensor(name).to(part.values.device) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise HyperbloomError(
                f"{path} cannot be read ({error}); move it away to start from fresh weights"
            ) from None
        if layout != part.layout.digest or tensors.get("values", part.values[:0]).shape != part.values.shape:
            raise HyperbloomError(f"{path} belongs to another architecture; move it away to start from fresh weights")
        part.load(tensors["values"])
        part.momentum = tensors.get("momentum")
        return True

    def save_personal(self, run_id: str, part: Flat, moment: Moment = NO_MOMENT) -> None:
        """Write the personal part and its momentum.

        Raises:
            HyperbloomError: the disk does not take them; the earlier ones are as they were.
        """
        tensors = {"values": part.values} | ({} if part.momentum is None else {"momentum": part.momentum})
        with _disk():
            self._personal(run_id).write(tensors, {"layout": part.layout.digest}, moment)

    def load_residual(self, run_id: str, layout: Layout, moment: Moment = NO_MOMENT) -> Tensor | None:
        """Return the `(P,)` values that compression still owes this run, or None if there are none that fit.

        Unlike the personal part they can be done without: a file that cannot be read is as good as none.
        """
        try:
            path = self._residual(run_id).find(moment)
            if path is None:
                return None
            with safetensors.safe_open(path, framework="pt") as file:
                if file.metadata() != {"run": run_id, "layout": layout.digest}:
                    return None
                values: Tensor = file.get_tensor("values")
        except (SafetensorError, OSError, ValueError):
            return None
        return values if values.shape == (layout.numel,) else None

    def save_residual(self, run_id: str, layout: Layout, values: Tensor, moment: Moment = NO_MOMENT) -> None:
        """Write what compression owes this run, over what it owed another one.

        Raises:
            HyperbloomError: the disk does not take it; what was owed before is as it was.
        """
        with _disk():
            self._residual(run_id).write({"values": values}, {"run": run_id, "layout": layout.digest}, moment)

    def forget_residual(self) -> None:
        """Owe nothing any more."""
        self._residual_path.unlink(missing_ok=True)

    def forget_earlier(self, run_id: str) -> None:
        """Keep no earlier versions for a run and its baselines: it is complete, and nothing goes back to them."""
        for path in self._earlier.glob("*.safetensors"):
            if path.name.removeprefix("residual-").startswith(f"{run_id}-"):
                path.unlink(missing_ok=True)

    def save_scored(self, run_id: str, tensors: Mapping[str, Tensor], facts: Scored) -> None:
        """Write parameters and buffers of the model that this client was scored with, over the last one.

        Raises:
            HyperbloomError: the disk does not take them, or the id is no run's.
        """
        path = self._scored / f"{_file_name(run_id)}.safetensors"
        with _disk():
            write_tensors(path, tensors, {"facts": facts.model_dump_json()})

    def load_scored(self, run_id: str) -> tuple[dict[str, Tensor], Scored]:
        """Return what `save_scored` wrote.

        Raises:
            HyperbloomError: the file is damaged, or of another version.
        """
        path = self._scored / f"{run_id}.safetensors"
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                facts = check(Scored, json.loads((file.metadata() or {})["facts"]), str(path))
                return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise HyperbloomError(f"{path} cannot be read ({error})") from None

    def scored_runs(self) -> list[str]:
        """Return the ids of the runs that left such a model here."""
        return sorted(path.stem for path in self._scored.glob("*.safetensors"))

    @property
    def _scored(self) -> Path:
        return self.folder / "scored"

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

    def load_reference(self, digest: str) -> Weights | None:
        """Return the reference set with this digest; None if it is not here, or cannot be read: it is sent again."""
        try:
            with safetensors.safe_open(self._reference_path, framework="pt") as file:
                if file.metadata() != {"digest": digest}:
                    return None
                inputs: Tensor = file.get_tensor("inputs")
        except (SafetensorError, OSError):
            return None
        return Weights(Layout((("inputs", tuple(inputs.shape)),)), inputs.reshape(-1))

    def save_reference(self, digest: str, inputs: Tensor) -> None:
        """Write a reference set `(n, *shape)`, over another one; HyperbloomError if the disk does not take it."""
        with _disk():
            write_tensors(self._reference_path, {"inputs": inputs}, {"digest": digest})

    def has_reference(self, digest: str) -> bool:
        """Tell whether the reference set with this digest is here, without reading it."""
        try:
            with safetensors.safe_open(self._reference_path, framework="pt") as file:
                return bool(file.metadata() == {"digest": digest})
        except (SafetensorError, OSError):
            return False

    @property
    def _reference_path(self) -> Path:
        return self.folder / "reference.safetensors"

    def _personal(self, run_id: str) -> _Versioned:
        return _Versioned(self._personal_path(run_id), self._earlier, run_id)

    def _residual(self, run_id: str) -> _Versioned:
        return _Versioned(self._residual_path, self._earlier, f"residual-{_file_name(run_id)}")

    @property
    def _earlier(self) -> Path:
        return self.folder / "earlier"

    @property
    def _residual_path(self) -> Path:
        return self.folder / "residual.safetensors"

    def _personal_path(self, run_id: str) -> Path:
        return self.folder / "personal" / f"{_file_name(run_id)}.safetensors"


def _file_name(run_id: str) -> str:
    """Return a run's id, which servers choose.

    Raises:
        WireError: it would lead out of the folder.
    """
    if not run_id.strip(".") or Path(run_id).name != run_id or "\0" in run_id or len(run_id) > LONGEST_RUN_ID:
        raise WireError(f"run_id: expected the name of a run, found {run_id[:60]!r}")
    return run_id


@contextmanager
def _disk() -> Iterator[None]:
    """Tell the server what the disk said, without this machine's paths."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise HyperbloomError(f"the client cannot write its state: {why}") from error
