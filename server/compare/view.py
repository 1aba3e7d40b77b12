"""The view of a comparison: one progress bar over all rounds, or a plain line per cell."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hyperbloom.common.errors import HyperbloomError
from hyperbloom.common.metrics import scale_of
from hyperbloom.server.compare.comparison import Cell
from hyperbloom.server.loop.events import Event, Kind
from hyperbloom.server.loop.listener import Listener, RoundReport, Selection
from hyperbloom.server.watch.view import print_line

if TYPE_CHECKING:
    from hyperbloom.strategies.algorithm import Algorithm


MOST_TROUBLES = 5
"""Most different troubles shown for a cell; its run folder has all."""


class ComparisonView(Listener):
    """Shows the progress of a comparison's cells. It is a context manager, which restores the terminal.

    Args:
        console: shows the progress.
        cells: all cells, including finished ones.
    """

    def __init__(self, console: Console, cells: Sequence[Cell]) -> None:
        """Set up the progress bar."""
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
        self._rounds = 0  # of the cells that ended here
        self._start = time.perf_counter()
        self._name = ""  # of the running cell
        self._round = 0  # of the running cell
        self._accuracy = ""
        self._gathering = False  # whether the first round is still to come
        self._waiting = ""  # the last message about missing clients
        self._troubles: set[str] = set()  # reasons shown for the running cell

    def __enter__(self) -> "ComparisonView":
        """Start the progress bar."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the progress bar."""
        self._progress.stop()

    # ------------------------------------------------------------------ cells

    def kept(self, cell: Cell) -> None:
        """Show a cell that was finished before."""
        self._over(cell, "finished before, kept")

    def begin(self, cell: Cell) -> Listener:
        """Show a cell that starts."""
        self._name, self._round, self._accuracy = cell.folder.name, 0, ""
        self._gathering, self._waiting, self._troubles = True, "", set()
        self._progress.update(self._task, state=self._name)
        return self

    def done(self, cell: Cell, seconds: float, after: int) -> None:
        """Show a finished cell. Its accuracy is empty if the round was selected before a resume."""
        self._rounds += cell.config.rounds
        self._over(cell, f"{self._accuracy}{seconds:.0f} s{f' from round {after} on' if after else ''}")

    def failed(self, cell: Cell, error: HyperbloomError) -> None:
        """Show a cell that failed."""
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
        """Stop waiting: all clients have joined."""
        self._gathering, self._waiting = False, ""
        self._progress.update(self._task, state=self._name)

    def event(self, text: str) -> None:
        """Show each kind of trouble with clients once, and the missing clients if trouble goes on."""
        kind, reason = (text.kind, text.reason) if isinstance(text, Event) else (None, text)
        if kind is Kind.WAITING and self._gathering:
            self._waiting = text
            self._progress.update(self._task, state=f"{self._name}, {text}")
        elif kind is not Kind.JOINED:
            self._trouble(text, reason)
            if self._waiting:
                self._trouble(self._waiting, self._waiting)

    def round_done(self, report: RoundReport) -> None:
        """Advance the bar; asynchronous mode reports an evaluation after later rounds."""
        self._round = max(self._round, report.number)
        for name, why in report.outcome.refused.items():
            self._trouble(f"round {report.number}: {name} left out: {why}", why.text)
        self._progress.update(self._task, completed=self._rounds + self._round)

    def selected(self, selection: Selection, state: object, roster: object) -> None:
        """Remember the accuracy of the best round."""
        self._accuracy = (
            f"{scale_of(selection.metric).show(selection.metrics['test_mean'])} (round {selection.round}), "
        )

    def _trouble(self, text: str, reason: str) -> None:
        """Show trouble in the running cell, once per reason and up to `MOST_TROUBLES`."""
        told = len(self._troubles)
        if reason not in self._troubles and told <= MOST_TROUBLES:
            self._troubles.add(reason)
            text = text if told < MOST_TROUBLES else "more of that is in its run folder"
            print_line(self.console, f"{self._name}: {text}", "yellow")
