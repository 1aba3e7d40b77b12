"""Intervals hold as often as they say, and sentences say what the numbers are."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy.stats import multinomial, norm, sem, t

from hyperbloom.common.errors import WireError
from hyperbloom.common.gains import Gain, interval, of_all, sentence, share_interval
from hyperbloom.common.wire.orders import CompareResult, SplitScore
from tests.slow import quick


@pytest.mark.parametrize("count", quick([40, 150], 150))
def test_intervals_cover_the_truth_in_93_to_97_of_100_cases(count: int) -> None:
    """Paired answers: both models are right on 70 percent, the first alone on 15, the second alone on 8."""
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(300):
        gains = generator.choice([0.0, 1.0, -1.0], count, p=[0.77, 0.15, 0.08])
        low, high = interval(lambda rows, gains=gains: float(gains[rows].mean()), count, 250)
        covered += low <= 0.07 <= high
    assert 0.93 <= covered / 300 <= 0.97


@pytest.mark.parametrize("count", [12, 20, 40])
def test_intervals_of_accuracy_hold_the_truth_on_few_examples_that_two_models_answer_alike(count: int) -> None:
    """The chance of each number of examples that one alone has right is exact; of a bootstrap it falls to 39 in 100."""
    for first, second in [(0.15, 0.08), (0.10, 0.05), (0.06, 0.03), (0.04, 0.02), (0.2, 0.2), (0.3, 0.05)]:
        covered = 0.0
        for mine, other in product(range(count + 1), repeat=2):
            if mine + other <= count:
                low, high = share_interval(np.repeat([1.0, -1.0, 0.0], [mine, other, count - mine - other]))
                chance = multinomial.pmf(
                    [mine, other, count - mine - other], count, [first, second, 1 - first - second]
                )
                covered += chance * (low <= first - second <= high)
        assert covered >= 0.94, (first, second)
        assert covered <= 0.98 or count * (first + second) < 6, (first, second)


def test_a_bootstrap_of_few_examples_that_two_models_answer_alike_is_too_short() -> None:
    """Why accuracy has an interval of its own: 39 of 100 hold the truth, as docs/pays.md says."""
    generator, covered = np.random.default_rng(0), 0
    for _ in range(300):
        gains = generator.choice([0.0, 1.0, -1.0], 12, p=[0.94, 0.04, 0.02])
        low, high = interval(lambda rows, gains=gains: float(gains[rows].mean()), 12, 100)
        covered += low <= 0.02 <= high
    assert 0.33 <= covered / 300 <= 0.45


def test_an_interval_of_accuracy_is_that_of_the_publication() -> None:
    """By the counts of examples that one model alone has right."""
    mine, other, count = 14, 4, 80
    p, q = (mine + 1) / (count + 2), (other + 1) / (count + 2)
    half = 1.959964 * math.sqrt((p + q - (p - q) ** 2) / (count + 2))
    gains = np.repeat([1.0, -1.0, 0.0], [mine, other, count - mine - other])
    assert share_interval(gains) == pytest.approx((p - q - half, p - q + half))
    assert share_interval(np.ones(3)) == (pytest.approx(0.6 - 1.959964 * math.sqrt(0.64 / 5)), 1.0)


def test_intervals_over_a_few_clients_are_wider_than_plain_percentiles() -> None:
    """The truth lies in 93 to 97 of 100 intervals for eight clients; of plain percentiles it does in fewer."""
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        gains = generator.normal(1.0, 2.0, 8)
        low, high = interval(lambda rows, gains=gains: float(gains[rows].mean()), 8, 250)
        covered += low <= 1.0 <= high
    assert 0.93 <= covered / 300 <= 0.97


def test_intervals_hold_the_truth_after_a_choice_among_many_models() -> None:
    """Of 14 models the best on 40 validation examples is chosen; others than these make the interval."""
    generator, covered = np.random.default_rng(2), 0
    for _ in range(300):
        better = generator.uniform(0.05, 0.2, 14)  # share of examples on which each alone is right; on 10 % it is wrong
        val, test = ((draws < better[:, None]) * 1.0 - (draws > 0.9) for draws in generator.uniform(size=(2, 14, 40)))
        best = int(val.mean(1).argmax())
        low, high = interval(lambda rows, gains=test[best]: float(gains[rows].mean()), 40, 250)
        covered += low <= better[best] - 0.1 <= high
    assert 0.93 <= covered / 300 <= 0.97


def test_an_interval_of_a_mean_is_as_long_as_students() -> None:
    """A plain bootstrap of eight values makes it too short: by sqrt(7 / 8), and by a normal quantile."""
    values = norm.ppf((np.arange(8) + 0.5) / 8)
    low, high = interval(lambda rows: float(values[rows].mean()), 8, 10_000, 0.1)
    assert (high - low) / 2 == pytest.approx(-t.ppf(0.1, 7) * sem(values), rel=0.03)


def test_a_statistic_that_some_resamples_do_not_define_has_an_interval() -> None:
    low, high = interval(lambda rows: float("nan") if rows[0] == 0 else float(rows.mean()), 20, 200)
    assert low < 9.5 < high


def gain(chosen: str = "personal", value: float = 0.031, low: float = 0.012, high: float = 0.05) -> Gain:
    return Gain(chosen, value, low, high, ("personal", "tuned", "alone"), (0.9, 0.8, 0.869))


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (gain(), "ward-7 gains 3.1 points (1.2 to 5.0) over training alone with the federation's model"),
        (
            gain("tuned", 0.01, -0.02, 0.04),
            (
                "ward-7: no difference can be seen; it gains 1.0 points (-2.0 to 4.0) over training alone with the "
                "federation's model, fine-tuned on its own examples"
            ),
        ),
        (
            gain(value=-0.03, low=-0.05, high=-0.01),
            "ward-7: train alone; the test examples show a gain of -3.0 points",
        ),
        (
            gain(value=0.0, low=-0.0001, high=0.0001),
            "ward-7: no difference can be seen; it gains 0.0 points (0.0 to 0.0)",
        ),
        # An interval of few examples is cut at 0, and then shows nothing.
        (gain(low=0.0), "ward-7: no difference can be seen; it gains 3.1 points (0.0 to 5.0)"),
        (gain(value=-0.03, low=-0.05, high=0.0), "ward-7: no difference can be seen; it gains -3.0 points (-5.0 to "),
        (gain("alone", 0.0, 0.0, 0.0), "ward-7: keep training alone; no model of the federation is surely better"),
    ],
)
def test_the_answer_in_a_sentence(told: Gain, says: str) -> None:
    assert sentence("ward-7", told, "accuracy").startswith(says)


def test_the_answer_of_other_metrics_has_their_unit() -> None:
    told = Gain("common", 0.5, 0.25, 0.75, ("personal", "common", "alone"), (2.0, 1.5, 2.0))
    assert "gains 0.5000 of R2 (0.2500 to 0.7500) over training alone" in sentence("ward-7", told, "r2")


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        (
            (0.5, 0.25, 0.75),
            "ward-7 gains a 0.5000 lower RMSE (0.2500 lower to 0.7500 lower) than training alone with",
        ),
        (
            (-0.5, -2, 1),
            "ward-7: no difference can be seen; it has a 0.5000 higher RMSE (2.000 higher to 1.000 lower) than",
        ),
        (
            (-0.5, -2, -0.1),
            "ward-7: train alone; the test examples show a 0.5000 higher RMSE (2.000 higher to 0.1000 higher) than",
        ),
    ],
)
def test_of_what_falls_it_is_said_whether_it_is_lower_or_higher(bounds: tuple[float, float, float], says: str) -> None:
    """A gain of -0.5 of an error could be read either way."""
    told = Gain("personal", *bounds, ("personal", "alone"), (2.0, 1.5))
    assert sentence("ward-7", told, "rmse").startswith(says)
    points = sentence(
        "ward-7", Gain("personal", *(x / 10 for x in bounds), told.models, told.test), "calibration-error"
    )
    assert f"a 5.0 points {'lower' if bounds[0] > 0 else 'higher'} calibration error (" in points
    mean = of_all([told, told], "rmse")
    assert mean.startswith(f"2 clients have a 0.5000 {'lower' if bounds[0] > 0 else 'higher'} RMSE (")


def test_an_interval_that_ends_at_zero_counts_as_neither_better_nor_worse() -> None:
    told = [gain(low=0.0), gain(value=-0.03, low=-0.05, high=0.0)]
    assert ": 0 better, 0 worse; kept what was trained alone: 0" in of_all(told, "accuracy")


def test_the_mean_over_clients_has_an_interval_and_counts_who_gains() -> None:
    gains = {f"ward-{i}": gain(value=value) for i, value in enumerate([0.01, 0.02, 0.03, 0.06])}
    gains["ward-4"] = gain("alone", 0.0, 0.0, 0.0)
    text = of_all(gains.values(), "accuracy")
    assert text.startswith("5 clients gain 2.4 points (")
    assert text.endswith(
        " on average; each by its own 95 % interval: 4 better, 0 worse; kept what was trained alone: 1"
    )
    gains["ward-5"] = gain(value=-0.03, low=-0.05, high=-0.01)
    assert of_all(gains.values(), "accuracy").endswith(": 4 better, 1 worse; kept what was trained alone: 1")
    alone = of_all([gain()], "accuracy")
    assert alone.startswith("1 client gains 3.1 points over") and " (" not in alone
    lone = gain("alone", 0.0, 0.0, 0.0)
    assert of_all([lone] * 3, "accuracy") == "3 clients keep what they trained alone"
    assert of_all([lone], "accuracy") == "1 client keeps what it trained alone"


@pytest.mark.parametrize(
    "told",
    [
        Gain("common", 0.0, 0.0, 0.0, ("personal", "alone"), (0.5, 0.5)),
        Gain("alone", 0.0, 0.0, 0.0, ("alone", "alone"), (0.5, 0.5)),
        Gain("personal", 0.0, 0.0, 0.0, ("personal",), (0.5,)),
        Gain("personal", 0.0, 1.0, 0.0, ("personal", "alone"), (0.5, 0.5)),
        Gain("personal", 0.0, 0.0, 0.0, ("personal", "alone"), (0.5,)),
        Gain("personal", 0.0, 0.0, 0.0, ("personal", "alone", "best"), (0.5, 0.5, 0.5)),
    ],
)
def test_what_no_honest_client_says(told: Gain) -> None:
    score = SplitScore(4, 0.5, ("accuracy",), (0.5,))
    CompareResult(score, score, gain=gain()).check()
    with pytest.raises(WireError, match="gain: expected a value for each model"):
        CompareResult(score, score, gain=told).check()
    with pytest.raises(WireError, match="val: expected examples"):
        CompareResult(replace(score, total=0), score, gain=gain()).check()
