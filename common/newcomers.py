"""What may a newcomer expect? Clients that never trained tell: which model is best for them, and how good it is.

A newcomer gets the model for all, the one written from its descriptor, a mixture of their weights, or the model for all
of a baseline: what is best for novel clients on their validation examples. Their test examples tell what to expect.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hyperbloom.common.gains import mean_and_interval
from hyperbloom.common.metrics import scale_of, title_of

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the written model that are tried: 0 is the model for all."""
ENOUGH = 24
"""Training clients from which newcomers were at most a point behind FedAvg's model (docs/on-demand)."""
HALF = 0.5
"""The share with fewer of them, if nobody was held out: it was nowhere far behind either model."""


@dataclass(frozen=True)
class Expectation:
    """What a newcomer gets, and what clients that never trained have with each of `SHARES`.

    Attributes:
        trained: number of clients that train.
        held_out: number of clients that never trained.
        share: of the written model in what a newcomer gets.
        test: the mean of the selecting metric over held-out clients on test examples, by share; shares in percent.
        low: the 95 % interval of that mean for what a newcomer gets, by Student's t over clients, ends at `high`.
        val: the mean on validation examples for what a newcomer gets; None: not known.
        of: the baseline whose model for all it is; empty: the run's own strategy.
        compared: whether the novel clients have scored a baseline's model for all, too.
    """

    trained: int
    held_out: int
    share: float
    test: tuple[float, ...] = ()
    low: float = 0.0
    high: float = 0.0
    val: float | None = None
    of: str = ""
    compared: bool = False


def expect(
    val: Sequence[Sequence[float]], test: Sequence[Sequence[float]], trained: int, metric: str, of: str = ""
) -> Expectation:
    """Return what newcomers get and may expect; `val` and `test` hold the metric by share and held-out client.

    A baseline named `of` has one row, of the model for all. The share is the best one on validation examples, and of
    equally good ones the smallest. If nobody was held out, the number of clients that train decides.
    """
    scale, values = scale_of(metric), np.array(test)  # (shares, clients)
    if not values.size:
        return Expectation(trained, 0, 1.0 if trained >= ENOUGH else HALF)
    values, found = scale.factor * values, scale.factor * np.array(val).mean(1)
    best, count = int(np.argmax(scale.sign * found)), values.shape[1]
    chosen = values[best]
    _, *bounds = mean_and_interval(chosen) if count > 1 else (0.0, chosen[0], chosen[0])
    least = 0.0 if scale.percent or not scale.rises else -np.inf  # over two clients it may reach beyond any value
    low, high = np.clip(bounds, least, scale.factor * scale.most)
    means = tuple(values.mean(1).tolist())
    return Expectation(trained, count, SHARES[best], means, float(low), float(high), float(found[best]), of)


def best_of(found: Sequence[Expectation | None], metric: str) -> Expectation | None:
    """Return what newcomers get of a run's strategy, the first of `found`, or of a baseline if validation prefers it.

    None if that strategy has no models on demand.
    """
    if not found or found[0] is None or found[0].of:
        return None
    own = found[0]
    rivals = [each for each in found[1:] if each and each.of and each.val is not None and own.val is not None]
    best = max([own, *rivals], key=lambda each: scale_of(metric).sign * (each.val or 0.0))
    return replace(best, compared=bool(rivals))


def model_of(share: float) -> str:
    """Return the name of a model with a share of the written one."""
    if share in (0.0, 1.0):
        return "the model written from its descriptor" if share else "the model for all"
    return f"a mixture, {share:.0%} the model written from its descriptor and {1 - share:.0%} the model for all"


def says(expected: Expectation, metric: str) -> str:
    """Return a sentence for people: what a newcomer gets, what it may expect, and why."""
    share, scale, trained = expected.share, scale_of(metric), expected.trained
    few = f"; with fewer than {ENOUGH} clients that train (here {trained}) fedavg may have a better model for newcomers"
    few = few if trained < ENOUGH and not expected.compared else ""
    if not expected.held_out:
        text = (
            f"a newcomer gets {model_of(share)}, as {trained} clients train; what to expect is not known, as no client"
        )
        return f"{text} was held out{few}"
    found = dict(zip(SHARES, (scale.show(mean) for mean in expected.test), strict=False))
    bounds = f" ({scale.cell(expected.low)} to {scale.cell(expected.high)})" if expected.held_out > 1 else ""
    others = " and ".join(f"{found[one]} with {model_of(one)}" for one in (0.0, 1.0) if one != share and one in found)
    which = f"{model_of(share)}{f' of {expected.of}' if expected.of else ''}"
    text = f"a newcomer gets {which}, and may expect a test {title_of(metric)} of {found[share]}{bounds}"
    text = f"{text}, the mean over held-out clients (here {expected.held_out})"
    return f"{text}{f', who have {others}' if others else ''}{few}"
