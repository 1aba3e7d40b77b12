"""Follow a run through its files alone: `flower-server watch`."""

import os
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from shlex import quote

from rich.console import Console

from hyperbloom.common.config import RunConfig
from hyperbloom.common.files.storage import claim
from hyperbloom.server.runs.lines import CLIENTS, EVENTS, METRICS, Line, Tail, phase_folder
from hyperbloom.server.runs.recorded import has_ended, read_config, read_members, read_summary, sound
from hyperbloom.server.watch.view import TerminalView, print_line, print_results

LOOK_EVERY_S = 0.5
GLANCE_S = 0.2  # another watcher holds the lock for a moment, a server until its run ends


def watch(folder: Path, console: Console, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a run until it ends, and its table if it is complete; ConfigError if the folder holds no run."""
    config = read_config(folder)
    view = TerminalView(console)
    watcher = _Watcher(folder, config, view)
    try:
        while True:
            # Check first, so that everything written before the end is read.
            running = is_running(folder)
            with sound(folder):
                watcher.look()
            if not running:
                break
            sleep(LOOK_EVERY_S)
    finally:
        view.close()
    watcher.say_how_it_ended()


def is_running(folder: Path) -> bool:
    """Return whether a server works in a run folder, which it then keeps locked."""
    try:
        path = folder / "checkpoints" / "lock"
        with path.open("r+" if os.access(path, os.W_OK) else "r") as file:  # NFS locks only what may be written
            return not claim(file, GLANCE_S)
    except FileNotFoundError:
        return False
    except OSError:
        return True


class _Watcher:
    def __init__(self, folder: Path, config: RunConfig, view: TerminalView) -> None:
        self.folder, self.config, self.view = folder, config, view
        self._names = [config.strategy, *config.baselines]
        self._events = Tail(folder / EVENTS)
        self._waiting: list[Line] = []  # events of strategies that are not shown yet
        self._enter(0)

    def _enter(self, phase: int) -> None:
        self.phase, name = phase, self._names[phase]
        place = phase_folder(self.folder, self.config, name)
        self._metrics, self._clients = Tail(place / METRICS), Tail(place / CLIENTS)
        self.view.open(name, self.config.rounds)

    def look(self) -> None:
        """Read all new lines, strategy by strategy."""
        self._waiting += self._events.read()
        while True:
            # Check first: the next strategy begins only after all lines of this one are written.
            over = self.phase + 1 < len(self._names) and self._begun(self.phase + 1)
            self._read()
            if not over:
                return
            self._enter(self.phase + 1)

    def _begun(self, phase: int) -> bool:
        return (phase_folder(self.folder, self.config, self._names[phase]) / METRICS).exists()

    def _read(self) -> None:
        # Read clients first: a round's own line is written before those of its clients.
        clients = self._clients.read()
        lines = self._metrics.read()
        if self._metrics.cut or self._clients.cut:
            self.view.show("the run went back to a checkpoint")
            self._enter(0 if not self._begun(self.phase) else self.phase)
            return self._read()
        for line in lines:
            self._say_events_until(line["round"])
            self.view.add_round(line)
        self.view.add_clients(clients)
        self._say_events_until(None)
        return None

    def _say_events_until(self, number: int | None) -> None:
        """Show this strategy's events before a round, or all if `number` is None."""
        later = []
        for line in self._waiting:
            mine = line.get("strategy") == self.view.board.name
            if mine and (number is None or line.get("round", 0) < number):
                self.view.show(f"{_clock(line.get('time', ''))} {line.get('text', '')}")
            else:
                later.append(line)
        self._waiting = later

    def say_how_it_ended(self) -> None:
        """Print the table of a complete run, or where the run stopped."""
        board, console = self.view.board, self.view.console
        if not has_ended(self.folder):
            where = f"round {board.done} of {board.rounds} of {board.name}"
            how = f"flower-server --resume {quote(str(self.folder))}, or flwr run for a Flower app,"
            print_line(console, f"it stopped after {where}; {how} goes on with it")
            return
        if results := read_summary(self.folder):
            members = read_members(self.folder).clients
            novel = {member.name for member in members if self.config.is_novel(member.row)}
            print_results(console, results, {member.name: member.examples for member in members}, novel)


def _clock(moment: str) -> str:
    try:
        return datetime.fromisoformat(moment).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return moment
