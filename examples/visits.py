"""A task of your own: how often something happens, such as visits, learned by the Poisson deviance.

    [project.entry-points."hyperbloom.tasks"]
    visits = "visits:Visits"

Install it on the server and on every client (docs/own-strategy.md); a server cannot make a client import anything else.

    flower-server --engine inline --data visits.npz --set task=visits

The counts are stored as floats: `np.savez("visits.npz", x=x, y=counts.astype("float32"))`. With y the count and o the
network's output, the rate is exp(o), and the deviance  2 (y log y - y o - y + exp(o)).
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from hyperbloom.common.errors import DataError
from hyperbloom.common.tasks import Metric, Regression


class Visits(Regression):
    """Counts (N,) from 0, by the Poisson deviance."""

    metrics: ClassVar[Mapping[str, Metric]] = {"mae": Regression.metrics["mae"], "rmse": Regression.metrics["rmse"]}
    usual: ClassVar[int] = 2
    standardises: ClassVar[bool] = False

    def check(self, labels: Tensor, outputs: int) -> None:
        super().check(labels, outputs)
        if len(labels) and float(labels.min()) < 0:
            raise DataError(f"visits: expected counts from 0, found {float(labels.min()):g}")

    def losses(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, None]:
        counts = labels.view_as(outputs)
        return 2 * (torch.xlogy(counts, counts) - counts * outputs - counts + outputs.exp()), None

    def answers(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def describe(self, names: Sequence[str]) -> str:
        return f"the logarithms of {len(names)} rates: {', '.join(names)}"
