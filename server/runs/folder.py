"""The run folder: all output of a run, written as it goes; docs/watching.md lists its files."""

import importlib.metadata
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from hyperbloom import __version__
from hyperbloom.common.config import RunConfig, dump_run_config
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.files.storage import keep, write_bytes, write_json, write_tensors
from hyperbloom.common.gains import Gain, sentence
from hyperbloom.common.secrecy.noise import epsilon_of, promise
from hyperbloom.server.loop.federation import Federation
from hyperbloom.server.loop.listener import Checkpoint, Listener, Resume, RoundReport, Selection
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.runs.checkpoint import DAMAGED, read_resume, selected_file, write_checkpoint
from hyperbloom.server.runs.lines import CLIENTS, EVENTS, GAINS, METRICS, client_lines, metrics_line, phase_folder
from hyperbloom.strategies.algorithm import Algorithm

LAST = "hypernetwork-last.safetensors"
_PACKAGES = ("flwr", "torch", "torchvision", "numpy", "grpcio", "protobuf", "safetensors")


def new_run_folder(path: Path | None, strategy: str, anew: bool = False) -> Path:
    """Make an empty run folder; with `anew`, accept the files of a run that never began, but no others.

    Raises:
        ConfigError: the folder is not empty, or cannot be made.
    """
    usual = Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{strategy.rpartition(':')[2]}"
    names = (usual.with_name(f"{usual.name}{end}") for end in ("", *(f"-{number}" for number in range(2, 1000))))
    chosen = path or next(name for name in names if not name.exists())
    try:
        chosen.mkdir(parents=True, exist_ok=True, mode=0o750)  # it tells of clients; others on a machine need not know
        found = {path.name for path in chosen.iterdir()}
        ours = {"checkpoints", "initial"} | ({"config.yaml"} if "checkpoints" in found else set())
        early = {name for name in found if name in ours or name.startswith("track-")}
        if found and not (anew and ("environment.json" in found or found == early)):
            more = ", or give --go-on as well if its run never began" if not anew else ""
            raise ConfigError(f"--run-dir: expected a new or empty folder, found files in {chosen}; name another{more}")
        TemporaryFile(dir=chosen).close()  # it can be written to
    except OSError as error:
        raise ConfigError(f"--run-dir: cannot use {chosen}: {error.strerror}") from None
    return chosen


