"""The Gaussian mechanism against its definition, the noise against its distribution, the ledger against itself."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from hyperbloom.client.newcomer.guarantee import Guarantee, Promise, guarantee, noise_scale, privatise
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.secrecy.noise import delta_of, noise


class Mean:
    """The simplest encoder with a bound: `A mean(x)` of vectors on the unit sphere."""

    def __init__(self) -> None:
        self.matrix = torch.tensor([[3.0, 1.0], [0.5, -2.0], [1.0, 0.0]])

    def __call__(self, examples: torch.Tensor) -> torch.Tensor:
        return self.matrix @ torch.nn.functional.normalize(examples, dim=1).mean(0)

    def sensitivity(self, examples: int) -> float:
        return 2 * float(torch.linalg.matrix_norm(self.matrix, 2)) / examples


class Unbounded(Mean):
    def sensitivity(self, examples: int) -> float:
        raise ConfigError("no bound holds for this encoder")


def seeded(seed: int = 0):  # type: ignore[no-untyped-def]
    return np.random.default_rng(seed).bytes


def hockey_stick(epsilon: float, sigma: float) -> float:
    """Return the integral of max(0, p - e^epsilon q) for p = N(1, sigma^2), q = N(0, sigma^2): the definition."""
    # p > e^epsilon q exactly right of this point
    start = sigma**2 * epsilon + 0.5

    def excess(x: float) -> float:
        return float(stats.norm.pdf(x, 1, sigma) - math.exp(epsilon) * stats.norm.pdf(x, 0, sigma))

    return float(integrate.quad(excess, start, start + 40 * sigma, epsabs=1e-14, epsrel=1e-10, limit=500)[0])


# ---------------------------------------------------------------------- how much noise


@pytest.mark.parametrize("epsilon", [0.05, 0.3, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("sigma", [0.2, 0.7, 2.0, 10.0])
def test_delta_is_the_hockey_stick_divergence_of_two_gaussians(epsilon: float, sigma: float) -> None:
    assert delta_of(epsilon, sigma) == pytest.approx(hockey_stick(epsilon, sigma), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("epsilon", [0.01, 0.3, 0.999, 1.0, 8.0, 60.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.01, 0.5])
def test_the_analytic_noise_is_the_smallest_that_suffices(epsilon: float, delta: float) -> None:
    sigma = noise_scale(epsilon, delta)
    assert delta_of(epsilon, sigma) <= delta
    assert delta_of(epsilon, sigma * (1 - 1e-6)) > delta


def test_the_papers_formula_wastes_noise_below_one_and_fails_beyond() -> None:
    def classical(epsilon: float) -> float:
        return math.sqrt(2 * math.log(1.25 / 0.01)) / epsilon

    assert classical(0.3) / noise_scale(0.3, 0.01) == pytest.approx(2.27, abs=0.005)
    assert delta_of(8.0, classical(8.0)) == pytest.approx(0.0178, abs=5e-5)


@pytest.mark.parametrize(
    ("epsilon", "delta", "error"),
    [
        (0.0, 0.01, "--eps"),
        (float("inf"), 0.01, "--eps"),
        (float("nan"), 0.01, "--eps"),
        (0.3, 0.0, "--delta"),
        (0.3, 1.0, "--delta"),
    ],
)
def test_impossible_promises_are_refused(epsilon: float, delta: float, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        noise_scale(epsilon, delta)


def test_an_encoder_without_a_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match="no bound holds"):
        guarantee(Unbounded(), 100, Promise(0.3, 0.01))


@pytest.mark.parametrize("bound", [math.inf, math.nan, -1.0])
def test_a_bound_that_is_none_is_refused(bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mean, "sensitivity", lambda encoder, examples: bound)
    with pytest.raises(ConfigError, match="the encoder's sensitivity: expected a finite number, found"):
        guarantee(Mean(), 100, Promise(0.3, 0.01))


def test_the_guarantee_says_everything() -> None:
    promised = guarantee(Mean(), 50, Promise(0.3, 0.01))
    assert promised.sensitivity == pytest.approx(Mean().sensitivity(50))
    assert promised.sigma == promised.sensitivity * noise_scale(0.3, 0.01)
    text = " ".join(promised.sentences())
    for part in ("(0.3, 0.01)", "50 examples", f"{promised.sensitivity:.6g}", f"{promised.sigma:.6g}"):
        assert part in text
    assert "weak" not in text
    assert "weak" in " ".join(guarantee(Mean(), 100, Promise(0.3, 0.01)).sentences())


# ---------------------------------------------------------------------- the noise


def test_the_noise_is_standard_normal() -> None:
    count = 40_000
    values = noise(count, seeded())
    # A sum of squares of n standard normal numbers is chi-square with n degrees of freedom: mean n, variance 2 n.
    assert abs(float(values @ values) - count) < 4 * math.sqrt(2 * count)
    assert abs(float(values.sum())) < 4 * math.sqrt(count)
    assert stats.kstest(values, "norm").pvalue > 0.01
    assert abs(float(np.corrcoef(values[:-1], values[1:])[0, 1])) < 4 / math.sqrt(count)


def test_the_noise_of_a_descriptor_has_the_scale_that_is_promised() -> None:
    promised = Guarantee(0.3, 0.01, 50, 0.1, 0.7)
    descriptor = torch.linspace(-5, 5, 20_000)
    added = (privatise(descriptor, promised, seeded()) - descriptor).double() / 0.7
    assert abs(float(added @ added) - 20_000) < 4 * math.sqrt(40_000)


def test_in_production_the_noise_is_not_torchs() -> None:
    promised = Guarantee(0.3, 0.01, 50, 0.1, 0.7)
    outcomes = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        outcomes.append(privatise(torch.zeros(8), promised))
    assert not torch.equal(*outcomes)
    assert outcomes[0].dtype == torch.float32


def test_extreme_bytes_stay_finite() -> None:
    for byte in (b"\x00", b"\xff"):
        assert np.isfinite(noise(3, lambda count, byte=byte: byte * count)).all()


@pytest.mark.parametrize("epsilon", [0.3, 2.0])
def test_neighbouring_data_sets_cannot_be_told_apart_better_than_promised(epsilon: float) -> None:
    """The best attack on the worst neighbours: project on their difference, and threshold (Neyman, Pearson)."""
    encoder, delta, count, trials = Mean(), 0.05, 5, 20_000
    _, _, right = torch.linalg.svd(encoder.matrix)
    rest = torch.randn(count - 1, 2, generator=torch.Generator().manual_seed(0))
    one, other = (torch.cat([rest, sign * right[:1]]) for sign in (1, -1))
    apart = encoder(one) - encoder(other)
    assert float(apart.norm()) == pytest.approx(encoder.sensitivity(count), rel=1e-5)  # the bound is attained

    promised = guarantee(encoder, count, Promise(epsilon, delta))
    direction = (apart / apart.norm()).repeat(trials, 1)
    # All trials at once: a descriptor that is repeated gets independent noise in every place.
    first, second = (
        (privatise(encoder(data).repeat(trials), promised, seeded(seed)).view(trials, 3) * direction).sum(1)
        for seed, data in enumerate((one, other))
    )
    threshold = float((encoder(one) + encoder(other)) @ direction[0]) / 2 + epsilon * promised.sigma**2 / float(
        apart.norm()
    )
    advantage = float((first > threshold).double().mean() - math.exp(epsilon) * (second > threshold).double().mean())
    slack = 4 * math.sqrt((1 + math.exp(2 * epsilon)) * 0.25 / trials)
    assert abs(advantage - delta) < slack  # tight: with less noise it would be larger
    assert slack < 0.12
