"""The course of one strategy in a run, read from its folder for reports, comparisons and the papers' tables."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from hyperbloom.common.config import RunConfig
from hyperbloom.common.metrics import Scale, scale_of
from hyperbloom.server.loop.listener import Selection
from hyperbloom.server.runs.lines import METRICS, Line, asked, read_lines

OF_TEST = ("test_mean", "test_std", "test_worst")
"""Metrics that an evaluation lacks if the selecting metric is undefined on the test examples of all clients."""


@dataclass(frozen=True)
class Course:
    """One strategy in one run.

    Attributes:
        rounds: each round's line in metrics.jsonl, in order; in asynchronous mode without the lines of evaluations.
        curve: mean over clients on test examples, by evaluated round.
        selected: the round that validation selected; None before the first evaluation.
        accuracy: each client's value of the selecting metric on test examples in the selected round.
        metric: the selecting metric; `curve` and `accuracy` are of it, shares in percent.
        counts: sums of the clients' counts on test examples, if all have disclosed them.
        evaluated: the last round with an evaluation.
        told: as `accuracy`, with that of novel clients.
    """

    name: str
    rounds: Sequence[Line]
    curve: Mapping[int, float]
    selected: int | None
    metrics: Mapping[str, float]
    accuracy: Mapping[str, float]
    metric: str = "accuracy"
    counts: Sequence[float] = ()
    evaluated: int = 0
    told: Mapping[str, float] = field(default_factory=dict)

    @property
    def scale(self) -> Scale:
        """Return the scale of the selecting metric."""
        return scale_of(self.metric)

    def is_over(self, config: RunConfig) -> bool:
        """Return whether all rounds are there, or patience has ended them."""
        done = sum(line["round"] > 0 for line in self.rounds)
        return done >= config.rounds or config.has_lost_patience(self.selected, self.evaluated)

    @property
    def seconds(self) -> float:
        """Return the seconds of all rounds, evaluations included."""
        return float(sum(line["seconds"] for line in self.rounds))

    @property
    def trained(self) -> int:
        """Return how many times a client has trained, over all clients."""
        return sum(line["clients"] for line in self.rounds)

    def bytes_each(self, direction: str) -> float:
        """Return the mean bytes of training per client that was asked, and round; `direction` is `down` or `up`."""
        total, times = sum(line.get(f"bytes_{direction}", 0) for line in self.rounds), sum(map(asked, self.rounds))
        return float(total) / max(1, times)


def read_course(name: str, place: Path, selection: Selection | None, novel: Set[str] = frozenset()) -> Course:
    """Read a strategy's course from the lines in `place`, with the accuracy of `novel` clients apart."""
    lines = list(read_lines(place / METRICS))
    rounds = {line["round"]: line for line in reversed(lines)}  # a round's first line is the one of its training
    curve = {line["round"]: line["test_mean"] for line in lines if "test_mean" in line}
    chosen = selection or Selection(-1, {}, {})
    return Course(
        name,
        [rounds[number] for number in sorted(rounds)],
        {number: curve[number] for number in sorted(curve)},
        None if selection is None else chosen.round,
        {**dict.fromkeys(OF_TEST, math.nan), **chosen.metrics} if selection else {},
        {client: value for client, value in chosen.test_accuracy.items() if client not in novel},
        chosen.metric,
        chosen.counts,
        max((line["round"] for line in lines if "metric" in line), default=0),
        chosen.test_accuracy,
    )
