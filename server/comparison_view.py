"""What a person sees of a comparison: one bar over all its rounds, or a plain line per cell."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hyperbloom.common.errors import HyperbloomError
from hyperbloom.server.comparison import Cell
from hyperbloom.server.listener import Listener, RoundReport, Selection

__all__ = ["ComparisonView"]


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
        self._of_cell = 0
        self._start = time.perf_counter()
        self._accuracy: str | None = None

    def __enter__(self) -> "ComparisonView":
        """Take the terminal."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self._progress.stop()

    def kept(self, cell: Cell) -> None:
        """A cell was finished before."""
        self._over(cell, "finished before, kept")

    def begin(self, cell: Cell) -> Listener:
        """A cell starts."""
        self._accuracy, self._of_cell = None, 0
        self._progress.update(self._task, state=cell.folder.name)
        return self

    def round_done(self, report: RoundReport) -> None:
        """Advance; in asynchronous mode an evaluation is reported after rounds that came later."""
        self._of_cell = max(self._of_cell, report.number)
        self._progress.update(self._task, completed=self._rounds + self._of_cell)

    def selected(self, selection: Selection, state: object, roster: object) -> None:
        """Remember the accuracy of the best round."""
        self._accuracy = f"{selection.metrics['test_mean']:.1f} % (round {selection.round})"

    def done(self, cell: Cell, seconds: float, after: int) -> None:
        """A cell is finished."""
        self._rounds += cell.config.rounds
        went_on = f" from round {after} on" if after else ""
        # It has none where no later round was selected than that from which it went on.
        accuracy = f"{self._accuracy}, " if self._accuracy else ""
        self._over(cell, f"{accuracy}{seconds:.0f} s{went_on}")

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
        self.console.print(line, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)
        done = f"{self._count}/{self._cells} runs"
        self._progress.update(self._task, completed=self._rounds, description=done)
