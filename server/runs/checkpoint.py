"""Checkpoints in the run folder. A run continues from one after a crash, bit by bit if the clients do the same.

RUN/checkpoints/000007.json                  written last, so it makes the checkpoint valid; holds its own digest
RUN/checkpoints/000007.safetensors           the strategy's state
RUN/checkpoints/000007-selected.safetensors  hypernetwork.safetensors of that time: a link, which takes no space
RUN/checkpoints/resumes.json                 the checkpoints to which the run has gone back

Two checkpoints are kept, and only the last one of a complete run. A checkpoint that is unreadable or altered is skipped
in favour of the one before it. No pickle is loaded.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors.torch
from pydantic import TypeAdapter
from safetensors import SafetensorError

from hyperbloom import __version__
from hyperbloom.common.config import RunConfig, dump_run_config, load_run_config
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.files.storage import claim, delete_unfinished, keep, write_json, write_tensors
from hyperbloom.server.loop.listener import Checkpoint, Progress, Resume, Selection
from hyperbloom.server.runs.lines import CLIENTS, METRICS, phase_folder

_PROGRESS, _RESULTS = TypeAdapter(Progress), TypeAdapter(dict[str, Selection])
FORMAT = 1
KEPT = 2
LOCK_PATIENCE_S = 0.5  # a watcher tries the lock too, and holds it for a moment

# Errors from reading a damaged file; the last two come from JSON written in malice.
DAMAGED = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


def write_checkpoint(
    folder: Path, config: RunConfig, checkpoint: Checkpoint, lines: Mapping[str, int], selected: Path
) -> None:
    """Add a checkpoint to the run in `folder`, and delete all but the last two.

    `lines` has the length in bytes of each growing file, and `selected`, if it exists, the selected round's state.
    """
    place = folder / "checkpoints"
    number = max((int(path.stem) for path in _all(folder)), default=0) + 1
    tensors, chosen = place / f"{number:06d}.safetensors", selected_file(folder, number)
    if checkpoint.tensors:  # safetensors cannot read a file without tensors
        write_tensors(tensors, checkpoint.tensors, {})
    if selected.exists() and checkpoint.progress.best is not None:
        keep(selected, chosen)
    for path in (folder / name for name in lines):
        if path.exists():
            with path.open("ab") as file:
                os.fsync(file.fileno())
    body = dataclasses.asdict(dataclasses.replace(checkpoint, tensors={})) | {
        "number": number,
        "config": _digest(dump_run_config(config).encode()),
        "lines": dict(lines),
        "files": {path.name: _digest(path.read_bytes()) for path in (tensors, chosen) if path.exists()},
    }
    write_json(place / f"{number:06d}.json", {"format": FORMAT, "digest": _digest_of(body), "body": body})
    over = checkpoint.phase > len(config.baselines)  # nobody goes back to a complete run's earlier checkpoint
    for path in _all(folder)[: -1 if over else -KEPT]:
        _delete(path)
    for path in place.glob("[0-9]*.safetensors"):  # a server may be killed between the files of one
        if not (place / f"{path.stem.partition('-')[0]}.json").exists():
            path.unlink()


def selected_file(folder: Path, number: int) -> Path:
    """Return the path of checkpoint `number`'s selected state, which may not exist."""
    return folder / "checkpoints" / f"{number:06d}-selected.safetensors"


def read_resume(folder: Path, config: RunConfig, say: Callable[[str], None]) -> tuple[Resume, int, Mapping[str, int]]:
    """Choose the last valid checkpoint, record that the run goes back to it, and delete unusable ones.

    Return where the run continues, the checkpoint's number, and the length in bytes of each growing file.

    Raises:
        ConfigError: no checkpoint is usable, the configuration has changed, or the run is complete.
    """
    sound: list[tuple[Checkpoint, dict[str, Any]]] = []
    damaged: list[Path] = []
    for path in reversed(_all(folder)):
        try:
            checkpoint, body = _read(folder, path)
        except DAMAGED as error:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):  # it may be readable next time
                raise ConfigError(f"--resume: cannot read {path}: {error.strerror}") from None
            say(f"{path} cannot be used ({' '.join(str(error).split())}); looking for one before")
            damaged.append(path)
            continue
        if body["config"] != _digest(dump_run_config(config).encode()):
            raise ConfigError(
                f"--resume: {folder / 'config.yaml'} is not what the run began with (or the version of hyperbloom is "
                "another); put it back, or start a new run with init_from"
            )
        if not _names_own_files(body, config):
            raise ConfigError(f"--resume: {path} names files that are not its run's; do not use this folder")
        sound.append((checkpoint, body))
    if not sound:
        raise ConfigError(f"--resume: expected a checkpoint in {folder / 'checkpoints'}, found none that can be used")
    for path in damaged:  # not before another one is sound: what it lacks may be in a backup
        _delete(path)
    chosen, body = sound[0]
    if chosen.phase > len(config.baselines):
        raise ConfigError(f"--resume: the run in {folder} is complete; there is nothing to go on with")
    points = [(each.phase, each.progress.orders) for each, _ in reversed(sound)]
    return Resume(chosen, points, _rewind(folder, points[-1])), body["number"], body["lines"]