def read_run(folder: Path, asked_by: str = "init_from") -> tuple[dict[str, Tensor], Roster]:
    """Return the selected server state and the roster of a finished run; `asked_by` begins error messages.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    try:
        tensors = load_file(folder / "hypernetwork.safetensors")
        return tensors, Roster.from_json(json.loads((folder / "roster.json").read_text()))
    except DAMAGED as error:
        raise ConfigError(
            f"{asked_by}: expected a run folder with hypernetwork.safetensors and roster.json, found {folder} ({error})"
        ) from None


def adopt_identities(config: RunConfig, folder: Path) -> None:
    """Copy the identities of local clients from the run of `init_from`, so that they remain the same clients."""
    for identity in Path(config.init_from or folder).glob("clients/*/identity.json"):
        write_bytes(folder / "clients" / identity.parent.name / identity.name, identity.read_bytes(), mode=0o600)


class RunFolder(Listener):
    """Writes a run as it happens. Files that grow get whole lines; the others are replaced atomically.

    Clients keep their state under `run_id`, which is None if the run is resumed; `--resume` needs `machines` again.
    """

    def __init__(
        self, path: Path, config: RunConfig, run_id: str | None, machines: Mapping[str, Any] | None = None
    ) -> None:
        self.path = path
        self.config = config
        self._phase = path
        self._name = config.strategy
        self._round = 0
        self._selected: dict[str, Selection] = {}
        self._spent: Counter[str] = Counter()  # noisy changes requested from each client, in all phases
        if run_id is not None:
            write_bytes(path / "config.yaml", dump_run_config(config).encode())
            write_json(path / "environment.json", _environment(config, run_id, machines or {}))
            if config.privacy.where != "none":
                self.released(())  # write the file now: if it is missing later, it was lost

    @classmethod
    def resume(cls, path: Path, config: RunConfig, say: Callable[[str], None]) -> tuple["RunFolder", Resume]:
        """Take a run folder back to its last valid checkpoint, and cut off everything written later.

        Raises:
            ConfigError: no checkpoint is usable, or it belongs to another run.
        """
        resume, number, lengths = read_resume(path, config, say)
        folder, checkpoint = cls(path, config, None), resume.checkpoint
        folder._read_spent()
        names = [config.strategy, *config.baselines]
        folder._enter(names[checkpoint.phase])
        folder._round = max(0, checkpoint.progress.round)
        for name, length in lengths.items():
            if (path / name).exists():
                os.truncate(path / name, length)
        if (events := path / EVENTS).exists():  # a line that a loss of power has torn
            os.truncate(events, events.read_bytes().rfind(b"\n") + 1)
        for name in names[checkpoint.phase + 1 :]:
            for left in phase_folder(path, config, name).glob("*.jsonl"):
                left.unlink()
        folder._selected = dict(checkpoint.results)
        chosen = folder._phase / "hypernetwork.safetensors"
        chosen.unlink(missing_ok=True)
        if checkpoint.progress.best is not None:
            folder._selected[folder._name] = checkpoint.progress.best
            if selected_file(path, number).exists():
                keep(selected_file(path, number), chosen)
        folder._write_summary()
        write_json(path / "roster.json", checkpoint.roster)
        return folder, resume

    def gathering(self, federation: Federation) -> None:
        """Remember the federation, whose roster is written at the end."""
        self._federation = federation

    def phase(self, strategy: Algorithm, name: str) -> None:
        """Write from now on to the run's own files, or to a baseline's folder."""
        self._enter(name)

    def _enter(self, name: str) -> None:
        self._round = self._round if name == self._name else 0
        self._name, self._phase = name, phase_folder(self.path, self.config, name)
        self._phase.mkdir(parents=True, exist_ok=True)

    def event(self, text: str) -> None:
        """Append an event, with the last finished round."""
        line = {"time": _now(), "strategy": self._name, "round": self._round, "text": text}
        _append(self.path / EVENTS, [line])

    def released(self, names: Sequence[str]) -> None:
        """Count the releases before the orders go out. Going back to a checkpoint does not undo them."""
        self._spent.update(names)
        privacy = self.config.privacy
        clients = {
            name: {"releases": count, "epsilon": epsilon_of([privacy.noise] * count, privacy.delta)}
            for name, count in sorted(self._spent.items())
        }
        write_json(self.path / "privacy.json", {**privacy.model_dump(), "clients": clients})

    def _read_spent(self) -> None:
        path, privacy = self.path / "privacy.json", self.config.privacy
        if privacy.where == "none":
            return
        try:
            stored = json.loads(path.read_text())
            self._spent = Counter({str(name): int(each["releases"]) for name, each in stored.pop("clients").items()})
            if stored != privacy.model_dump():
                raise ValueError("it is of other settings than config.yaml")
        except DAMAGED as error:
            raise ConfigError(
                f"--resume: {path} cannot be used ({error}), so it is not known what has been spent on privacy; "
                "restore it from a backup"
            ) from None

    def privacy_report(self) -> list[str]:
        """Return lines on the privacy spent: of the clients that were asked most and least often."""
        if not self._spent:
            return []
        most, least = max(self._spent.values()), min(self._spent.values())
        lines = ["privacy: " + line for line in promise(self.config.privacy, most)]
        if least < most:
            epsilon = epsilon_of([self.config.privacy.noise] * least, self.config.privacy.delta)
            lines.append(f"privacy: the fewest times that a client was asked: {least}, with epsilon {epsilon:.4g}")
        return [*lines, "privacy: all clients that were asked are in privacy.json"]

    def round_done(self, report: RoundReport) -> None:
        """Append the round's lines."""
        self._round = report.number
        _append(self._phase / METRICS, [metrics_line(report)])
        _append(self._phase / CLIENTS, client_lines(report, self.config.secure_aggregation))

    def selected(self, selection: Selection, state: Mapping[str, Tensor], roster: Roster) -> None:
        """Write the server's state and the figures of the best round so far."""
        if state:
            write_tensors(self._phase / "hypernetwork.safetensors", state, {"round": str(selection.round)})
        write_json(self.path / "roster.json", roster.to_json())
        self._selected[self._name] = selection
        self._write_summary()

    def selected_state(self, name: str) -> dict[str, Tensor]:
        """Return the server state of the round that validation selected for a strategy; empty if it has none."""
        path = phase_folder(self.path, self.config, name) / "hypernetwork.safetensors"
        return load_file(path) if path.exists() else {}

    def _write_summary(self) -> None:
        write_json(self.path / "summary.json", {name: asdict(each) for name, each in self._selected.items()})

    def gained(self, gains: Mapping[str, Gain], metric: str, number: int) -> None:
        """Write what the federation gains each client that has told."""
        told = [
            {"client": name, "round": number, "says": sentence(name, one, metric), "gain": vars(one)}
            for name, one in gains.items()
        ]
        if told:
            write_bytes(self._phase / GAINS, "".join(json.dumps(line) + "\n" for line in told).encode())

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write that the run is over, if it is, and a checkpoint with the lengths of the growing files."""
        if checkpoint.phase > len(self.config.baselines):
            self.end()  # first: a run that is killed in between can still go on
        if not self.config.checkpoint_every:
            return
        files = [self._phase / name for name in (METRICS, CLIENTS)]
        lengths = {str(file.relative_to(self.path)): file.stat().st_size if file.exists() else 0 for file in files}
        chosen = self._phase / "hypernetwork.safetensors"
        write_checkpoint(self.path, self.config, checkpoint, lengths, chosen)

    def phase_done(self, strategy: Algorithm) -> None:
        """Write the server's last state."""
        if state := strategy.state():
            write_tensors(self._phase / LAST, state, {})
        write_json(self.path / "roster.json", self._federation.roster.to_json())

    def end(self) -> None:
        """Write that all of the run is over."""
        path = self.path / "environment.json"
        write_json(path, {**json.loads(path.read_text()), "ended": _now()})


def _append(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Append all lines, or none if the write fails."""
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
    except OSError:  # such as a full disk
        if path.exists():
            os.truncate(path, before)
        raise


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _environment(config: RunConfig, run_id: str, machines: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "run_id": run_id,
        "seed": config.seed,
        "started": _now(),
        "command": [  # without a tracker's address, which may have a password, and Flower's token of a ServerApp
            word.partition(":")[0] if "--track" in (before, word.partition("=")[0]) else word
            for before, word in pairwise(["", *sys.argv])
            if "--token" not in (before, word.partition("=")[0])
        ],
        "machines": machines,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {"hyperbloom": __version__} | {name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # an extra, such as torchvision
        return None
