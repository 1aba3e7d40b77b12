"""The state of a running strategy, from the lines of its run folder, and its presentation on a terminal.

The live view of a run and `flower-server watch` show the same board. The first feeds it as rounds end, the other from
files.
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hyperbloom.common.errors import printable
from hyperbloom.common.metrics import Scale, scale_of, title_of
from hyperbloom.server.runs.lines import Line, asked

EVENTS_SHOWN = 4
STRAGGLERS_SHOWN = 3
PACE_OVER = 50
"""Rounds over which the pace is measured: older rounds say little about the time left."""


@dataclass
class Standing:
    """A client in one strategy: its last training, its last score, and how often it was left out and why."""

    trained: int | None = None
    accuracy: float | None = None
    left_out: int = 0
    left_out_in: int = -1
    why: str = ""

    @property
    def well(self) -> bool:
        """Return whether the client has trained since it was last left out."""
        return self.trained is not None and self.trained > self.left_out_in

    def leave_out(self, line: Line) -> None:
        """Count a round in which the client was left out."""
        self.left_out, self.left_out_in, self.why = self.left_out + 1, line["round"], line["refused"]


class Board:
    """The state of one strategy, as far as its lines have been added.

    Attributes:
        means, worsts: test accuracy in percent by evaluated round, over clients.
        bytes_down, bytes_up: of training, since the beginning.
        trained, left_out: how many times a client that was asked to train did, or was left out, over all clients.
        events: those that are shown.
    """

    def __init__(self, name: str, rounds: int) -> None:
        self.name, self.rounds = name, rounds
        self.done = self.bytes_down = self.bytes_up = self.trained = self.left_out = 0
        self.means: list[tuple[float, float]] = []
        self.worsts: list[tuple[float, float]] = []
        self.clients: dict[str, Standing] = {}
        self._times: deque[tuple[int, float]] = deque([(0, 0.0)], maxlen=PACE_OVER + 1)
        self._last: Line = {}  # the last round's line
        self._evaluated: Line = {}  # of the last one in which the metric was defined for a client
        self._worst: str | None = None
        self._selected: tuple[float, int] | None = None  # by validation
        self._seconds: dict[str, float] = {}  # of the clients that trained in the last round
        self.events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self.closed = False  # no time is left, whatever has ended the strategy

    def add_round(self, line: Line) -> None:
        """Add a line of metrics.jsonl."""
        number = line["round"]
        self.bytes_down += line.get("bytes_down", 0)
        self.bytes_up += line.get("bytes_up", 0)
        self.trained += line["clients"]
        self.left_out += asked(line) - line["clients"]
        # Asynchronous mode reports an evaluation after later rounds, in a line of its own.
        if number > self.done or (number == self.done and ("metric" not in line or line["clients"])):
            self.done, self._last, self._seconds = number, line, {}
            if line["elapsed"] > self._times[-1][1]:
                self._times.append((number, line["elapsed"]))
        if "test_mean" in line:
            self.means.append((number, line["test_mean"]))
            self.worsts.append((number, line["test_worst"]))
            self._evaluated, self._worst = line, None
        if "val_mean" in line:
            chosen = None if self._selected is None else self._selected[0]
            if chosen is None or self.scale.best((chosen, line["val_mean"])) != chosen:
                self._selected = line["val_mean"], number

    def add_client(self, line: Line) -> None:
        """Add a line of clients.jsonl, after the line of its round."""
        name, number = line["client"], line["round"]
        client = self.clients.setdefault(name, Standing())
        if "refused" in line:
            client.leave_out(line)
        elif (value := line.get(f"test_{self.metric}")) is not None:
            client.accuracy = self.scale.factor * value
            here = number == self._evaluated.get("round") and self._worst is None
            if here and math.isclose(client.accuracy, self._evaluated["test_worst"], abs_tol=1e-9):
                self._worst = name
        elif "seconds" in line:
            client.trained = number
            if number == self.done:
                self._seconds[name] = line["seconds"]

    def gains_over(self, other: "Board") -> dict[str, float]:
        """Return what each client gains over another strategy, by its last values of the metric, in their unit."""
        both = self.clients, other.clients
        mine, theirs = ({n: one.accuracy for n, one in each.items() if one.accuracy is not None} for each in both)
        return {name: self.scale.sign * (value - theirs[name]) for name, value in mine.items() if name in theirs}

    @property
    def metric(self) -> str:
        """Return the selecting metric."""
        return str(self._evaluated.get("metric", "accuracy"))

    @property
    def title(self) -> str:
        """Return the selecting metric for people."""
        return title_of(self.metric)

    @property
    def scale(self) -> Scale:
        """Return the scale of the selecting metric."""
        return scale_of(self.metric)

    @property
    def pace(self) -> float | None:
        """Return the recent rounds per second, or None before the first round."""
        (first, begin), (last, end) = self._times[0], self._times[-1]
        return (last - first) / (end - begin) if end > begin else None

    @property
    def seconds_left(self) -> float | None:
        """Return the estimated seconds until the last round; None before the first one, and after the end."""
        return None if not self.pace or self.closed else max(0.0, (self.rounds - self.done) / self.pace)

    def sentence(self) -> str:
        """Return the last evaluation as a line for output that is no terminal."""
        number, rate = self._evaluated["round"], self.pace
        left = "" if self.closed or not rate else f"  {duration((self.rounds - number) / rate)} left"
        tempo = f"{self._tempo()}{left}" if number and rate else "before training"
        return f"{self.name}: round {number}/{self.rounds}  {self.title} {_figures(self._evaluated)}  {tempo}"

    def _tempo(self) -> str:
        """Return the pace as text, or nothing before the first round."""
        rate = self.pace or 0.0
        return f"{rate:.1f} rounds/s" if rate >= 1 else f"{duration(1 / rate)} a round" if rate else ""

    def render(self) -> RenderableType:
        """Return the board for a terminal. Its thread draws while others add lines and events."""
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="fold")
        rows.add_row(self.title, self._metric_row())
        if self._last:
            rows.add_row("training", self._training_row())
        for index, text in enumerate(self._stragglers()):
            rows.add_row("left out" if index == 0 else "", Text(text, style="yellow"))
        for index, text in enumerate(list(self.events)):
            rows.add_row("lately" if index == 0 else "", Text(text, no_wrap=True, overflow="ellipsis"))
        return Group(self._head(), rows)

    def _head(self) -> RenderableType:
        left = f"{duration(self.seconds_left)} left" if self.seconds_left else ""
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self.name, style="bold"),
            ProgressBar(total=self.rounds, completed=self.done, width=24),
            f"{self.done}/{self.rounds}",
            Text(self._tempo(), style="cyan"),
            Text(left, style="cyan"),
        )
        return head

    def _metric_row(self) -> str | Text:
        line = self._evaluated
        if not line:
            return "waiting for the first evaluation"
        text = Text(_figures(line))
        if self._worst is not None:
            text.append(f" ({printable(self._worst)})")
        text.append(f", at round {line['round']}")
        best = self.scale.best([mean for _, mean in self.means])
        at = next(number for number, mean in self.means if mean == best)
        if at != line["round"]:
            text.append(f"; best mean {self.scale.show(best)} at round {at}", style="dim")
        return text

    def _training_row(self) -> str:
        line = self._last
        parts = [f"loss {line['loss']:.3g}"] if "loss" in line else []
        parts.append(f"{line['clients']} client{'' if line['clients'] == 1 else 's'} in {line['seconds']:.2f} s")
        parts.append(f"{amount(self.bytes_down)} down, {amount(self.bytes_up)} up in all")
        by_seconds = sorted((seconds, name) for name, seconds in list(self._seconds.items()))
        if by_seconds and by_seconds[-1][0] > 2 * median(seconds for seconds, _ in by_seconds):
            parts.append(f"slowest {printable(by_seconds[-1][1])} {by_seconds[-1][0]:.1f} s")
        return " · ".join(parts)

    def _stragglers(self) -> list[str]:
        left_out = ((name, client) for name, client in list(self.clients.items()) if client.left_out)
        often = sorted(left_out, key=lambda pair: (-pair[1].left_out, pair[0]))
        lines = [
            f"{printable(name)} {client.left_out} time{'' if client.left_out == 1 else 's'}, "
            f"last in round {client.left_out_in}: {printable(client.why)}"
            for name, client in often[:STRAGGLERS_SHOWN]
        ]
        return lines + ([f"and {len(often) - STRAGGLERS_SHOWN} more"] if len(often) > STRAGGLERS_SHOWN else [])


def amount(count: float) -> str:
    """Return a number of bytes as text."""
    return decimal(round(count))


def duration(seconds: float) -> str:
    """Return a number of seconds as text: 30 ms, 12 s, 3:04 min, 2:15 h."""
    if seconds < 10:
        return f"{1000 * seconds:.0f} ms" if 0 < seconds < 0.1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"
    return f"{minutes // 60}:{minutes % 60:02d} h"


def _figures(line: Any) -> str:
    scale = scale_of(line.get("metric", "accuracy"))
    return f"mean {scale.show(line['test_mean'])}, worst client {scale.show(line['test_worst'])}"
