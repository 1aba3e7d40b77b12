"""The terminal view: a live block while a strategy runs, lines without a terminal, a table at the end."""

import time
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hyperbloom.common.errors import printable
from hyperbloom.common.gains import Gain, of_all, sentence
from hyperbloom.common.metrics import Scale, scale_of, title_of
from hyperbloom.common.program.names import by_number
from hyperbloom.server.loop.listener import Listener, RoundReport, Selection
from hyperbloom.server.runs.lines import Line, client_lines, metrics_line
from hyperbloom.server.watch.board import Board

if TYPE_CHECKING:
    from hyperbloom.strategies.algorithm import Algorithm

MOST_ROWS = 200
"""Most clients in the table; the run folder has all."""


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print text that may come from a client, without markup or control characters."""
    with suppress(OSError):  # the disk of a log may be full: the run goes on
        console.print(printable(text), style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)


class TerminalView(Listener):
    """A strategy's board on a console: a live block on a terminal, else a line per evaluation.

    As a listener it receives rounds; `flower-server watch` passes it the lines of a run folder.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.board = Board("", 0)
        self._main = ""  # the run's own strategy; baselines follow
        self._live: Live | None = None
        self._summed = False  # whether only the mean of losses is known

    def phase(self, strategy: "Algorithm", name: str) -> None:
        """Start a new block for a strategy."""
        self._summed = strategy.config.secure_aggregation
        self._main = self._main or name
        self.open(name, strategy.config.rounds)

    def phase_done(self, strategy: "Algorithm") -> None:
        """End the block; it stays on the screen."""
        self.close()

    def gained(self, gains: "Mapping[str, Gain]", metric: str, number: int) -> None:
        """Say what the federation gains its clients, in one line for all that stay alone; of baselines only the mean.

        The lines stay on a terminal, above the block.
        """
        names = sorted(gains, key=by_number)[: MOST_ROWS if self.board.name == self._main else 0]
        alone = [name for name in names if gains[name].chosen == "alone"]
        for name in names:
            if name not in alone:
                print_line(self.console, sentence(name, gains[name], metric))
        if alone:
            print_line(self.console, sentence(", ".join(alone), gains[alone[0]], metric))
        if gains:
            print_line(self.console, f"{self.board.name}: {of_all(gains.values(), metric)}", "bold")

    def event(self, text: str) -> None:
        """Show what happened to a client."""
        self.show(f"{time.strftime('%H:%M:%S')} {text}")

    def round_done(self, report: RoundReport) -> None:
        """Add a round and its clients to the board."""
        self.add_round(metrics_line(report))
        self.add_clients(client_lines(report, self._summed), f"{time.strftime('%H:%M:%S')} ")

    def open(self, name: str, rounds: int) -> None:
        """Start a new block; the previous one stays on the screen."""
        self.close()
        self.board = Board(name, rounds)
        if self.console.is_terminal:
            self._live = Live(get_renderable=self.board.render, console=self.console, refresh_per_second=4)
            self._live.start()

    def close(self) -> None:
        """End the live block."""
        if self._live:
            self.board.closed = True
            self._live.stop()
            self._live = None

    def show(self, text: str, style: str = "") -> None:
        """Show an event in the block if there is one, else as a line."""
        if self._live:
            self.board.events.append(printable(text))
        else:
            print_line(self.console, text, style)

    def add_round(self, line: Line) -> None:
        """Add a line of metrics.jsonl; warn of an evaluation that cannot be selected."""
        self.board.add_round(line)
        if "metric" in line and "val_mean" not in line:
            where = f"no training client has {title_of(line['metric'])} on its validation examples"
            self.show(f"round {line['round']} cannot be selected: {where} (set select to another metric)", "yellow")
        if "test_mean" in line and not self._live:
            print_line(self.console, self.board.sentence())

    def add_clients(self, lines: Iterable[Line], moment: str = "") -> None:
        """Add lines of clients.jsonl; `moment` precedes the text on a client that was left out."""
        for line in lines:
            self.board.add_client(line)
            if "refused" in line:
                self.show(f"{moment}round {line['round']}: {line['client']} left out: {line['refused']}", "yellow")


def print_results(
    console: Console, results: Mapping[str, Selection], train_examples: Mapping[str, int], novel: Set[str]
) -> None:
    """Print the table of `results_table`, below a line that says what it shows."""
    metric = next((selection.metric for selection in results.values()), "accuracy")
    unit = " in percent" if scale_of(metric).percent else ""
    print_line(console, f"test {title_of(metric)}{unit}, at the round that validation selected")
    table = results_table(results, train_examples, novel)
    if not console.is_terminal:  # a file takes lines of any length
        console.width = max(console.width, console.measure(table, options=console.options.update(width=10_000)).maximum)
    console.print(table)


def results_table(
    results: Mapping[str, Selection], train_examples: Mapping[str, int], novel: Set[str] = frozenset()
) -> Table:
    """Return the table of the selecting metric by client (the first `MOST_ROWS`) and strategy, on test examples.

    Clients in `novel` never train; they have their own mean and count in no other.
    """
    table = Table()
    table.add_column("client", overflow="fold")
    table.add_column("examples", justify="right")
    for name, selection in results.items():
        table.add_column(Text(f"{printable(name)}\n(round {selection.round})"), justify="right", overflow="fold")
    scale = scale_of(next((selection.metric for selection in results.values()), "accuracy"))
    for client in sorted(train_examples, key=by_number)[:MOST_ROWS]:
        values = [selection.test_accuracy.get(client) for selection in results.values()]
        shown, count = Text(printable(f"{client} (novel)" if client in novel else client)), str(train_examples[client])
        table.add_row(shown, count, *_cells(values, scale))
    if len(train_examples) > MOST_ROWS:
        table.add_row(f"{len(train_examples) - MOST_ROWS} more in summary.json")
    table.add_section()
    below = {"mean over clients": "test_mean", "worst client": "test_worst", "pooled over examples": "test_pooled"}
    for title, key in (below | ({"mean over novel clients": "novel_test_mean"} if novel else {})).items():
        table.add_row(title, "", *_cells([selection.metrics.get(key) for selection in results.values()], scale))
    return table


def _cells(values: list[float | None], scale: Scale) -> list[str]:
    """Return a row's numbers, with the best one marked."""
    best = scale.best(known) if (known := [value for value in values if value is not None]) else None
    texts = ["-" if value is None else scale.cell(value) for value in values]
    return [
        f"[bold green]{text}[/]" if value is not None and value == best else text
        for text, value in zip(texts, values, strict=True)
    ]
