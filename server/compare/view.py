"""What a person sees of a comparison: one bar over all its rounds, or a plain line per cell."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hyperbloom.common.errors import HyperbloomError
from hyperbloom.server.compare.comparison import Cell
from hyperbloom.server.loop.events import Event, Kind
from hyperbloom.server.loop.listener import Listener, RoundReport, Selection
from hyperbloom.server.watch.view import print_line

if TYPE_CHECKING:
    from hyperbloom.strategies.algorithm import Algorithm

__all__ = ["ComparisonView"]

MOST_TROUBLES = 5
"""Different troubles of a cell that are told; its run folder holds all."""


class ComparisonView(Listener):
    """Follows the cells of a comparison on a console; a context manager, so that the terminal is given back.

    Args:
        console: where to show them.
        cells: all of them, those that are finished too.
    """

    def __init__(self, console: Console, cells: Sequence[Cell]) -> None:
        """Show nothing yet."""
        self.console = console
        self._cells = len(cells)
        self._left = sum(cell.config.rounds for cell in cells if not cell.finished)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(f"0/{self._cells} runs", total=self._left, state="")
        self._count = 0
        self._rounds = 0  # of the cells that were run here and are over
        self._start = time.perf_counter()
        self._name = ""  # of the cell that runs
        self._round = 0  # its last one
        self._accuracy = ""
        self._gathering = False  # whether its first round is still to come
        self._waiting = ""  # for whom it waits meanwhile
        self._troubles: set[str] = set()  # what has been told of it

    def __enter__(self) -> "ComparisonView":
        """Take the terminal."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self._progress.stop()

    # ------------------------------------------------------------------ cells

    def kept(self, cell: Cell) -> None:
        """A cell was finished before."""
        self._over(cell, "finished before, kept")

    def begin(self, cell: Cell) -> Listener:
        """A cell starts."""
        self._name, self._round, self._accuracy = cell.folder.name, 0, ""
        self._gathering, self._waiting, self._troubles = True, "", set()
        self._progress.update(self._task, state=self._name)
        return self

    def done(self, cell: Cell, seconds: float, after: int) -> None:
        """A cell is finished; where it went on, a later round need not have been selected."""
        self._rounds += cell.config.rounds
        self._over(cell, f"{self._accuracy}{seconds:.0f} s{f' from round {after} on' if after else ''}")

    def failed(self, cell: Cell, error: HyperbloomError) -> None:
        """A cell came to nothing."""
        self._rounds += cell.config.rounds
        self._over(cell, f"failed: {error}", "yellow")

    def _over(self, cell: Cell, text: str, style: str = "") -> None:
        self._count += 1
        line = f"{cell.folder.name}: {text}; {self._count}/{self._cells}"
        if not self.console.is_terminal and self._rounds and self._left > self._rounds:
            passed = time.perf_counter() - self._start
            line += f", about {passed * (self._left / self._rounds - 1):.0f} s left"
        print_line(self.console, line, style)
        done = f"{self._count}/{self._cells} runs"
        self._progress.update(self._task, completed=self._rounds, description=done)

    # ------------------------------------------------------------------ within a cell

    def phase(self, strategy: "Algorithm", name: str) -> None:
        """All are there that were waited for."""
        self._gathering, self._waiting = False, ""
        self._progress.update(self._task, state=self._name)

    def event(self, text: str) -> None:
        """Tell what goes wrong with clients, each reason once, and who is waited for if that goes on."""
        kind, reason = (text.kind, text.reason) if isinstance(text, Event) else (None, text)
        if kind is Kind.WAITING and self._gathering:
            self._waiting = text
            self._progress.update(self._task, state=f"{self._name}, {text}")
        elif kind is not Kind.JOINED:
            self._trouble(text, reason)
            if self._waiting:
                self._trouble(self._waiting, self._waiting)

    def round_done(self, report: RoundReport) -> None:
        """Advance; in asynchronous mode an evaluation is reported after rounds that came later."""
        self._round = max(self._round, report.number)
        for name, why in report.outcome.refused.items():
            self._trouble(f"round {report.number}: {name} left out: {why}", why.text)
        self._progress.update(self._task, completed=self._rounds + self._round)

    def selected(self, selection: Selection, state: object, roster: object) -> None:
        """Remember the accuracy of the best round."""
        self._accuracy = f"{selection.metrics['test_mean']:.1f} % (round {selection.round}), "

    def _trouble(self, text: str, reason: str) -> None:
        """Tell something of the cell that runs, unless the reason, or enough, has been told."""
        told = len(self._troubles)
        if reason not in self._troubles and told <= MOST_TROUBLES:
            self._troubles.add(reason)
            text = text if told < MOST_TROUBLES else "more of that is in its run folder"
            print_line(self.console, f"{self._name}: {text}", "yellow")
