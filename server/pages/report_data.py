"""The content of a run folder, gathered for its report: numbers only, without their presentation."""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.gains import Gain
from hyperbloom.common.metrics import scale_of
from hyperbloom.server.runs.course import Course, read_course
from hyperbloom.server.runs.lines import CLIENTS, EVENTS, Line, phase_folder, read_gains, read_lines
from hyperbloom.server.runs.recorded import read_config
from hyperbloom.server.watch.board import Standing
from hyperbloom.server.watch.watching import is_running

COMPARISON, CELL = "comparison.yaml", "cell.json"  # written by `flower-server compare`


@dataclass(frozen=True)
class Spread:
    """Test accuracy in percent over the clients scored after a round, without novel ones."""

    round: int
    worst: float
    lower: float  # quartile
    upper: float
    best: float


@dataclass(frozen=True)
class Member:
    """A client of the roster; `shares` is empty if it did not disclose its classes."""

    name: str
    row: int
    examples: int
    size: str
    shares: tuple[float, ...]


@dataclass
class ByClient:
    """Data of the run's strategy from clients.jsonl: the spread of accuracy, and the clients left out."""

    spreads: list[Spread] = field(default_factory=list)
    left_out: dict[str, Standing] = field(default_factory=dict)
    left_out_in: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RunData:
    """All data for a report, with the run's strategy first in `courses`, and `members` by row.

    `compared` is a sentence on the origin of the other strategies; clients standardise targets by `moments`.
    """

    folder: Path
    config: RunConfig
    environment: Mapping[str, Any]
    courses: Sequence[Course]
    by_client: ByClient
    compared: str
    members: Sequence[Member]
    events: Sequence[Line]
    running: bool
    task: str = "classification"
    outputs: int = 0
    moments: tuple[float, ...] = ()
    gains: Mapping[str, tuple[str, Gain]] = field(default_factory=dict)

    @property
    def main(self) -> Course:
        """Return the run's own strategy."""
        return self.courses[0]

    @property
    def complete(self) -> bool:
        """Return whether all rounds of the run's strategy are over, or patience has ended them."""
        evaluated = max(self.main.curve, default=0)
        over = self.main.rounds[-1]["round"] >= self.config.rounds
        return bool(over) or self.config.has_lost_patience(self.main.selected, evaluated)


def read_run_data(folder: Path) -> RunData:
    """Read a run folder. For a comparison's folder, read its first run, with the other strategies of the same seed.

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
        members = [read_member(entry) for entry in roster["clients"]]
        learned = _learned(roster)
        novel = {member.name for member in members if config.is_novel(member.row)}
        courses = [
            read_course(name, phase_folder(folder, config, name), summary.get(name), novel)
            for name in (config.strategy, *config.baselines)
        ]
        by_client = _read_clients(folder, novel, courses[0].metric)
        others, compared = _beside(folder, config, novel)
        gains = read_gains(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder}: a file of the run is damaged ({error!r})") from None
    if not courses[0].rounds:
        raise ConfigError(f"{folder}: no round is over yet; there is nothing to report")
    known = [course for course in (*courses, *others) if course.rounds]
    events = list(read_lines(folder / EVENTS))
    about = (folder, config, environment, known, by_client, compared, members, events, is_running(folder))
    return RunData(*about, *learned, gains)


def _json(path: Path, otherwise: Any) -> Any:
    return json.loads(path.read_text()) if path.exists() else otherwise


def read_member(entry: Mapping[str, Any]) -> Member:
    """Return the client of an entry of roster.json."""
    about = entry["about"]
    shares = tuple(about.get("class_shares") or ())
    return Member(entry["client_id"], entry["row"], about["train_examples"], about["size"], shares)


def _learned(roster: Mapping[str, Any]) -> tuple[str, int, tuple[float, ...]]:
    """Return the task, the number of outputs, and the moments of targets."""
    about = next((entry["about"] for entry in roster["clients"]), {"num_classes": 0})
    return str(about.get("task", "classification")), int(about["num_classes"]), tuple(roster.get("moments", ()))


def _first_cell(out: Path) -> Path:
    cells = sorted(_cells(out), key=lambda cell: str(_json(cell / "environment.json", {}).get("started", "")))
    if not cells:
        raise ConfigError(f"{out}: none of the comparison's runs is finished yet")
    return cells[0]


def _cells(out: Path) -> Iterator[Path]:
    return (path.parent for path in sorted(out.glob(f"*/{CELL}")))


def _beside(folder: Path, config: RunConfig, novel: Set[str]) -> tuple[list[Course], str]:
    """Return the other strategies of the same comparison and seed, and a sentence on them."""
    out = folder.resolve().parent
    if not (out / COMPARISON).exists():
        return [], ""
    others = []
    for cell in _cells(out):
        other = read_config(cell)
        if other.seed == config.seed and other.strategy != config.strategy:
            summary = _json(cell / "summary.json", {}).get(other.strategy)
            others.append(read_course(other.strategy, cell, summary, novel))
    return others, f"The other strategies are runs of the same comparison with seed {config.seed}."


def _read_clients(folder: Path, novel: Set[str], metric: str) -> ByClient:
    found = ByClient()
    scores: dict[int, list[float]] = {}
    for line in read_lines(folder / CLIENTS):
        number, client = line["round"], line["client"]
        if "refused" in line:
            found.left_out.setdefault(client, Standing()).leave_out(line)
            found.left_out_in[number] = found.left_out_in.get(number, 0) + 1
        elif client not in novel and (value := line.get(f"test_{metric}")) is not None:
            scores.setdefault(number, []).append(scale_of(metric).factor * value)
    for number in sorted(scores):
        worst, lower, upper, best = np.quantile(scores[number], (0, 0.25, 0.75, 1)).tolist()
        found.spreads.append(Spread(number, worst, lower, upper, best))
    return found
