"""What a run folder says, gathered for its report; numbers only, nothing of how they are shown."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.server.run_lines import CLIENTS, EVENTS, METRICS, Line, phase_folder, read_lines
from hyperbloom.server.watching import is_running, read_config

__all__ = ["Course", "LeftOut", "Member", "RunData", "Spread", "read_run_data"]

COMPARISON, CELL = "comparison.yaml", "cell.json"  # as `flower-server compare` leaves them


@dataclass(frozen=True)
class Spread:
    """Test accuracy over the clients that were scored after a round, percent; novel ones are left out."""

    round: int
    mean: float
    quartiles: tuple[float, float]
    extremes: tuple[float, float]


@dataclass
class LeftOut:
    """How often a client was left out of a round, and in which last, and why."""

    times: int
    round: int
    why: str


@dataclass(frozen=True)
class Member:
    """A client as the roster has it; `shares` is empty where it did not disclose its classes."""

    name: str
    row: int
    examples: int
    size: str
    shares: tuple[float, ...]


@dataclass
class Course:
    """How one strategy fared.

    Attributes:
        name: of the strategy.
        rounds: the line of each round in metrics.jsonl; in asynchronous mode without those of evaluations.
        spreads: of the rounds that were evaluated, the selected one among them.
        selected: round that validation selected; None before the first evaluation.
        metrics: of that round.
        accuracy: test accuracy of each client then, percent; novel ones are left out.
        left_out: by client.
        left_out_in: clients left out, by round.
    """

    name: str
    rounds: list[Line] = field(default_factory=list)
    spreads: list[Spread] = field(default_factory=list)
    selected: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    accuracy: Mapping[str, float] = field(default_factory=dict)
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    left_out_in: dict[int, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of all rounds, evaluations included."""
        return float(sum(line["seconds"] for line in self.rounds))


@dataclass(frozen=True)
class RunData:
    """All of it.

    Attributes:
        folder: the run's.
        config: as resolved.
        environment: versions, platform, command.
        courses: the run's strategy, then those to compare it with.
        compared: in a sentence, where the others come from.
        members: by row.
        events: lines of events.jsonl.
        running: whether a server is at work in the folder.
    """

    folder: Path
    config: RunConfig
    environment: Mapping[str, Any]
    courses: Sequence[Course]
    compared: str
    members: Sequence[Member]
    events: Sequence[Line]
    running: bool

    @property
    def main(self) -> Course:
        """The run's own strategy."""
        return self.courses[0]

    @property
    def complete(self) -> bool:
        """Whether all rounds of the run's strategy are over."""
        return bool(self.main.rounds) and self.main.rounds[-1]["round"] >= self.config.rounds


def read_run_data(folder: Path) -> RunData:
    """Read a run folder, or of a comparison's the run that was begun first, with the others of its seed.

    Raises:
        ConfigError: it is neither, a file is damaged, or no round is over yet.
    """
    if (folder / COMPARISON).exists():
        folder = _first_cell(folder)
    config = read_config(folder)
    try:
        summary = _json(folder / "summary.json", {})
        environment = _json(folder / "environment.json", {})
        roster = _json(folder / "roster.json", {"clients": []})
        members = [_member(entry) for entry in roster["clients"]]
        novel = {member.name for member in members if _is_novel(member, config)}
        courses = [
            _read_course(name, phase_folder(folder, config, name), summary.get(name), novel)
            for name in (config.strategy, *config.baselines)
        ]
        others, compared = _beside(folder, config, novel)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder}: a file of the run is damaged ({error!r})") from None
    if not courses[0].rounds:
        raise ConfigError(f"{folder}: no round is over yet; there is nothing to report")
    known = [course for course in (*courses, *others) if course.rounds]
    events = list(read_lines(folder / EVENTS))
    return RunData(folder, config, environment, known, compared, members, events, is_running(folder))


def _json(path: Path, otherwise: Any) -> Any:
    return json.loads(path.read_text()) if path.exists() else otherwise


def _member(entry: Mapping[str, Any]) -> Member:
    about = entry["about"]
    shares = tuple(about.get("class_shares") or ())
    return Member(entry["client_id"], entry["row"], about["train_examples"], about["size"], shares)


def _is_novel(member: Member, config: RunConfig) -> bool:
    """Return whether a client never trains and is scored apart; as `PersonalisedStrategy.is_novel` has it."""
    return bool(config.novel) and member.row >= config.clients - math.ceil(config.clients * config.novel / 100)


def _first_cell(out: Path) -> Path:
    cells = sorted(_cells(out), key=lambda cell: str(_json(cell / "environment.json", {}).get("started", "")))
    if not cells:
        raise ConfigError(f"{out}: none of the comparison's runs is finished yet")
    return cells[0]


def _cells(out: Path) -> Iterator[Path]:
    return (path.parent for path in sorted(out.glob(f"*/{CELL}")))


def _beside(folder: Path, config: RunConfig, novel: Set[str]) -> tuple[list[Course], str]:
    """Return the other strategies of the same comparison and seed, and a sentence that says so."""
    out = folder.resolve().parent
    if not (out / COMPARISON).exists():
        return [], ""
    others = []
    for cell in _cells(out):
        other = read_config(cell)
        if other.seed == config.seed and other.strategy != config.strategy:
            summary = _json(cell / "summary.json", {}).get(other.strategy)
            others.append(_read_course(other.strategy, cell, summary, novel))
    return others, f"The other strategies are runs of the same comparison with seed {config.seed}."


def _read_course(name: str, place: Path, summary: Mapping[str, Any] | None, novel: Set[str]) -> Course:
    course = Course(name)
    lines = list(read_lines(place / METRICS))
    rounds = {line["round"]: line for line in reversed(lines)}  # the first of a round is that of its training
    course.rounds = [rounds[number] for number in sorted(rounds)]
    evaluated = {line["round"]: line for line in lines if "test_mean" in line}
    scores: dict[int, dict[str, float]] = {}
    for line in read_lines(place / CLIENTS):
        number, client = line["round"], line["client"]
        if "refused" in line:
            _leave_out(course, client, number, line["refused"])
        elif line.get("test_total") and client not in novel:
            scores.setdefault(number, {})[client] = 100 * line["test_correct"] / line["test_total"]
    course.spreads = [
        _spread(number, evaluated[number]["test_mean"], np.fromiter(scores[number].values(), float))
        for number in sorted(evaluated)
        if number in scores
    ]
    if summary:
        course.selected, course.metrics, course.accuracy = (
            summary["round"],
            summary["metrics"],
            {client: value for client, value in summary["test_accuracy"].items() if client not in novel},
        )
    return course


def _spread(number: int, mean: float, values: npt.NDArray[np.float64]) -> Spread:
    low, lower, upper, high = np.quantile(values, (0, 0.25, 0.75, 1)).tolist()
    return Spread(number, mean, (lower, upper), (low, high))


def _leave_out(course: Course, client: str, number: int, why: str) -> None:
    times = course.left_out[client].times if client in course.left_out else 0
    course.left_out[client] = LeftOut(times + 1, number, why)
    course.left_out_in[number] = course.left_out_in.get(number, 0) + 1
