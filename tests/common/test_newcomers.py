"""What a newcomer may expect: the choice, its figures, and the sentence."""

import pytest
from scipy.stats import sem, t

from hyperbloom.common.newcomers import ENOUGH, SHARES, Expectation, best_of, expect, says


def test_validation_chooses_and_test_examples_tell_what_to_expect() -> None:
    val = [[0.5, 0.5], [0.6, 0.6], [0.9, 0.5], [0.6, 0.6], [0.1, 0.9]]  # the third is best by its mean, 0.7
    test = [[0.9, 0.9], [0.8, 0.8], [0.5, 0.7], [0.4, 0.4], [0.2, 0.2]]
    found = expect(val, test, 20, "accuracy")
    assert (found.trained, found.held_out, found.share) == (20, 2, 0.5)
    assert found.test == pytest.approx((90, 80, 60, 40, 20))
    assert (found.low, found.high) == (0, 100), "two clients that differ by 20 points say nothing of a third"
    four = expect([[0.7] * 4] * 5, [[0.5, 0.6, 0.7, 0.8]] * 5, 20, "accuracy")
    assert (four.low, four.high) == pytest.approx(t.interval(0.95, 3, 65, scale=sem([50, 60, 70, 80])))


def test_of_equally_good_models_the_one_nearer_to_the_common_one_is_taken() -> None:
    assert expect([[0.5]] * 5, [[0.5]] * 5, 20, "accuracy").share == 0
    assert expect([[0.5], [0.7], [0.7], [0.7], [0.2]], [[0.5]] * 5, 20, "accuracy").share == 0.25


def test_an_error_is_better_if_it_is_smaller_and_is_no_share() -> None:
    found = expect([[5.0], [4.0], [3.0], [2.0], [1.0]], [[9.0], [8.0], [7.0], [6.0], [5.5]], 20, "rmse")
    assert (found.share, found.low, found.high) == (1.0, 5.5, 5.5)
    assert found.test == (9.0, 8.0, 7.0, 6.0, 5.5)
    assert expect([[1.0, 1.0]] * 5, [[1.0, 2.0]] * 5, 20, "rmse").low == 0, "no error is below 0"
    assert expect([[0.5, 0.5]] * 5, [[0.1, 0.9]] * 5, 20, "r2").high == 1, "no R2 is above 1"


@pytest.mark.parametrize(("trained", "share"), [(ENOUGH - 1, 0.5), (ENOUGH, 1.0)])
def test_if_nobody_was_held_out_the_number_of_clients_decides(trained: int, share: float) -> None:
    found = expect([], [], trained, "accuracy")
    assert found == Expectation(trained, 0, share)
    text = says(found, "accuracy")
    assert "what to expect is not known, as no client was held out" in text
    assert "the model written from its descriptor" in text and ("50% the model for all" in text) == (share == 0.5)
    assert f"{trained} clients" in text


@pytest.mark.parametrize(
    ("metric", "own", "rival", "of"),
    [
        ("accuracy", 80.0, 81.0, "fedavg"),
        ("accuracy", 80.0, 80.0, ""),  # of equally good ones the run's own
        ("rmse", 2.0, 1.0, "fedavg"),
        ("rmse", 1.0, 2.0, ""),
        ("accuracy", None, 81.0, ""),  # an earlier version: nothing to compare with
    ],
)
def test_a_baseline_must_be_better_on_validation_examples(
    metric: str, own: float | None, rival: float, of: str
) -> None:
    mine = Expectation(6, 2, 0.5, (1.0,) * 5, 0, 1, own)
    others = [
        Expectation(6, 2, 0.0, (2.0,), 0, 1, rival, "fedavg"),
        None,
        Expectation(6, 2, 1.0, (1.0,) * 5, 0, 1, 99.0),
    ]
    best = best_of([mine, *others], metric)
    assert best is not None and best.of == of and best.compared == (own is not None)
    assert best_of([mine], metric) == mine, "no baseline"
    assert best_of(others, metric) is None and best_of([], metric) is None, "no models on demand"


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.0, ["gets the model for all,", "49.4 % with the model written from its descriptor"]),
        (1.0, ["gets the model written from its descriptor,", "79.8 % with the model for all"]),
        (0.25, ["a mixture, 25% the model written", "79.8 % with the model for all and 49.4 % with the model written"]),
    ],
)
def test_the_sentence_says_which_model_what_to_expect_and_why(share: float, words: list[str]) -> None:
    test = (79.8, 80.1, 70.0, 60.0, 49.4)
    text = says(Expectation(6, 2, share, test, 61.5, 88.2), "accuracy")
    expected = f"a test accuracy of {test[SHARES.index(share)]:.1f} % (61.5 to 88.2)"
    for each in [*words, expected, "(here 2)", f"; with fewer than {ENOUGH} clients that train (here 6) fedavg may"]:
        assert each in text
    alone = says(Expectation(ENOUGH, 1, share, test, 61.5, 61.5), "accuracy")
    assert " to " not in alone and "fewer" not in alone
