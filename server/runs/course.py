"""How one strategy fared in a run, as its folder tells it: what reports, comparisons and the papers' tables show."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperbloom.server.runs.lines import METRICS, Line, read_lines

__all__ = ["Course", "read_course"]


@dataclass(frozen=True)
class Course:
    """One strategy in one run.

    Attributes:
        name: of the strategy.
        rounds: the line of each round in metrics.jsonl, in order; in asynchronous mode without those of evaluations.
        curve: mean test accuracy over clients by evaluated round, percent.
        selected: the round that validation selected; None before the first evaluation.
        metrics: of that round.
        accuracy: test accuracy of each client in that round, percent.
    """

    name: str
    rounds: Sequence[Line]
    curve: Mapping[int, float]
    selected: int | None
    metrics: Mapping[str, float]
    accuracy: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of all rounds, evaluations included."""
        return float(sum(line["seconds"] for line in self.rounds))

    @property
    def trained(self) -> int:
        """How many times a client has trained."""
        return sum(line["clients"] for line in self.rounds)

    def bytes_each(self, direction: str) -> float:
        """Return the bytes of a client's training in one round; `direction` is `down` or `up`."""
        return float(sum(line.get(f"bytes_{direction}", 0) for line in self.rounds)) / max(1, self.trained)


def read_course(name: str, place: Path, summary: Mapping[str, Any] | None, novel: Set[str] = frozenset()) -> Course:
    """Read how a strategy fared.

    Args:
        name: of the strategy.
        place: the folder of its metrics.jsonl.
        summary: its part of summary.json, if it was evaluated.
        novel: clients whose accuracy is left out.
    """
    lines = list(read_lines(place / METRICS))
    rounds = {line["round"]: line for line in reversed(lines)}  # the first line of a round is that of its training
    curve = {line["round"]: line["test_mean"] for line in lines if "test_mean" in line}
    selected, metrics, accuracy = None, {}, {}
    if summary:
        selected, metrics, accuracy = summary["round"], summary["metrics"], summary["test_accuracy"]
    return Course(
        name,
        [rounds[number] for number in sorted(rounds)],
        {number: curve[number] for number in sorted(curve)},
        selected,
        metrics,
        {client: value for client, value in accuracy.items() if client not in novel},
    )
