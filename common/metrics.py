"""How figures are shown and compared: the unit of each metric, and whether more of it is better. Without torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


def figure(value: float) -> str:
    """Return a number with four digits: 0.5000, 54.32; all of them before the point if these are more: 58,440."""
    return f"{value:z,.0f}" if 999.95 <= abs(value) < 1e12 else f"{value:z#.4g}"


@dataclass(frozen=True)
class Scale:
    """The scale of a metric.

    Attributes:
        percent: whether it is shown in percent: a share from 0 to 1 times 100.
        rises: whether more is better.
        most: the largest possible value.
    """

    percent: bool = False
    rises: bool = True
    most: float = math.inf

    @property
    def sign(self) -> int:
        """1 if more is better, else -1."""
        return 1 if self.rises else -1

    @property
    def factor(self) -> float:
        """What a value of the metric is multiplied with in files and on screens."""
        return 100.0 if self.percent else 1.0

    def show(self, value: float) -> str:
        """Return a value, already in its unit, as text."""
        return self.cell(value) + (" %" if self.percent else "")

    def cell(self, value: float, decimals: int = 1) -> str:
        """Return a value, already in its unit, for a table whose head names the unit; percent has these decimals."""
        return f"{value:z.{decimals}f}" if self.percent else figure(value)

    def longest(self, values: Iterable[float]) -> float:
        """Return what the longest of bars stands for: 100 percent, or the largest value."""
        return 100.0 if self.percent else max(map(abs, values), default=0.0) or 1.0

    def worst(self, values: Iterable[float]) -> float:
        """Return the worst of some values."""
        return min(values) if self.rises else max(values)

    def best(self, values: Iterable[float]) -> float:
        """Return the best of some values."""
        return max(values) if self.rises else min(values)


_SHARE, _ERROR = Scale(percent=True, most=1.0), Scale(rises=False)
_SCALES = {
    **dict.fromkeys(("accuracy", "balanced-accuracy", "macro-f1", "auroc", "average-precision", "dice", "iou"), _SHARE),
    "calibration-error": Scale(percent=True, rises=False, most=1.0),
    **dict.fromkeys(("mae", "rmse"), _ERROR),
    "r2": Scale(most=1.0),
}
_TITLES = {"dice": "Dice", "iou": "IoU", "macro-f1": "macro-F1"}
_TITLES |= {name: name.upper() for name in ("auroc", "mae", "r2", "rmse")}


def scale_of(metric: str) -> Scale:
    """Return the scale of a metric by name. Metrics of users' own tasks are plain numbers, and more is better."""
    return _SCALES.get(metric.partition("/")[0], Scale())


def title_of(metric: str) -> str:
    """Return a metric's name for people."""
    return "/".join(_TITLES.get(part, part.replace("-", " ")) for part in metric.split("/"))  # auroc/3: that of label 3


def axis_of(metric: str) -> str:
    """Return the label of an axis with a metric on test examples."""
    return f"test {title_of(metric)}{', %' if scale_of(metric).percent else ''}"
