"""What a person sees: a live block while a strategy runs, lines where there is no terminal, a table at the end."""

import time
from collections.abc import Iterable, Mapping, Set
from itertools import islice
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hyperbloom.server.loop.listener import Listener, RoundReport, Selection
from hyperbloom.server.runs.lines import Line, client_lines, metrics_line
from hyperbloom.server.watch.board import Board, plain_text

if TYPE_CHECKING:
    from hyperbloom.strategies.algorithm import Algorithm

__all__ = ["TerminalView", "print_line", "results_table"]

MOST_ROWS = 200
"""Clients beyond which the table shows the first ones only; the run folder holds all."""


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print text that may come from a client: no markup, no control characters."""
    console.print(plain_text(text), style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)


class TerminalView(Listener):
    """A strategy's board on a console: a live block on a terminal, a line per evaluation elsewhere.

    It hears of rounds as a listener; `flower-server watch` hands it the lines of a run folder.

    Args:
        console: where to show it.
    """

    def __init__(self, console: Console) -> None:
        """Show nothing yet."""
        self.console = console
        self.board = Board("", 0)
        self._live: Live | None = None
        self._summed = False  # whether there are only means of losses

    # ------------------------------------------------------------------ as a listener

    def phase(self, strategy: "Algorithm", name: str) -> None:
        """Begin a new block for a strategy."""
        self._summed = strategy.config.secure_aggregation
        self.open(name, strategy.config.rounds)

    def phase_done(self, strategy: "Algorithm") -> None:
        """Leave the block as it is."""
        self.close()

    def event(self, text: str) -> None:
        """Show what happened to a client."""
        self.show(f"{time.strftime('%H:%M:%S')} {text}")

    def round_done(self, report: RoundReport) -> None:
        """Advance."""
        self.add_round(metrics_line(report))
        self.add_clients(client_lines(report, self._summed), f"{time.strftime('%H:%M:%S')} ")

    # ------------------------------------------------------------------ from lines

    def open(self, name: str, rounds: int) -> None:
        """Begin a new block; the one before stays as it is."""
        self.close()
        self.board = Board(name, rounds)
        if self.console.is_terminal:
            self._live = Live(self.board.render(), console=self.console, refresh_per_second=4)
            self._live.start()

    def close(self) -> None:
        """Give the terminal back."""
        if self._live:
            self.refresh()
            self._live.stop()
            self._live = None

    def refresh(self) -> None:
        """Show what the board knows now."""
        if self._live:
            self._live.update(self.board.render())

    def show(self, text: str, style: str = "") -> None:
        """Show that something happened: in the block if there is one, else as a line."""
        if self._live:
            self.board.add_event(plain_text(text))
            self.refresh()
        else:
            print_line(self.console, text, style)

    def add_round(self, line: Line) -> None:
        """Take in a line of metrics.jsonl."""
        self.board.add_round(line)
        if "test_mean" in line and not self._live:
            print_line(self.console, self.board.sentence())

    def add_clients(self, lines: Iterable[Line], moment: str = "") -> None:
        """Take in lines of clients.jsonl; `moment` stands before who was left out."""
        for line in lines:
            self.board.add_client(line)
            if "refused" in line:
                self.show(f"{moment}round {line['round']}: {line['client']} left out: {line['refused']}", "yellow")
        self.refresh()


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
        table.add_row(Text(f"{client} (novel)" if client in novel else client), str(examples), *_cells(values))
    if len(train_examples) > MOST_ROWS:
        table.add_row(f"{len(train_examples) - MOST_ROWS} more in summary.json")
    table.add_section()
    below = {"mean over clients": "test_mean", "worst client": "test_worst", "pooled over examples": "test_pooled"}
    for title, key in (below | ({"mean over novel clients": "novel_test_mean"} if novel else {})).items():
        table.add_row(title, "", *_cells([selection.metrics.get(key) for selection in results.values()]))
    return table


def _cells(values: list[float | None]) -> list[str]:
    """Return a row's numbers, the largest one marked."""
    best = max((value for value in values if value is not None), default=None)
    return [
        "-" if value is None else f"[bold green]{value:.1f}[/]" if value == best else f"{value:.1f}" for value in values
    ]
