"""A run's curves for TensorBoard: RUN/tensorboard/STRATEGY holds event files (`flower-server --tensorboard`)."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.metrics import scale_of
from hyperbloom.server.loop.listener import Listener, RoundReport
from hyperbloom.server.runs.lines import metrics_line

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from hyperbloom.strategies.algorithm import Algorithm


def check_tensorboard() -> None:
    """Raise a ConfigError if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "--tensorboard: expected the package tensorboard, which is not installed; install the extra: "
            "pip install 'hyperbloom[tensorboard]', or '.[tensorboard]' from the sources"
        )


CURVES = {
    "loss": "training/loss",
    "seconds": "round/seconds",
    "bytes_down": "round/bytes down",
    "bytes_up": "round/bytes up",
    "left_out": "round/left out",
}
"""Name of the curve for each key of a round's line."""


class TensorBoard(Listener):
    """Writes scalars per round, and the distribution of the selecting metric over clients per evaluation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"
        self._writer: SummaryWriter | None = None
        self._name = ""

    def phase(self, strategy: "Algorithm", name: str) -> None:
        """Begin a strategy's curves."""
        self.close()
        self._name = name

    def _open(self, number: int) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter

        place = self.folder / self._name
        # After a resume, make TensorBoard hide what came after the checkpoint.
        again = number if place.exists() else None
        return SummaryWriter(str(place), purge_step=again)

    def round_done(self, report: RoundReport) -> None:
        """Write a round's values. If no client reported a loss, its curve has no point."""
        self._writer = writer = self._writer or self._open(report.number)
        number, outcome = report.number, report.outcome
        if outcome.results or not outcome.evaluation:
            line = metrics_line(report) | {"left_out": len(outcome.refused)}
            for key, name in CURVES.items():
                if key in line:
                    writer.add_scalar(name, line[key], number)
        if outcome.evaluation:
            metric = outcome.evaluation.names[0]
            for name, value in outcome.evaluation.metrics().items():
                writer.add_scalar(f"{metric}/{name}", value, number)
            values = [result.test.value(metric) for result in outcome.evaluation.scores.values()]
            each = [scale_of(metric).factor * value for value in values if value is not None]
            if each:
                writer.add_histogram(f"{metric}/test over clients", np.array(each), number)
            writer.flush()

    def phase_done(self, strategy: "Algorithm") -> None:
        """End a strategy's curves."""
        self.close()

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer:
            self._writer.close()
            self._writer = None
