"""Does the federation pay for a client? Its gain over training alone, with an interval, and the sentence that says it.

The client chooses a model on its validation examples. Its gain is the difference of the metric on test examples to that
of the model trained alone, positive if the chosen one is better.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from hyperbloom.common.metrics import scale_of, title_of

ENDS = {
    "personal": "the federation's model",
    "tuned": "the federation's model, fine-tuned on its own examples",
    "common": "the federation's model for all",
    "common-tuned": "the federation's model for all, fine-tuned on its own examples",
    "alone": "a model trained alone",
}
PAIRS, SHARES = (("personal", "common"), ("personal", "tuned"), ("common", "common-tuned")), (0.25, 0.5, 0.75)
MIXTURES = {f"{a}+{b}:{share}": (a, b, share) for a, b in PAIRS for share in SHARES}
"""Mixtures of weights by name: `share` of the second model, and the rest of the first."""
MODELS = ENDS | {name: f"a mixture of {ENDS[a]} and {ENDS[b]}" for name, (a, b, _) in MIXTURES.items()}
"""The models that a client compares, with their names for people. Of equally good ones it takes the first."""

RESAMPLES = 1000
SURE = 1.5
"""Standard errors by which a model's validation loss is smaller, if it is surely better than one trained alone."""


@dataclass(frozen=True)
class Gain:
    """What `chosen` gains a client over training alone, in the metric's unit: on test examples, with a 95 % interval.

    `models` are those that were compared, and `test` is the metric of each on test examples.
    """

    chosen: str
    value: float
    low: float
    high: float
    models: tuple[str, ...]
    test: tuple[float, ...]


def interval(
    statistic: Callable[[np.ndarray], float], count: int, resamples: int = RESAMPLES, below: float = 0.025
) -> tuple[float, float]:
    """Return the bootstrap interval of a statistic of `count` examples, by default of 95 %.

    The statistic gets their numbers. A share `below` of its distribution lies under the interval, and as much above.
    Percentiles, expanded as in Hesterberg, What Teachers Should Know about the Bootstrap, The American Statistician
    2015, https://arxiv.org/abs/1411.5279: without it the interval of a few examples is too short.
    """
    from scipy.stats import DegenerateDataWarning, bootstrap, norm, t

    tail = norm.cdf(np.sqrt(count / (count - 1)) * t.ppf(below, count - 1))
    settings = {"vectorized": False, "n_resamples": resamples, "rng": 0, "method": "percentile", "batch": 10}
    with warnings.catch_warnings(action="ignore", category=DegenerateDataWarning):  # undefined for some resamples
        drawn = bootstrap((np.arange(count),), statistic, **settings).bootstrap_distribution
    low, high = np.nanquantile(drawn, (tail, 1 - tail))
    return float(low), float(high)


def share_interval(gains: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the mean of gains `(N,)`, 1 or -1 where one of two models alone is right, else 0.

    It has an example more on each side, by Bonett and Price, Adjusted Wald Confidence Interval for a Difference of
    Binomial Proportions Based on Paired Data, Journal of Educational and Behavioral Statistics 2012. A bootstrap is too
    short if two models differ on few examples: on none it is 0 to 0, though others may show a difference.
    """
    from scipy.stats import norm

    more = np.append(gains, (1.0, -1.0))
    mean, half = more.mean(), norm.ppf(0.975) * more.std() / np.sqrt(len(more))
    return max(-1.0, float(mean - half)), min(1.0, float(mean + half))


def mean_and_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Return the mean over clients and its 95 % interval by Student's t: over few clients a bootstrap is too short."""
    from scipy.stats import t

    count, mean = len(values), float(values.mean())
    half = float(t.ppf(0.975, count - 1) * values.std(ddof=1) / np.sqrt(count))
    return mean, mean - half, mean + half


def sentence(name: str, gain: Gain, metric: str) -> str:
    """Return the answer to whether the federation pays for a client."""
    if gain.chosen == "alone":
        return f"{name}: keep training alone; no model of the federation is surely better on the validation examples"
    rises = scale_of(metric).rises
    shown = f"{_shown((gain.value, gain.low, gain.high), metric)} with {MODELS[gain.chosen]}"
    if gain.low > 0:
        return f"{name} gains {shown}"
    if gain.high < 0:
        return f"{name}: train alone; the test examples show {'a gain of ' if rises else ''}{shown}"
    return f"{name}: no difference can be seen; it {'gains' if rises else 'has'} {shown}"


def of_all(gains: Iterable[Gain], metric: str) -> str:
    """Return the sentence on the mean over clients."""
    gains = list(gains)
    values = np.array([gain.value for gain in gains])
    better, lone = sum(one.low > 0 for one in gains), sum(one.chosen == "alone" for one in gains)
    if lone == len(gains):
        return "1 client keeps what it trained alone" if lone == 1 else f"{lone} clients keep what they trained alone"
    shown = _shown(mean_and_interval(values) if len(values) > 1 else (float(values.mean()),), metric)
    verbs = ("gains", "gain") if scale_of(metric).rises else ("has", "have")
    who = f"1 client {verbs[0]}" if len(gains) == 1 else f"{len(gains)} clients {verbs[1]}"
    apart = f"{better} better, {sum(one.high < 0 for one in gains)} worse; kept what was trained alone: {lone}"
    return f"{who} {shown} on average; each by its own 95 % interval: {apart}"


def _shown(values: tuple[float, ...], metric: str) -> str:
    scale = scale_of(metric)

    def cell(each: float) -> str:
        if scale.rises:
            return scale.cell(scale.factor * each)
        points = " points" if scale.percent else ""
        return f"{scale.cell(scale.factor * abs(each))}{points} {'lower' if each >= 0 else 'higher'}"

    value, *bounds = map(cell, values)
    within = f" ({' to '.join(bounds)})" if bounds else ""
    if scale.rises:
        return f"{value} {'points' if scale.percent else f'of {title_of(metric)}'}{within} over training alone"
    return f"a {value} {title_of(metric)}{within} than training alone"
