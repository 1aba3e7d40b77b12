"""The state of a run for the live page, read from its folder alone and a little at a time."""

import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from hyperbloom.common.files.storage import FileState, file_state
from hyperbloom.server.runs.lines import CLIENTS, EVENTS, GAINS, METRICS, REPORT, Line, Tail, phase_folder
from hyperbloom.server.runs.recorded import has_ended, read_config, sound
from hyperbloom.server.watch.board import Board
from hyperbloom.server.watch.watching import is_running

CHUNK = 4_000_000
"""Most bytes that are read of a file at once, which takes about 50 ms."""

EVENTS_KEPT = 200

WHOLE_FILES = (REPORT, GAINS, "roster.json", "hypernetwork.safetensors")
"""Files that are replaced as a whole, and are shown too."""


class LiveRun:
    """A run that may still grow; ConfigError if the folder holds no run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, read_config(folder)
        self.version = 0
        """Grows with every change."""
        self._beside: tuple[object, ...] = ()
        self._begun = self._state()
        self._begin()

    def _begin(self) -> None:
        self.events: deque[Line] = deque(maxlen=EVENTS_KEPT)
        self.courses = {n: Board(n, self.config.rounds) for n in (self.config.strategy, *self.config.baselines)}
        places = [(phase_folder(self.folder, self.config, name), course) for name, course in self.courses.items()]
        self._tails: list[tuple[Tail, Callable[[Line], None]]] = [
            *((Tail(place / METRICS), course.add_round) for place, course in places),
            (Tail(self.folder / EVENTS), self.events.append),
            *((Tail(place / CLIENTS), course.add_client) for place, course in places),
        ]

    def _state(self) -> tuple[FileState, FileState]:
        """Return what changes when another run begins in the folder, and when this one goes back to a checkpoint."""
        return file_state(self.folder / "config.yaml"), file_state(self.folder / "checkpoints" / "resumes.json")

    def look(self, seconds: float) -> None:
        """Read new lines for at most about `seconds`; all anew of another run, and of one that went back.

        Raises:
            ConfigError: a line of the run is damaged.
        """
        self.running = is_running(self.folder)  # which takes a while of its own
        until = time.monotonic() + seconds
        begun = self._state()
        if begun[0] and begun != self._begun:  # lines may have been cut, and have grown again
            self._begun, self.config = begun, read_config(self.folder)
            self._begin()
        beside = self.running, begun, *(file_state(self.folder / name) for name in WHOLE_FILES)
        if beside != self._beside:
            self._beside, self.version = beside, self.version + 1
        for tail, add in self._tails:
            while tail.path.name == METRICS or time.monotonic() < until:  # these are small, and say how far it is
                lines = tail.read(CHUNK)
                if tail.cut:
                    self._begin()
                    self.version += 1
                    return
                if not lines:
                    break
                with sound(tail.path):
                    for line in lines:
                        add(line)
                self.version += 1

    @property
    def main(self) -> Board:
        """Return the run's own strategy."""
        return self.courses[self.config.strategy]

    @property
    def current(self) -> Board:
        """Return the strategy that has come furthest in the run's order."""
        begun = [course for course in self.courses.values() if course.done or course.means]
        return begun[-1] if begun else self.main

    @property
    def behind(self) -> bool:
        """Return whether much of the folder is still to be read."""
        return sum(tail.unread for tail, _ in self._tails) > CHUNK

    @property
    def state(self) -> str:
        """Return `running`, `complete` or `stopped`."""
        return "running" if self.running else "complete" if has_ended(self.folder) else "stopped"


def find_runs(folder: Path) -> dict[str, Path]:
    """Return the runs in a folder by their relative paths, newest first: itself, or those one or two levels below."""
    if (folder / "config.yaml").is_file():
        return {folder.resolve().name: folder}
    paths = [path.parent for pattern in ("*/config.yaml", "*/*/config.yaml") for path in folder.glob(pattern)]
    paths.sort(key=lambda path: (path / "config.yaml").stat().st_mtime, reverse=True)
    return {path.relative_to(folder).as_posix(): path for path in paths}


def how_far(folder: Path, as_json: bool) -> str:
    """Return a line for each strategy that has begun, or all as JSON; ConfigError for no run or a damaged file."""
    run = LiveRun(folder)
    run.look(float("inf"))
    for course in run.courses.values():
        course.closed = course is not run.current or not run.running
    if not as_json:
        begun = [course.sentence() for course in run.courses.values() if course.means]
        where = f"{run.current.name}: round {run.current.done} of {run.config.rounds}"
        return "\n".join([*begun, f"{run.state}: {where}"])
    strategies = {
        name: {
            "round": course.done,
            "test_mean": dict(course.means),
            "test_worst": dict(course.worsts),
            "bytes_down": course.bytes_down,
            "bytes_up": course.bytes_up,
            "clients": {who: vars(client) for who, client in course.clients.items()},
        }
        for name, course in run.courses.items()
    }
    told = {"state": run.state, "rounds": run.config.rounds, "seconds_left": run.current.seconds_left}
    return json.dumps({**told, "strategies": strategies}, indent=1)
