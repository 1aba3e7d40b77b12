"""The lines with which a run folder grows, written and read. Readers of lines need not import torch.

RUN/metrics.jsonl and RUN/clients.jsonl belong to the strategy, RUN/baselines/NAME/ to a baseline, and RUN/events.jsonl
to the run. Lines are whole. A resumed run cuts the first two files back to its checkpoint.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import attempt
from hyperbloom.common.gains import Gain
from hyperbloom.server.runs.recorded import sound

if TYPE_CHECKING:
    from hyperbloom.server.loop.listener import RoundReport

METRICS, CLIENTS, EVENTS, GAINS = "metrics.jsonl", "clients.jsonl", "events.jsonl", "gains.jsonl"
REPORT, ADVICE = "report.html", "advice.json"
COMPARISON, CELL = "comparison.yaml", "cell.json"  # of `compare`: beside all its runs, and in each finished one

Line = dict[str, Any]


def phase_folder(run: Path, config: RunConfig, name: str) -> Path:
    """Return the folder with the lines of the run's strategy, or of a baseline."""
    return run if name == config.strategy else run / "baselines" / name


def metrics_line(report: "RoundReport") -> Line:
    """Return a round's line: loss, clients, seconds, bytes of training, and accuracy in percent if it was evaluated.

    There is no loss if no client reported one.
    """
    outcome = report.outcome
    line: Line = {"round": report.number, "seconds": round(report.seconds, 4), "clients": len(outcome.results)}
    line["elapsed"] = round(report.elapsed, 4)
    line |= {"bytes_down": report.bytes_down, "bytes_up": report.bytes_up}
    losses = [result.loss for result in outcome.results.values() if result.loss is not None]
    if losses:
        line["loss"] = sum(losses) / len(losses)
    if report.asked > len(outcome.results):
        line["asked"] = report.asked
    counted = {"late": report.late, "lied": len(outcome.lied), "quarantined": outcome.quarantined}
    counted["left_out"] = len(outcome.refused)
    line |= {key: value for key, value in counted.items() if value}
    if outcome.staleness:
        line |= {"staleness_mean": fmean(outcome.staleness), "staleness_max": max(outcome.staleness)}
    evaluation = outcome.evaluation
    return line | ({"metric": evaluation.names[0], **evaluation.metrics()} if evaluation else {})


def asked(line: Line) -> int:
    """Return how many clients were asked to train in a round, those that were left out included."""
    return int(line.get("asked") or line["clients"])


def client_lines(report: "RoundReport", summed: bool = False) -> list[Line]:
    """Return a line for each client that trained, was scored or was left out in a round.

    With `summed`, only the mean of the losses is known, so the clients' lines have none.
    """
    outcome, lines = report.outcome, []
    for name, result in outcome.results.items():
        told: Line = {} if summed or result.loss is None else {"loss": result.loss}
        lines.append({"round": report.number, "client": name, **told, "seconds": round(result.seconds, 4)})
    for name, score in outcome.evaluation.scores.items() if outcome.evaluation else ():
        flat: Line = {}
        for split, part in vars(score).items():
            values = dict(zip(part.metrics, part.values, strict=True)) | {"total": part.total, "loss": part.loss}
            flat |= {f"{split}_{key}": value for key, value in values.items()}
        lines.append({"round": report.number, "client": name, **flat})
    for name, why in outcome.refused.items():
        blame: Line = {"lied": True} if why.reason.is_lie else {}
        if name in outcome.quarantined:
            blame["quarantined_until"] = outcome.quarantined[name]
        lines.append({"round": report.number, "client": name, "refused": why.text, "reason": why.reason, **blame})
    return lines


def read_lines(path: Path) -> Iterator[Line]:
    """Yield a file's whole lines, none if it does not exist. Lines that are no JSON object are skipped."""
    yield from Tail(path).read()


def read_gains(run: Path, number: int | None = None) -> dict[str, tuple[str, Gain]]:
    """Return what the federation gains each client that has told, in a sentence and in numbers.

    With `number`, only what was told of the models of that round: in the middle of a run others may have been compared.
    """
    lines = (line for line in read_lines(run / GAINS) if number in (None, line.get("round", number)))
    with sound(run / GAINS):
        return {line["client"]: (str(line["says"]), Gain(**line["gain"])) for line in lines}


class Tail:
    """Reads the growth of a file, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = 0
        self.cut = False
        """Whether the file was shorter at the last reading, which then started at its beginning again."""

    @property
    def unread(self) -> int:
        """Return the number of bytes that wait to be read."""
        try:
            return max(0, self.path.stat().st_size - self._place)
        except FileNotFoundError:
            return 0

    def read(self, most: int = -1) -> list[Line]:
        """Return the new whole lines, of at most `most` bytes."""
        self.cut = False
        try:
            size = self.path.stat().st_size
            if size < self._place:
                self._place, self.cut = 0, True
            if size == self._place:
                return []
            with self.path.open("rb") as file:
                file.seek(self._place)
                content = file.read(most)
        except FileNotFoundError:
            self.cut, self._place = self._place > 0, 0
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._place += len(whole)
        return [line for text in whole.splitlines() if isinstance(line := attempt(json.loads, text), dict)]
