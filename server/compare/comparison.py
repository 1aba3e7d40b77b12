"""Several strategies with the same clients, data, seeds and budget; each run a folder of its own, kept once done.

OUT/comparison.yaml            what all cells share; a different comparison is refused here
OUT/STRATEGY-seedN/            an ordinary run folder, as `flower-server` leaves it
OUT/STRATEGY-seedN/cell.json   says that the run is finished, and its seconds

What is shared is everything but the strategy and its own options: the seed decides the split, the cohorts and the
batches, so two strategies with one seed train the same clients on the same batches in the same rounds.
"""

import copy
import fcntl
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from hyperbloom.common.config import RunConfig, load_run_config, make_run_config
from hyperbloom.common.errors import CohortError, ConfigError, HyperbloomError, RefusedError
from hyperbloom.common.files.storage import write_bytes, write_json
from hyperbloom.server.grids.fleet import Machines
from hyperbloom.server.loop.listener import Listener
from hyperbloom.server.loop.session import check_run
from hyperbloom.server.runs.checkpoint import has_begun, has_checkpoint, is_over, locked
from hyperbloom.server.runs.running import Run, begin, go_on
from hyperbloom.strategies import strategy_names

__all__ = ["Cell", "Watcher", "check_cells", "open_comparison", "plan", "run_cells", "shared_by"]

SHARED = "comparison.yaml"
FINISHED = "cell.json"
BY_STRATEGY = "options_by_strategy"
_OWN = ("strategy", "options", "seed", "baselines")  # what cells may differ in


@dataclass(frozen=True)
class Cell:
    """One run of a comparison; `name` is its row in the table, `folder` its run folder.

    With `after` it starts from the run of that cell (`init_from`), which stands before it in the list.
    """

    name: str
    config: RunConfig
    folder: Path
    after: "Cell | None" = None

    @property
    def finished(self) -> bool:
        """Whether it need not be run any more."""
        return (self.folder / FINISHED).exists()


class Watcher(Protocol):
    """Who is told how the cells get on."""

    def kept(self, cell: Cell) -> None:
        """It was finished before."""

    def begin(self, cell: Cell) -> Listener:
        """It starts; returns who hears of its rounds."""

    def done(self, cell: Cell, seconds: float, after: int) -> None:
        """It is finished; it went on after that round, 0 if it began anew."""

    def failed(self, cell: Cell, error: HyperbloomError) -> None:
        """It came to nothing; the others go on."""


# ---------------------------------------------------------------------- what is to be run


def plan(
    out: Path,
    strategies: Sequence[str],
    seeds: int,
    values: Mapping[str, Any],
    overrides: Mapping[str, Any],
    where: str,
) -> list[Cell]:
    """Return the cells of a comparison, seed by seed, so that a part of it compares all strategies already.

    Args:
        out: the comparison's folder.
        strategies: names of what is compared.
        seeds: how many, counted from the run's own seed.
        values: a run's keys and values as in its file, and `options_by_strategy`; `options` belong to its `strategy`.
        overrides: by dotted key; `STRATEGY.OPTION` is an option of that strategy.
        where: names the file in errors.

    Raises:
        ConfigError: a name or a key is wrong, or it is not clear whose an option is.
    """
    if not strategies or len(set(strategies)) < len(strategies):
        raise ConfigError(
            f"--strategies: expected one or more names, each once, found {', '.join(strategies) or 'none'}"
        )
    if seeds < 1:
        raise ConfigError(f"--seeds: expected 1 or more, found {seeds}")
    for name in strategies:
        if name not in strategy_names() and ":" not in name:
            raise ConfigError(f"--strategies: expected some of {', '.join(strategy_names())}, found {name!r}")
    known = {*strategy_names(), *strategies}
    values, options = _own_options(values, known, where)
    shared: dict[str, Any] = {}
    for key, value in overrides.items():
        first, _, rest = key.partition(".")
        if first in ("strategy", "options", "baselines"):
            raise ConfigError(f"--set {key}: expected --strategies, or STRATEGY.OPTION=VALUE for an option of one")
        if first in RunConfig.model_fields:
            shared[key] = value
        elif first in known and first not in strategies:
            raise ConfigError(f"--set {key}: {first} is not among --strategies {','.join(strategies)}")
        elif first in known and rest:
            _put(options.setdefault(first, {}), rest, value)
        else:
            raise ConfigError(f"--set {key}: expected a key of the run, or an option as STRATEGY.OPTION=VALUE")
    configs = {
        name: make_run_config({**values, "strategy": name, "options": options.get(name, {})}, shared, where)
        for name in strategies
    }
    first_seed = next(iter(configs.values())).seed
    return [
        Cell(name, config.model_copy(update={"seed": seed}), out / f"{name}-seed{seed}")
        for seed in range(first_seed, first_seed + seeds)
        for name, config in configs.items()
    ]


