"""What a person sees: a live line while a strategy runs, plain lines where there is no terminal, a table at the end."""

import time
from collections.abc import Mapping, Set
from itertools import islice

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hyperbloom.server.listener import Listener, RoundReport, Selection
from hyperbloom.strategies.personalised import PersonalisedStrategy

__all__ = ["TerminalView", "results_table"]

_WAITING = "waiting for the first evaluation"

MOST_ROWS = 200
"""Clients beyond which the table shows the first ones only; the run folder holds all."""


class TerminalView(Listener):
    """Follows a run on a console.

    Args:
        console: where to show it; a live line on a terminal, plain lines elsewhere.
    """

    def __init__(self, console: Console) -> None:
        """Show nothing yet."""
        self.console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._start = 0.0
        self._name = ""
        self._done = 0

    def phase(self, strategy: PersonalisedStrategy, name: str) -> None:
        """Begin a new line for a strategy."""
        self._start, self._name, self._done = time.perf_counter(), name, 0
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]{task.description:<10}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[state]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._progress.start()
            self._task = self._progress.add_task(name, total=strategy.config.rounds, state=_WAITING)

    def phase_done(self, strategy: PersonalisedStrategy) -> None:
        """Leave the line as it is."""
        self.close()

    def close(self) -> None:
        """Give the terminal back."""
        if self._progress:
            self._progress.stop()
            self._progress = None

    def event(self, text: str) -> None:
        """Print what happened to a client."""
        self._line(f"{time.strftime('%H:%M:%S')} {text}")

    def _line(self, text: str, style: str = "") -> None:
        """Print text that may come from a client: no markup, no control characters."""
        plain = "".join(character if character.isprintable() else "?" for character in text)
        self.console.print(plain, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def round_done(self, report: RoundReport) -> None:
        """Advance."""
        for name, why in report.outcome.refused.items():
            self._line(f"{time.strftime('%H:%M:%S')} round {report.number}: {name} left out: {why}", "yellow")
        rate = report.number / (time.perf_counter() - self._start)
        metrics = report.outcome.evaluation.metrics() if report.outcome.evaluation else None
        if self._progress:
            # In asynchronous mode an evaluation is reported after rounds that came later.
            self._done = max(report.number, self._done)
            self._progress.update(self._task, completed=self._done)
            if metrics:
                self._progress.update(self._task, state=f"{_accuracy(metrics)}  {rate:.1f} rounds/s")
        elif metrics:
            pace = "before training"
            if report.number:
                pace = f"{rate:.1f} rounds/s  {(report.of - report.number) / rate:.0f} s left"
            self._line(f"{self._name}: round {report.number}/{report.of}  {_accuracy(metrics)}  {pace}")


def _accuracy(metrics: Mapping[str, float]) -> str:
    return f"accuracy mean {metrics['test_mean']:.1f} %, worst client {metrics['test_worst']:.1f} %"


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
