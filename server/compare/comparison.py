"""Several strategies with the same clients, data, seeds and budget. Each run has its own folder and is kept once done.

OUT/comparison.yaml            the settings that all cells share; another comparison is refused here
OUT/STRATEGY-seedN/            an ordinary run folder of `flower-server`
OUT/STRATEGY-seedN/cell.json   marks the run as finished

Cells share everything but the strategy and its own options. The seed decides the split, the cohorts and the batches.
So two strategies with one seed train the same clients on the same batches in the same rounds.
"""

import copy
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from hyperbloom.common.config import RunConfig, check, dump_yaml, load_run_config, make_run_config, read_yaml
from hyperbloom.common.errors import CohortError, ConfigError, HyperbloomError, RefusedError
from hyperbloom.common.files.storage import claim, delete_unfinished, write_bytes, write_json
from hyperbloom.common.reasons import Reason
from hyperbloom.server.grids.engine import open_grid
from hyperbloom.server.grids.fleet import USUAL_PORT, Machines, Say
from hyperbloom.server.loop.listener import Joined
from hyperbloom.server.loop.post import Grid
from hyperbloom.server.loop.session import check_run
from hyperbloom.server.runs.checkpoint import has_begun, locked, refuse_difference
from hyperbloom.server.runs.lines import CELL, COMPARISON
from hyperbloom.server.runs.recorded import has_ended
from hyperbloom.server.runs.running import play
from hyperbloom.server.watch.tracking import tracked
from hyperbloom.server.watch.view import TerminalView, print_line
from hyperbloom.strategies import find_strategy, strategy_names

BY_STRATEGY = "options_by_strategy"
_OWN = ("strategy", "options", "seed", "baselines")  # the keys in which cells may differ


@dataclass(frozen=True)
class Cell:
    """One run of a comparison; `name` is its row in the table, `folder` its run folder.

    With `after`, the run starts from that cell's run (`init_from`), which precedes it in the list.
    """

    name: str
    config: RunConfig
    folder: Path
    after: "Cell | None" = None

    @property
    def finished(self) -> bool:
        """Return whether the run is finished."""
        return (self.folder / CELL).exists()


class _View(TerminalView):
    """The board of a cell's run, without a line for each client that joins."""

    def event(self, text: str) -> None:
        if not isinstance(text, Joined):
            super().event(text)


