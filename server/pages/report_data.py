"""The content of a run folder, gathered for its report: numbers only, without their presentation."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.gains import Gain
from hyperbloom.common.metrics import scale_of
from hyperbloom.server.runs.course import Course, read_course
from hyperbloom.server.runs.lines import CELL, CLIENTS, COMPARISON, EVENTS, Line, phase_folder, read_gains, read_lines
from hyperbloom.server.runs.recorded import Members, read_config, read_json, read_members, read_summary, sound
from hyperbloom.server.watch.board import Standing
from hyperbloom.server.watch.watching import is_running


@dataclass(frozen=True)
class RunData:
    """All data for a report.

    Attributes:
        courses: the run's own strategy first.
        spreads: test accuracy in percent by round over the clients scored after it, without novel ones: least, lower
            quartile, upper quartile, most.
        left_out: the clients that the run's strategy left out, and `left_out_in` how many there were in each round.
        compared: a sentence on the origin of the other strategies.
    """

    folder: Path
    config: RunConfig
    environment: Mapping[str, Any]
    courses: Sequence[Course]
    spreads: Mapping[int, Sequence[float]]
    left_out: Mapping[str, Standing]
    left_out_in: Mapping[int, int]
    compared: str
    members: Members
    events: Sequence[Line]
    running: bool
    gains: Mapping[str, tuple[str, Gain]]

    @property
    def main(self) -> Course:
        """Return the run's own strategy."""
        return self.courses[0]

    @property
    def complete(self) -> bool:
        """Return whether all of the run is over."""
        return "ended" in self.environment


def read_run_data(folder: Path) -> RunData:
    """Read a run folder. For a comparison's folder, read its first run, with the other strategies of the same seed.

    Raises:
        ConfigError: it is neither, a file is damaged, or no round is over yet.
    """
    if (folder / COMPARISON).exists():
        cells = sorted(_cells(folder), key=lambda one: str(read_json(one / "environment.json", {}).get("started", "")))
        if not cells:
            raise ConfigError(f"{folder}: none of the comparison's runs is finished yet")
        folder = cells[0]
    config = read_config(folder)
    environment = read_json(folder / "environment.json", {})
    summary, members = read_summary(folder), read_members(folder)
    novel = {member.name for member in members.clients if config.is_novel(member.row)}
    with sound(folder):
        courses = [
            read_course(name, phase_folder(folder, config, name), summary.get(name), novel)
            for name in (config.strategy, *config.baselines)
        ]
        by_client = _read_clients(folder, novel, courses[0].metric)
        others, compared = _beside(folder, config, novel)
        gains = read_gains(folder)
    if not courses[0].rounds:
        raise ConfigError(f"{folder}: no round is over yet; there is nothing to report")
    known = [course for course in (*courses, *others) if course.rounds]
    events = list(read_lines(folder / EVENTS))
    running = is_running(folder)
    return RunData(folder, config, environment, known, *by_client, compared, members, events, running, gains)


def _cells(out: Path) -> Iterator[Path]:
    return (path.parent for path in sorted(out.glob(f"*/{CELL}")))


def _beside(folder: Path, config: RunConfig, novel: Set[str]) -> tuple[list[Course], str]:
    """Return the runs of the same comparison that differ in the strategy alone, and a sentence on them."""
    out = folder.resolve().parent
    if not (out / COMPARISON).exists():
        return [], ""
    others, own = [], {"strategy", "options", "init_from"}
    for cell in _cells(out):
        other = read_config(cell)
        alike = other.model_dump(exclude=own) == config.model_dump(exclude=own)
        if alike and other.strategy != config.strategy:
            others.append(read_course(other.strategy, cell, read_summary(cell).get(other.strategy), novel))
    return others, f"The other strategies are runs of the same comparison with seed {config.seed}." if others else ""


def _read_clients(
    folder: Path, novel: Set[str], metric: str
) -> tuple[dict[int, list[float]], dict[str, Standing], dict[int, int]]:
    """Return `spreads`, `left_out` and `left_out_in` of the run's own strategy."""
    scores, left_out, left_out_in = dict[int, list[float]](), dict[str, Standing](), dict[int, int]()
    for line in read_lines(folder / CLIENTS):
        number, client = line["round"], line["client"]
        if "refused" in line:
            left_out.setdefault(client, Standing()).leave_out(line)
            left_out_in[number] = left_out_in.get(number, 0) + 1
        elif client not in novel and (value := line.get(f"test_{metric}")) is not None:
            scores.setdefault(number, []).append(scale_of(metric).factor * value)
    spreads = {number: np.quantile(scores[number], (0, 0.25, 0.75, 1)).tolist() for number in sorted(scores)}
    return spreads, left_out, left_out_in