def has_begun(folder: Path) -> bool:
    """Return whether the run in `folder` has come further than waiting for its first clients."""
    return bool(_all(folder)) or (folder / METRICS).exists()


def begun_as(config: RunConfig, folder: Path, setting: str) -> bool:
    """Return whether the run has begun in `folder`; ConfigError, naming `setting`, if another one has."""
    if not has_begun(folder):
        return False
    found = load_run_config(folder / "config.yaml", {}).model_dump(mode="json")
    refuse_difference(found, config.model_dump(mode="json"), folder, setting)
    return True


def refuse_difference(
    found: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path, setting: str, prefix: str = ""
) -> None:
    """Refuse a folder that was begun with other settings: ConfigError, naming `setting` and the first difference."""
    for key in [*found, *(key for key in wanted if key not in found)]:
        before, now = found.get(key), wanted.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            refuse_difference(before, now, folder, setting, f"{prefix}{key}.")
        elif before != now:
            raise ConfigError(
                f"{setting}: {folder} was begun with {prefix}{key} = {before}, found {now}; choose another folder"
            )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder for this process.

    Raises:
        ConfigError: another server uses it, or it contains a symbolic link, through which a run from elsewhere could
            make this process write to other files.
    """
    found = (Path(place) / name for place, folders, files in os.walk(folder) for name in (*folders, *files))
    if link := next((path for path in found if path.is_symlink()), None):
        raise ConfigError(f"expected a run folder of files and folders, found the symbolic link {link}; delete it")
    folder.mkdir(parents=True, exist_ok=True, mode=0o750)
    (folder / "checkpoints").mkdir(exist_ok=True)
    with (folder / "checkpoints" / "lock").open("a") as file:
        if not claim(file, LOCK_PATIENCE_S):
            raise ConfigError(f"another server is still at work in {folder}; end it first")
        delete_unfinished(folder, "clients")  # local clients of an earlier process may still write
        yield


def _rewind(folder: Path, point: tuple[int, int]) -> list[tuple[int, int]]:
    """Append to the list of resumes, on disk before any client is asked again, and return the list."""
    path = folder / "checkpoints" / "resumes.json"
    try:
        resumes = json.loads(path.read_text()) if path.exists() else []
        before = [(int(each["phase"]), int(each["orders"])) for each in resumes]
    except DAMAGED as error:
        raise ConfigError(f"--resume: {path} is damaged ({error}); restore it: clients need it") from None
    now = datetime.now(UTC).isoformat(timespec="seconds")
    entry = {"phase": point[0], "orders": point[1], "time": now, "version": __version__}
    write_json(path, [*resumes, entry])
    return [*before, point]


def _read(folder: Path, path: Path) -> tuple[Checkpoint, dict[str, Any]]:
    stored = json.loads(path.read_text())
    if stored["format"] != FORMAT:
        raise ValueError(f"format {stored['format']}, expected {FORMAT}")
    body = stored["body"]
    if _digest_of(body) != stored["digest"]:
        raise ValueError("it is not what was written")
    numbers = [body["number"], body["phase"], *body["lines"].values()]
    if any(type(number) is not int or number < 0 for number in numbers) or f"{numbers[0]:06d}" != path.stem:
        raise ValueError("its numbers are not those that were written")
    if body["files"].keys() - {f"{path.stem}.safetensors", f"{path.stem}-selected.safetensors"}:
        raise ValueError("it names files that are not its own")
    contents = {name: (path.parent / name).read_bytes() for name in body["files"]}
    for name, content in contents.items():
        if _digest(content) != body["files"][name]:
            raise ValueError(f"{name} is not what was written")
    for name, length in body["lines"].items():
        if length and (folder / name).stat().st_size < length:
            raise ValueError(f"{name} is shorter than it was")
    progress, results = _PROGRESS.validate_python(body["progress"]), _RESULTS.validate_python(body["results"])
    tensors = safetensors.torch.load(contents[name]) if (name := f"{path.stem}.safetensors") in contents else {}
    about = body["roster"], body["here"]
    return Checkpoint(body["run_id"], body["phase"], progress, results, *about, tensors), body


def _names_own_files(body: Mapping[str, Any], config: RunConfig) -> bool:
    """Return whether the growing files of a checkpoint are those of its phase: the run that goes on cuts them."""
    phases = [config.strategy, *config.baselines]
    if body["phase"] not in range(len(phases) + 1):
        return False
    place = phase_folder(Path(), config, phases[min(body["phase"], len(phases) - 1)])
    return set(body["lines"]) <= {str(place / name) for name in (METRICS, CLIENTS)}


def _all(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "checkpoints").glob("[0-9]*.json") if path.stem.isdecimal())


def _delete(path: Path) -> None:
    """Delete a checkpoint, starting with the file that makes it valid."""
    for suffix in (".json", ".safetensors", "-selected.safetensors"):
        path.with_name(path.stem + suffix).unlink(missing_ok=True)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _digest_of(body: Mapping[str, Any]) -> str:
    # Digest the body as it is read back, with lists in place of tuples.
    return _digest(json.dumps(json.loads(json.dumps(body)), sort_keys=True).encode())