def plan(
    out: Path,
    strategies: Sequence[str],
    seeds: int,
    values: Mapping[str, Any],
    overrides: Mapping[str, Any],
    where: str,
) -> list[Cell]:
    """Return the cells of a comparison, seed by seed, so that even the first part compares all strategies.

    `values` are those of a run's file, with `options_by_strategy`; `overrides` are by dotted key, and
    `STRATEGY.OPTION` is an option of that strategy. `where` names the file in errors.

    Raises:
        ConfigError: a name or a key is wrong, or an option cannot be assigned to a strategy.
    """
    if not strategies or len(set(strategies)) < len(strategies):
        raise ConfigError(f"--strategies: expected names, each once, found {', '.join(strategies) or 'none'}")
    if not 1 <= seeds <= 1000:
        raise ConfigError(f"--seeds: expected 1 to 1000, found {seeds}")
    for name in strategies:
        if name not in strategy_names() and ":" not in name:
            raise ConfigError(f"--strategies: expected some of {', '.join(strategy_names())}, found {name!r}")
    known = {*strategy_names(), *strategies}
    values, options = _own_options(values, known, where)
    shared: dict[str, Any] = {"gains": values.get("gains", False)}  # the table compares already
    own: dict[str, dict[str, Any]] = {}
    for key, value in overrides.items():
        first = next((name for name in strategies if key.startswith(f"{name}.")), key.partition(".")[0])
        rest = key[len(first) + 1 :]
        if first in ("strategy", "options", "baselines"):
            raise ConfigError(f"--set {key}: expected --strategies, or STRATEGY.OPTION=VALUE for an option of one")
        if first in RunConfig.model_fields:
            shared[key] = value
        elif first in known and first not in strategies:
            raise ConfigError(f"--set {key}: {first} is not among --strategies {','.join(strategies)}")
        elif first in known and rest:
            own.setdefault(first, {})[f"options.{rest}"] = value
        else:
            raise ConfigError(f"--set {key}: expected a key of the run, or an option as STRATEGY.OPTION=VALUE")
    configs = {
        name: make_run_config(
            {**values, "strategy": name, "options": options.get(name, {})}, shared | own.get(name, {}), where
        )
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
    """Separate the keys that cells share from each strategy's own options."""
    shared = copy.deepcopy(dict(values))
    options = shared.pop(BY_STRATEGY, None) or {}
    if not isinstance(options, dict) or not all(isinstance(own, dict) for own in options.values()):
        raise ConfigError(f"{BY_STRATEGY}: expected strategies, and for each its options, found {options!r} in {where}")
    if unknown := [name for name in options if name not in known]:
        names = ", ".join(strategy_names())
        raise ConfigError(f"{BY_STRATEGY}: expected some of {names}, found {unknown[0]!r} in {where}")
    shared.pop("baselines", None)
    owner, of_file = shared.pop("strategy", RunConfig.model_fields["strategy"].default), shared.pop("options", {}) or {}
    if not isinstance(owner, str) or not isinstance(of_file, dict):
        raise ConfigError(f"strategy, options: expected a name, keys and values; found {owner}, {of_file} in {where}")
    options[owner] = {**of_file, **options.get(owner, {})}
    return shared, options


def check_cells(cells: Sequence[Cell], engine: str) -> None:
    """Check every cell before anything starts. Clients elsewhere have their own data, and not the run's.

    Raises:
        ConfigError: a strategy, an option, a model or a split is wrong.
        ModelError: the target network does not fit the data set.
    """
    for name, cell in {cell.name: cell for cell in cells}.items():
        try:
            # The run to start from does not exist yet.
            config = cell.config.model_copy(update={"init_from": None}) if cell.after else cell.config
            check_run(config, uses_data_section=engine != "elsewhere")
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    if engine == "elsewhere" and {"no", "must"} <= {find_strategy(cell.config.strategy).own_models for cell in cells}:
        both = "some train every client's own model and some train none; clients elsewhere cannot join both"
        raise ConfigError(f"strategies: {both}, so compare them apart")


def shared_by(config: RunConfig, engine: str) -> dict[str, Any]:
    """Return the settings that all cells of a comparison share, by key."""
    return {"engine": engine} | {key: value for key, value in config.model_dump(mode="json").items() if key not in _OWN}


@contextmanager
def open_comparison(out: Path, shared: Mapping[str, Any], cells: Sequence[Cell]) -> Iterator[None]:
    """Lock a comparison's folder, new or existing. Strategies and seeds may be added to an existing one.

    Raises:
        ConfigError: the folder holds other files, another comparison or a cell with other settings, or is in use.
    """
    try:
        out.mkdir(parents=True, exist_ok=True, mode=0o750)
        with (out / ".lock").open("a") as lock:
            if not claim(lock):
                raise ConfigError(f"--out: another process is at work in {out}")
            delete_unfinished(out, "clients")
            _claim(out, shared)
            for cell in cells:
                _check_fits(cell)
            yield
    except (NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"cannot use {error.filename or out}: {error.strerror}") from None


def _claim(out: Path, shared: Mapping[str, Any]) -> None:
    path = out / COMPARISON
    if not path.exists() and [each for each in out.iterdir() if not each.name.startswith(".")]:
        raise ConfigError(f"--out: expected a new folder, or an earlier comparison, found other files in {out}")
    runs = [each.parent for each in out.glob("*/config.yaml")]
    if not path.exists() or (runs and not any(map(has_begun, runs))):  # the first run may have been refused
        write_bytes(path, dump_yaml(shared).encode())
        return
    try:
        found = read_yaml(path)
    except ConfigError:
        raise ConfigError(f"--out: {path} is damaged; choose another folder") from None
    refuse_difference(found, json.loads(json.dumps(shared)), out, "--out")


def _check_fits(cell: Cell) -> None:
    """Refuse a cell's folder if it holds a run with other settings, or no run. An unfinished run is continued."""
    path = cell.folder / "config.yaml"
    if not path.exists():
        if any(not found.name.startswith(("checkpoints", "track-")) for found in cell.folder.glob("[!.]*")):
            raise ConfigError(f"--out: expected a run folder or nothing, found other files in {cell.folder}")
    elif has_begun(cell.folder):
        # The path of the run to start from may be written differently.
        but = {"init_from"} if cell.after else None
        found = load_run_config(path, {}).model_dump(mode="json", exclude=but)
        refuse_difference(found, cell.config.model_dump(mode="json", exclude=but), cell.folder, "--out")


def joining(
    engine: str, config: RunConfig, out: Path, say: Say, where: Mapping[str, Any]
) -> AbstractContextManager[tuple[Grid | None, object]]:
    """Return a context with the grid at which clients `elsewhere` join every run, None if clients are here.

    Raises:
        ConfigError: the flags `where` are wrong. This is raised now, before anything is opened.
    """
    if engine != "elsewhere":
        if given := [name for name, value in where.items() if value not in (None, 0, USUAL_PORT)]:
            raise ConfigError(f"--{given[0]}: expected with --engine elsewhere, found --engine {engine}")
        return nullcontext((None, None))
    machines = check(Machines, {**where, "stay": True}, "the flags")
    machines.check_open(config)
    machines.prepare(say)
    return open_grid(machines.with_port(), config, out, say, say)


def run_cells(
    cells: Sequence[Cell], engine: str, console: Console, grid: Grid | None = None, track: Sequence[str] = ()
) -> list[HyperbloomError]:
    """Run the unfinished cells, each from its last checkpoint if it has one, and show them on a console.

    The clients are those at `grid`, or else here. Return the errors of cells whose clients could not be trained or do
    not fit; the other cells continue.

    Raises:
        HyperbloomError: any other error, as it would stop every other cell too.
    """
    failures: list[HyperbloomError] = []
    for number, cell in enumerate(cells, start=1):
        name, place = cell.folder.name, f"{number}/{len(cells)}"
        if cell.finished:
            print_line(console, f"{name}: finished before, kept; {place}")
            continue
        if cell.after and not cell.after.finished:  # reported when that cell failed
            continue
        print_line(console, f"{name}: begins")
        start, view = time.perf_counter(), _View(console)
        try:
            after = _run(cell, engine, view, grid, track)
        except (CohortError, RefusedError) as error:
            # Whoever is missing, or has left, would be missing in the next run.
            if grid is not None and (error.reason is Reason.LEFT or not has_begun(cell.folder)):
                raise
            failures.append(error)
            print_line(console, f"{name}: failed: {error}; {place}", "yellow")
            continue
        finally:
            view.close()
        write_json(cell.folder / CELL, {})
        seconds = time.perf_counter() - start
        print_line(console, f"{name}: {seconds:.0f} s{f' from round {after} on' if after else ''}; {place}")
    return failures


def _run(cell: Cell, engine: str, view: TerminalView, grid: Grid | None, track: Sequence[str]) -> int:
    """Run a cell, from its last checkpoint if it has one; return the round after which it was resumed, or 0."""
    config, folder = cell.config, cell.folder
    if has_ended(folder):  # it was stopped before cell.json was written
        return config.rounds
    own = {"insecure": 1, "local_clients": config.clients} if engine == "grpc" else {}  # all clients are here
    machines = Machines.model_validate({"engine": engine if grid is None else "grpc", "port": 0, **own})
    # A run writes a checkpoint before its first round, so rounds without any mean that checkpoints are damaged.
    resumes = bool(config.checkpoint_every) and has_begun(folder)
    if resumes:
        config = load_run_config(folder / "config.yaml", {})  # the folder may have been moved since
    else:
        _empty(folder)
    try:
        with tracked(folder, track, partial(print_line, view.console)):
            _, session, _ = play(folder, config, machines, resumes, view, lambda text, style="": None, grid=grid)
    except ConfigError as error:
        if not (text := str(error)).startswith("--resume: "):
            raise
        why = text.removeprefix("--resume: ")
        raise ConfigError(f"--out: cannot go on in {folder} (delete it to run it anew): {why}") from None
    return max(0, session.resume.checkpoint.progress.round) if session.resume else 0


def _empty(folder: Path) -> None:
    """Delete the files of a run that was stopped before its first round."""
    gone = folder.with_name(f".{folder.name}")
    with locked(folder):
        if gone.exists():  # an earlier call was interrupted
            shutil.rmtree(gone)
        folder.rename(gone)  # all at once: without config.yaml nobody would know whose the other files are
    shutil.rmtree(gone)
