"""The lines that a run folder grows by, written and read; light, so that who only reads them need not wait for torch.

RUN/metrics.jsonl and RUN/clients.jsonl are the strategy's, RUN/baselines/NAME/ has a baseline's, RUN/events.jsonl is
of the run. Lines are whole; a run that is resumed cuts the first two back to its checkpoint.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hyperbloom.common.config import RunConfig

if TYPE_CHECKING:
    from hyperbloom.server.loop.listener import RoundReport

__all__ = ["CLIENTS", "EVENTS", "METRICS", "Line", "Tail", "client_lines", "metrics_line", "phase_folder", "read_lines"]

METRICS, CLIENTS, EVENTS = "metrics.jsonl", "clients.jsonl", "events.jsonl"

Line = dict[str, Any]


def phase_folder(run: Path, config: RunConfig, name: str) -> Path:
    """Return where the lines of the run's strategy, or of a baseline, are."""
    return run if name == config.strategy else run / "baselines" / name


def metrics_line(report: "RoundReport") -> Line:
    """Return a round's line: loss, clients, seconds, bytes of training; accuracy in percent where it was evaluated.

    Where no client told its loss there is none.
    """
    outcome = report.outcome
    line: Line = {"round": report.number, "seconds": round(report.seconds, 4), "clients": len(outcome.results)}
    line["elapsed"] = round(report.elapsed, 4)
    line |= {"bytes_down": report.bytes_down, "bytes_up": report.bytes_up}
    losses = [result.loss for result in outcome.results.values() if result.loss is not None]
    if losses:
        line["loss"] = sum(losses) / len(losses)
    counted = {"late": report.late, "lied": len(outcome.lied), "quarantined": outcome.quarantined}
    line |= {key: value for key, value in counted.items() if value}
    if outcome.staleness:
        line |= {"staleness_mean": fmean(outcome.staleness), "staleness_max": max(outcome.staleness)}
    return line | (outcome.evaluation.metrics() if outcome.evaluation else {})


def client_lines(report: "RoundReport", summed: bool = False) -> list[Line]:
    """Return a line for each client that trained, was scored or was left out in a round.

    With `summed` only the mean of the losses is known, which is no client's.
    """
    outcome, lines = report.outcome, []
    for name, result in outcome.results.items():
        told: Line = {} if summed or result.loss is None else {"loss": result.loss}
        lines.append({"round": report.number, "client": name, **told, "seconds": round(result.seconds, 4)})
    for name, score in outcome.evaluation.scores.items() if outcome.evaluation else ():
        flat = {f"{split}_{key}": value for split, part in vars(score).items() for key, value in vars(part).items()}
        lines.append({"round": report.number, "client": name, **flat})
    for name, why in outcome.refused.items():
        blame: Line = {"lied": True} if name in outcome.lied else {}
        if name in outcome.quarantined:
            blame["quarantined_until"] = outcome.quarantined[name]
        lines.append({"round": report.number, "client": name, "refused": why.text, "reason": why.reason, **blame})
    return lines


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the whole lines of a file; none of one that is not there. A line that is no JSON object is left out."""
    yield from Tail(path).read()


class Tail:
    """Reads what a file has grown by.

    Args:
        path: the file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        """Read nothing yet."""
        self.path = path
        self._place = 0
        self.cut = False
        """Whether the file has become shorter since it was last read: it is read from its start again."""

    def read(self) -> list[Line]:
        """Return the whole lines that are new."""
        self.cut = False
        try:
            size = self.path.stat().st_size
            if size < self._place:
                self._place, self.cut = 0, True
            if size == self._place:
                return []
            with self.path.open("rb") as file:
                file.seek(self._place)
                content = file.read()
        except FileNotFoundError:
            self.cut, self._place = self._place > 0, 0
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._place += len(whole)
        return [line for text in whole.splitlines() if (line := _parse(text)) is not None]


def _parse(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
