"""Trackers, which show many runs side by side: `--track NAME[:WHERE]` on a run.

A tracker follows the run folder in a process of its own, so whatever becomes of it, the run goes on as it would. It is
a subclass of `Tracker` here, in `trackers.py` or in the entry point group `hyperbloom.trackers`. A run of the past:

    python -m hyperbloom.server.watch.tracking RUN NAME[:WHERE] < /dev/null
"""

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.program.plugins import Plugin, find_plugin, plugins
from hyperbloom.common.program.signals import end_children
from hyperbloom.server.live.run import CHUNK
from hyperbloom.server.runs.lines import METRICS, REPORT, Line, Tail, phase_folder
from hyperbloom.server.runs.recorded import has_ended, read_config, read_summary

BUILT_IN = {
    name: Plugin(name, f"hyperbloom.server.watch.trackers:{kind}", "hyperbloom")
    for name, kind in {"mlflow": "MLflow", "wandb": "WandB", "tensorboard": "TensorBoard"}.items()
}
"""Our own trackers, by the package that each takes, which is also the extra that brings it."""

LOOK_EVERY_S = 0.5
PATIENCE_S = 50.0
"""Seconds that a run that is over waits for its trackers before it terminates them."""

Subject = Mapping[str, Any]
"""A strategy of a run, which is what a tracker follows: its `name`, the `group` and the `folder` of its run, `run`, the
same whenever it is told, `started`, in seconds since 1970, and `settings`, the run's keys, nested."""


class Tracker:
    """Base class of trackers: does nothing. One object follows one strategy; `where` is the text after the colon."""

    def __init__(self, where: str, subject: Subject) -> None:
        self.subject = subject

    def rounds(self, lines: Sequence[Line]) -> None:
        """Tell of rounds, by their lines of metrics.jsonl; `curves` has their numbers."""

    def end(self, complete: bool, selected: Mapping[str, float], files: Mapping[str, str]) -> None:
        """Tell that the run is over, the figures of the round that validation selected, and where files are."""


def curves(line: Line) -> dict[str, float]:
    """Return the numbers of a round's line by name, such as `round/loss`, `round/bytes_up`, `accuracy/test_mean`."""
    alone = "metric" in line and not line["clients"]  # an evaluation alone
    scores = {key: value for key, value in line.items() if key.startswith(("val_", "test_", "novel_"))}
    others = {} if alone else {"left_out": 0} | {k: line[k] for k in line if k not in {"round", "metric", *scores}}
    if "quarantined" in others:
        others["quarantined"] = len(line["quarantined"])  # in the line by name, with the last round
    named = {f"{line.get('metric')}/{key}": value for key, value in scores.items()}
    return named | {f"round/{key}": value for key, value in others.items()}


def find_tracker(spec: str) -> tuple[Plugin, str]:
    """Return the tracker that `NAME[:WHERE]` names, not imported yet, and where.

    Raises:
        ConfigError: there is none, its name is ambiguous, or its package is not installed.
    """
    name, _, where = spec.partition(":")
    found = find_plugin("trackers", name, BUILT_IN, ConfigError)
    if found is None and name not in BUILT_IN:
        raise ConfigError(f"--track: expected one of {', '.join([*BUILT_IN, *plugins('trackers')])}, found {name!r}")
    if found is None and find_spec(name) is None:
        how = f"pip install 'hyperbloom[{name}]', or '.[{name}]' from the sources"
        raise ConfigError(f"--track {name}: expected the package {name}, which is not installed: {how}")
    return found or BUILT_IN[name], where


def follow(folder: Path, spec: str, going: Callable[[], bool]) -> None:
    """Tell a tracker of a run while `going`, then the rest. A strategy that went back to a checkpoint is told anew."""
    plugin, where = find_tracker(spec)
    make: Callable[..., Any] = plugin.load("a subclass of Tracker", ConfigError)
    while not (folder / "environment.json").is_file():  # the run begins
        if not going():
            return
        time.sleep(LOOK_EVERY_S)
    subjects = _subjects(folder.resolve())
    tails = {name: Tail(phase_folder(folder, read_config(folder), name) / METRICS) for name in subjects}
    trackers: dict[str, Tracker] = {}
    more = True
    while more:
        more = going()  # ask first, so that all that was written before the end is read
        for name, tail in tails.items():
            lines = tail.read(CHUNK)
            if tail.cut:
                trackers.pop(name, None)
            if lines:
                if name not in trackers:
                    trackers[name] = make(where, subjects[name])
                trackers[name].rounds(lines)
                more = True
        time.sleep(LOOK_EVERY_S if more else 0)
    complete, summary = has_ended(folder), read_summary(folder)
    places = {"folder": folder, "report": folder / REPORT, "models": folder / "models"}
    files = {name: place.resolve().as_uri() for name, place in places.items() if place.exists()}
    for name, tracker in trackers.items():
        selected = {**summary[name].metrics, "round": summary[name].round} if name in summary else {"round": 0}
        tracker.end(complete, {f"selected/{key}": value for key, value in selected.items()}, files)


def _subjects(folder: Path) -> dict[str, Subject]:
    config, about = read_config(folder), json.loads((folder / "environment.json").read_text())
    shared = {"folder": folder, "group": folder.parent.name}
    shared["started"] = datetime.fromisoformat(about["started"]).timestamp()
    settings, found = config.model_dump(mode="json"), dict[str, Subject]()
    for strategy in (config.strategy, *config.baselines):
        name = folder.name if not found else f"{folder.name} {strategy}"
        own = {"name": name, "run": f"{about['run_id']}/{strategy}"}
        found[strategy] = {**shared, **own, "settings": {**settings, "strategy": strategy}}
        settings["options"] = {}  # a baseline has none
    return found


@contextmanager
def tracked(folder: Path, specs: Sequence[str], say: Callable[..., None]) -> Iterator[None]:
    """Follow a run with trackers, each in a process of its own, which may take `PATIENCE_S` when the run is over.

    `say` receives a line for each that failed.
    """
    children = []
    folder.mkdir(parents=True, exist_ok=True, mode=0o750)
    for spec in specs:
        log = folder / f"track-{spec.partition(':')[0]}.log"
        command = [sys.executable, "-m", "hyperbloom.server.watch.tracking", str(folder), spec]
        with log.open("ab") as out:  # a session of its own, so that Ctrl-C for the run leaves it the time to end
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True)
        children.append((spec, child, log))
    try:
        yield
    finally:
        for _, child, _ in children:
            assert child.stdin is not None
            child.stdin.close()  # so the child knows that the run is over, however this process ends
        end_children([child for _, child, _ in children], PATIENCE_S)
        for spec, child, log in children:
            if child.returncode:
                again = f"python -m hyperbloom.server.watch.tracking {quote(str(folder))} {quote(spec)} < /dev/null"
                say(f"tracker {spec} failed: see {log}; to try again: {again}", "yellow")


if __name__ == "__main__":  # the run keeps this process's standard input open
    follow(Path(sys.argv[1]), sys.argv[2], lambda: not select.select([sys.stdin], [], [], 0)[0])