def _own_options(
    values: Mapping[str, Any], known: Set[str], where: str
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Separate what cells share from each strategy's own options."""
    shared = copy.deepcopy(dict(values))
    options = shared.pop(BY_STRATEGY, None) or {}
    if not isinstance(options, dict) or not all(isinstance(own, dict) for own in options.values()):
        raise ConfigError(f"{BY_STRATEGY}: expected strategies, and for each its options, found {options!r} in {where}")
    unknown = [name for name in options if name not in known]
    if unknown:
        names = ", ".join(strategy_names())
        raise ConfigError(f"{BY_STRATEGY}: expected some of {names}, found {unknown[0]!r} in {where}")
    shared.pop("baselines", None)
    owner = shared.pop("strategy", RunConfig.model_fields["strategy"].default)
    if of_file := shared.pop("options", None):
        options[owner] = {**of_file, **options.get(owner, {})}
    return shared, options


def _put(options: dict[str, Any], path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        options = options.setdefault(parent, {})
        if not isinstance(options, dict):
            raise ConfigError(f"--set: {parent} in {path} has no keys of its own")
    options[name] = value


def check_cells(cells: Sequence[Cell], engine: str) -> None:
    """Find out before anything starts whether every cell can run.

    Raises:
        ConfigError: a strategy, an option, a model or a split is wrong, or Ray is not there.
        ModelError: the target network does not fit the data set.
    """
    if engine == "ray":
        from hyperbloom.server.grids.simulation import check_ray

        check_ray()
    for name, cell in {cell.name: cell for cell in cells}.items():
        try:
            # What it starts from is not there yet.
            check_run(cell.config.model_copy(update={"init_from": None}) if cell.after else cell.config, True)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None


def shared_by(config: RunConfig, engine: str) -> dict[str, Any]:
    """Return what all cells of a comparison have in common, by key."""
    return {"engine": engine} | {
        key: value for key, value in json.loads(config.model_dump_json()).items() if key not in _OWN
    }


# ---------------------------------------------------------------------- the folder


@contextmanager
def open_comparison(out: Path, shared: Mapping[str, Any], cells: Sequence[Cell]) -> Iterator[None]:
    """Hold a comparison's folder, a new one or one to go on with; more strategies and more seeds may be added to it.

    Raises:
        ConfigError: it holds something else, another comparison or a cell with other settings, or a process is at it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(f"--out: another process is at work in {out}") from None
            _claim(out, shared)
            for cell in cells:
                _check_fits(cell)
            yield
    except NotADirectoryError as error:
        raise ConfigError(f"--out: cannot use {out}: {error.strerror}") from None
    except PermissionError as error:
        raise ConfigError(f"--out: cannot use {out}: {error.strerror}") from None


def _claim(out: Path, shared: Mapping[str, Any]) -> None:
    path = out / SHARED
    if not path.exists():
        if [each for each in out.iterdir() if not each.name.startswith(".")]:
            raise ConfigError(f"--out: expected a new folder, or an earlier comparison, found other files in {out}")
        write_bytes(path, yaml.safe_dump(dict(shared), sort_keys=False).encode())
        return
    try:
        found = yaml.safe_load(path.read_text())
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"--out: {path} is damaged; choose another folder")
    _refuse_difference(found, json.loads(json.dumps(shared)), out)


def _check_fits(cell: Cell) -> None:
    """Refuse a cell's folder if it holds a run with other settings, or no run; what is not finished is run anew."""
    path = cell.folder / "config.yaml"
    if path.exists():
        # Where the cell that it starts from lies may be written in another way.
        but = {"init_from"} if cell.after else None
        found = load_run_config(path, {}).model_dump(mode="json", exclude=but)
        _refuse_difference(found, cell.config.model_dump(mode="json", exclude=but), cell.folder)
    elif any(found.name != "checkpoints" for found in cell.folder.glob("[!.]*")):
        raise ConfigError(f"--out: expected a run folder or nothing, found other files in {cell.folder}")


def _refuse_difference(found: Mapping[str, Any], wanted: Mapping[str, Any], where: Path, prefix: str = "") -> None:
    for key in [*found, *(key for key in wanted if key not in found)]:
        before, now = found.get(key), wanted.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            _refuse_difference(before, now, where, f"{prefix}{key}.")
        elif before != now:
            raise ConfigError(
                f"--out: {where} was begun with {prefix}{key} = {before}, found {now}; choose another folder for that"
            )


# ---------------------------------------------------------------------- running


def run_cells(cells: Sequence[Cell], engine: str, watcher: Watcher) -> list[HyperbloomError]:
    """Run the cells that are not finished; one that was stopped on its way goes on from its last checkpoint.

    Returns:
        why some came to nothing: nobody could be trained, or a client does not fit. The others go on.

    Raises:
        HyperbloomError: what would meet every other cell as well.
    """
    failures: list[HyperbloomError] = []
    for cell in cells:
        if cell.finished:
            watcher.kept(cell)
            continue
        if cell.after and not cell.after.finished:  # it has failed, and that was said
            continue
        start = time.perf_counter()
        try:
            after = _run(cell, engine, watcher.begin(cell))
        except (CohortError, RefusedError) as error:
            failures.append(error)
            watcher.failed(cell, error)
            continue
        seconds = time.perf_counter() - start
        write_json(cell.folder / FINISHED, {"seconds": round(seconds, 3)})
        watcher.done(cell, seconds, after)
    return failures


def _run(cell: Cell, engine: str, listener: Listener) -> int:
    """Run a cell, from its last checkpoint if it has one; returns the round after which it went on."""
    config, folder = cell.config, cell.folder
    if is_over(folder, config):  # stopped before that was noted here
        return config.rounds
    machines = _machines(config, engine)
    with locked(folder):
        # Checkpoints begin before the rounds do: rounds without any are of a run whose checkpoints are damaged.
        if has_checkpoint(folder) or (has_begun(folder) and config.checkpoint_every):
            run = _take_back(folder, load_run_config(folder / "config.yaml", {}), listener)
        else:
            _empty(folder)
            run = begin(folder, config, machines)
        run.carry_out(machines, [listener], lambda text, style="": None, lambda text: None)
    return max(0, run.resume.checkpoint.progress.round) if run.resume else 0


def _take_back(folder: Path, config: RunConfig, listener: Listener) -> Run:
    try:
        return go_on(folder, config, listener.event)
    except ConfigError as error:
        reason = str(error).removeprefix("--resume: ")
        raise ConfigError(f"--out: cannot go on in {folder} (delete it to run it anew): {reason}") from None


def _empty(folder: Path) -> None:
    """Delete what a run has left that was stopped before its first round, but for the lock.

    What says that the folder is this cell's goes last, so that it is known for that if this is stopped, too.
    """
    found = [*folder.iterdir(), *(folder / "checkpoints").iterdir()]
    for path in sorted(found, key=lambda path: path.name == "config.yaml"):
        if path.is_dir() and path.name != "checkpoints":
            shutil.rmtree(path)
        elif path.is_file() and path.name != "lock":
            path.unlink()


def _machines(config: RunConfig, engine: str) -> Machines:
    """Return where a cell runs: all clients are on this machine."""
    own = {"insecure": 1, "local_clients": config.clients} if engine == "grpc" else {}
    return Machines.model_validate({"engine": engine, "port": 0, **own}).with_port()
