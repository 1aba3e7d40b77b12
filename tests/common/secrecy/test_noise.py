"""Clipping, noise and the accountant, each against something that is known otherwise."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import brentq
from torch import Tensor

from hyperbloom.common.config import PrivacyConfig
from hyperbloom.common.errors import WireError
from hyperbloom.common.secrecy.noise import (
    add_noise,
    clip_norm,
    delta_of,
    epsilon_of,
    noise,
    noisy_mean,
    promise,
    release,
)


def zeros(count: int) -> bytes:
    """Return random bytes of which noise is `sqrt(-2 log 1) = 0`."""
    return bytes(count)


def counted(seed: int) -> Callable[[int], bytes]:
    """Return a source that a test can repeat."""
    generator = torch.Generator().manual_seed(seed)
    return lambda count: torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).numpy().tobytes()


def closed_form(mu: float, delta: float) -> float:
    """Return epsilon of a Gaussian mechanism by Balle and Wang's theorem 8, solved by another library."""

    def gap(epsilon: float) -> float:
        first = stats.norm.logcdf(mu / 2 - epsilon / mu)
        second = stats.norm.logcdf(-mu / 2 - epsilon / mu)
        return float(-math.exp(first) * math.expm1(epsilon + second - first)) - delta

    return float(brentq(gap, 0, mu * mu + 50 * mu, xtol=1e-13))


# ---------------------------------------------------------------------- clipping


@settings(deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_a_clipped_change_has_the_norm_and_the_direction(values: list[float], norm: float) -> None:
    change = torch.tensor(values)
    exact, clipped = change.double(), clip_norm(change, norm)
    size = float(exact.norm())
    assert float(clipped.norm()) <= norm
    if size <= norm:
        assert torch.equal(clipped, exact)
    else:
        torch.testing.assert_close(clipped, exact / size * norm, rtol=1e-11, atol=0)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_is_not_clipped_to_something(bad: float) -> None:
    with pytest.raises(WireError, match="not finite"):
        release(torch.tensor([1.0, bad]), 1.0, 1.0)


# ---------------------------------------------------------------------- noise


def test_noise_is_standard_normal_and_scaled() -> None:
    drawn = torch.from_numpy(noise(200_000, counted(1)))
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-3
    change = torch.full((300_000,), 3e-3)  # norm 1.6, clipped to 0.5; more numbers than are drawn at a time
    sent = release(change, 0.5, 4.0, counted(2)).double()
    rest = sent - clip_norm(change, 0.5)
    assert float(rest.std()) == pytest.approx(2.0, rel=0.01)
    assert float(rest.mean()) == pytest.approx(0.0, abs=0.02)
    assert abs(float(torch.corrcoef(torch.stack([rest[:-1], rest[1:]]))[0, 1])) < 0.01


def test_two_releases_differ_though_nothing_else_does() -> None:
    """Whoever knows the state of a generator cannot subtract the noise."""
    change, drawn = torch.ones(8), list[Tensor]()
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        drawn += [release(change, 1.0, 1.0), noisy_mean([change], 1.0, 1.0, 1), torch.from_numpy(noise(8))]
        drawn.append(add_noise(change.double(), 1.0))
    assert not [one for one, other in zip(drawn[:4], drawn[4:], strict=True) if torch.equal(one, other)]
    assert torch.equal(release(change, 1.0, 1.0, zeros), clip_norm(change, 1.0).float())
    assert add_noise(torch.empty(0, dtype=torch.float64), 1.0).shape == (0,)


def test_a_number_is_made_of_four_whose_low_bits_hide_each_other() -> None:
    asked: list[int] = []

    def source(count: int) -> bytes:
        asked.append(count)
        return counted(3)(count)

    found = noise(5, source)
    assert asked == [5 * 4 * 16]
    raw = np.frombuffer(counted(3)(5 * 4 * 16), np.uint64).reshape(2, 4, 5)
    radius, angle = ((part >> np.uint64(11)) / 2.0**53 for part in raw)
    expected = (np.sqrt(-2 * np.log(1 - radius)) * np.cos(2 * np.pi * angle)).sum(0) / 2
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)  # to the last of 53 bits


def test_a_noisy_mean_is_of_as_many_as_were_to_be_asked() -> None:
    changes = [torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.5])]
    found = noisy_mean(changes, 1.0, 2.0, 4, zeros)
    torch.testing.assert_close(found, torch.tensor([0.6, 0.8 + 0.5]) / 4)
    many = torch.stack([noisy_mean([torch.zeros(1000)], 0.5, 3.0, 4, counted(seed)) for seed in range(50)])
    assert float(many.std()) == pytest.approx(3.0 * 0.5 / 4, rel=0.02)  # once for the sum, not once for each


# ---------------------------------------------------------------------- the accountant


@pytest.mark.parametrize("multiplier", [0.3, 1.0, 4.0, 50.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_one_release_costs_what_the_analytic_gaussian_mechanism_says(multiplier: float, delta: float) -> None:
    # Two clipped changes are twice the norm apart.
    assert epsilon_of([multiplier], delta) == pytest.approx(closed_form(2 / multiplier, delta), rel=1e-6)


@pytest.mark.parametrize("times", [2, 9, 400])
def test_many_releases_cost_as_much_as_one_with_less_noise(times: int) -> None:
    assert epsilon_of([12.0] * times, 1e-5) == pytest.approx(closed_form(2 * math.sqrt(times) / 12, 1e-5), rel=1e-6)
    assert epsilon_of([12.0] * times, 1e-5) == pytest.approx(epsilon_of([12.0 / math.sqrt(times)], 1e-5))
    assert epsilon_of([3.0, 4.0], 1e-5) == pytest.approx(epsilon_of([2.4], 1e-5))  # 1/9 + 1/16 = 1/2.4^2
    assert epsilon_of([], 1e-5) == epsilon_of([1e4], 1e-3) == 0


def test_the_library_composes_in_its_own_way_to_the_same() -> None:
    accounting = pytest.importorskip("dp_accounting")
    accountant = accounting.pld.PLDAccountant(accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(accounting.GaussianDpEvent(10.0), 6)  # half of our multiplier: two changes are twice apart
    found = epsilon_of([20.0] * 6, 1e-5)
    assert found <= accountant.get_epsilon(1e-5) <= found * 1.01  # its grid rounds up


def test_epsilon_is_never_too_small() -> None:
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

    for mu in (0.01, 0.5, 3.0, 60.0):
        epsilon = epsilon_of([2 / mu], 1e-5)
        assert GaussianPrivacyLoss(1 / mu).get_delta_for_epsilon(epsilon) <= 1e-5 * (1 + 1e-9)
        assert delta_of(epsilon, 1 / mu) <= 1e-5 < delta_of(epsilon * (1 - 1e-11), 1 / mu), "rounded up, and hardly"


@pytest.mark.parametrize(("noise", "tell"), [(30.0, "hardly tell"), (2.0, "may tell")])
def test_the_promise_claims_no_more_than_epsilon_allows(noise: float, tell: str) -> None:
    assert f"the changes that it sent {tell} whether" in promise(PrivacyConfig(where="client", noise=noise), 4)[0]


def test_the_promise_says_who_is_trusted() -> None:
    client = promise(PrivacyConfig(where="client", noise=20.0), 4)
    server = promise(PrivacyConfig(where="server", noise=20.0), 4)
    assert f"({epsilon_of([20.0] * 4, 1e-5):.4g}, 1e-05)-differential privacy" in client[0] == server[0]
    assert "against the server, too" in client[1] and "against the server, too" not in server[1]
    assert "the server, which sees each change" in server[1]
    assert "no amplification" in client[2]
