"""What a person sees: a live block while a strategy runs, lines where there is no terminal, a table at the end."""

import time
from collections.abc import Mapping, Set
from itertools import islice
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hyperbloom.server.board import Board, plain_text
from hyperbloom.server.loop.listener import Listener, RoundReport, Selection
from hyperbloom.server.run_lines import client_lines, metrics_line

if TYPE_CHECKING:
    from hyperbloom.strategies.algorithm import Algorithm

__all__ = ["BoardView", "TerminalView", "results_table"]

MOST_ROWS = 200
"""Clients beyond which the table shows the first ones only; the run folder holds all."""


class BoardView:
    """A strategy's board on a console: a live block on a terminal, a line per evaluation elsewhere.

    Args:
        console: where to show it.
    """

    def __init__(self, console: Console) -> None:
        """Show nothing yet."""
        self.console = console
        self._live: Live | None = None
        self._board: Board | None = None

    def open(self, board: Board) -> None:
        """Begin a new block; the one before stays as it is."""
        self.close()
        self._board = board
        if self.console.is_terminal:
            self._live = Live(board.render(), console=self.console, refresh_per_second=4)
            self._live.start()

    def refresh(self) -> None:
        """Show what the board knows now."""
        if self._live and self._board:
            self._live.update(self._board.render())

    def close(self) -> None:
        """Give the terminal back."""
        if self._live:
            self.refresh()
            self._live.stop()
            self._live = None

    def event(self, text: str, style: str = "") -> None:
        """Show that something happened: in the block if there is one, else as a line."""
        if self._live and self._board:
            self._board.add_event(plain_text(text))
            self.refresh()
        else:
            self.line(text, style)

    def line(self, text: str, style: str = "") -> None:
        """Print text that may come from a client: no markup, no control characters."""
        self.console.print(plain_text(text), style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def evaluated(self, board: Board) -> None:
        """Print the last evaluation as a line where there is no live block."""
        if not self._live:
            self.line(board.sentence())


class TerminalView(Listener):
    """Follows a run on a console.

    Args:
        console: where to show it; a live block on a terminal, plain lines elsewhere.
    """

    def __init__(self, console: Console) -> None:
        """Show nothing yet."""
        self.console = console
        self._view = BoardView(console)
        self._board = Board("", 0)
        self._hidden = False  # whether clients keep their losses to themselves
        self._summed = False  # whether there are only means of losses

    def phase(self, strategy: "Algorithm", name: str) -> None:
        """Begin a new block for a strategy."""
        self._board = Board(name, strategy.config.rounds)
        self._hidden = strategy.config.privacy.where == "client"
        self._summed = strategy.config.secure_aggregation
        self._view.open(self._board)

    def phase_done(self, strategy: "Algorithm") -> None:
        """Leave the block as it is."""
        self.close()

    def close(self) -> None:
        """Give the terminal back."""
        self._view.close()

    def event(self, text: str) -> None:
        """Show what happened to a client."""
        self._view.event(f"{time.strftime('%H:%M:%S')} {text}")

    def round_done(self, report: RoundReport) -> None:
        """Advance."""
        board = self._board
        board.add_round(metrics_line(report, self._hidden))
        for line in client_lines(report, self._hidden or self._summed):
            board.add_client(line)
        for name, why in report.outcome.refused.items():
            self._view.event(f"{time.strftime('%H:%M:%S')} round {report.number}: {name} left out: {why}", "yellow")
        self._view.refresh()
        if report.outcome.evaluation and report.outcome.evaluation.scores:
            self._view.evaluated(board)


def results_table(
    results: Mapping[str, Selection], train_examples: Mapping[str, int], novel: Set[str] = frozenset()
) -> Table:
    """Return test accuracy per client (of the first `MOST_ROWS`) and strategy, at the round that validation selected.

    Args:
        results: selection of each strategy, the main one first.
        train_examples: number of training examples of each client.
        novel: clients that never train; they have a mean of their own, and no part in the others.
    """
    table = Table()
    table.add_column("client")
    table.add_column("examples", justify="right")
    for name, selection in results.items():
        table.add_column(Text(f"{name}\n(round {selection.round})"), justify="right")
    for client, examples in islice(train_examples.items(), MOST_ROWS):
        values = [selection.test_accuracy.get(client) for selection in results.values()]
        best = max((value for value in values if value is not None), default=None)
        name = f"{client} (novel)" if client in novel else client
        table.add_row(Text(name), str(examples), *(_cell(value, best) for value in values))
    if len(train_examples) > MOST_ROWS:
        table.add_row(f"{len(train_examples) - MOST_ROWS} more in summary.json")
    table.add_section()
    means = [selection.metrics["test_mean"] for selection in results.values()]
    table.add_row("mean over clients", "", *(_cell(value, max(means)) for value in means))
    worst = [selection.metrics["test_worst"] for selection in results.values()]
    table.add_row("worst client", "", *(_cell(value, max(worst)) for value in worst))
    pooled = [selection.metrics["test_pooled"] for selection in results.values()]
    table.add_row("pooled over examples", "", *(_cell(value, max(pooled)) for value in pooled))
    if novel:
        unseen = [selection.metrics.get("novel_test_mean") for selection in results.values()]
        best = max((value for value in unseen if value is not None), default=None)
        table.add_row("mean over novel clients", "", *(_cell(value, best) for value in unseen))
    return table


def _cell(value: float | None, best: float | None) -> str:
    if value is None:
        return "-"
    return f"[bold green]{value:.1f}[/]" if value == best else f"{value:.1f}"
