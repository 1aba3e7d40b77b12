"""Factors of kernel matrices: exact where they fit, the best where they do not; the reference set by its content."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hyperbloom.common import alignment
from hyperbloom.common.alignment import (
    FACTOR_BYTES,
    check_factor,
    digest_of,
    draw_rows,
    factor_of,
    factor_weights,
    mean_factor,
    reference_weights,
    widest,
)
from hyperbloom.common.cka import centred, linear_cka_with
from hyperbloom.common.data import DataSpec, read_reference
from hyperbloom.common.errors import DataError, WireError
from hyperbloom.common.layout import Layout, Weights
from tests.common.test_cka import naive_cka

N = 30


def features(width: int, seed: int, rows: int = N) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.3


def test_what_travels_stays_under_ten_megabytes_a_round() -> None:
    for rows in (2, 500, 1000, 5000):
        sent = factor_weights(factor_of(torch.ones(rows, 1), widest(rows))).values
        assert rows * widest(rows) * sent.element_size() <= FACTOR_BYTES
    assert 2 * FACTOR_BYTES < 10e6
    assert widest(1000) >= 1000  # up to there nothing is cut
    assert widest(5000) > 84  # nor are the features of our CNNs


@pytest.mark.parametrize("width", [4, 50])
def test_a_factor_of_a_client_keeps_its_kernel(width: int) -> None:
    a = features(width, 1)
    factor = factor_of(a, N)
    assert factor.shape[1] == min(width, N)
    torch.testing.assert_close(factor @ factor.T, centred(a) @ centred(a).T)


@pytest.mark.parametrize("exact", [100, 10])  # by eigenvectors, and by the randomised method
def test_a_factor_that_is_too_wide_keeps_the_leading_directions(exact: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "EXACT", exact)
    a = features(20, 1) * 0.5 ** torch.arange(20)
    before = torch.random.get_rng_state()
    factor = factor_of(a, 6)
    assert torch.equal(torch.random.get_rng_state(), before)
    left, values, _ = torch.linalg.svd(centred(a))
    best = (left[:, :6] * values[:6] ** 2) @ left[:, :6].T
    torch.testing.assert_close(factor @ factor.T, best, rtol=0, atol=1e-6 * float(values[0]) ** 2)
    assert torch.equal(factor_of(a, 6), factor)


@pytest.mark.parametrize("exact", [100, 10])
def test_the_mean_is_that_of_the_kernel_matrices(exact: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "EXACT", exact)
    parts = [features(3, 1), 4 * features(50, 2), features(9, 3)]
    h = torch.eye(N, dtype=torch.float64) - 1 / N
    grams = [h @ a @ a.T @ h for a in parts]
    mean = torch.stack([k / k.norm() for k in grams]).sum(0)
    factor = mean_factor(parts, N)
    assert factor.shape[1] <= N
    torch.testing.assert_close(factor @ factor.T, mean / mean.norm(), rtol=0, atol=1e-9)
    own = features(5, 4)
    torch.testing.assert_close(linear_cka_with(factor)(own), naive_cka(own @ own.T, mean), rtol=0, atol=1e-9)


# ---------------------------------------------------------------------- factors from strangers


def sent(tensor: Tensor, name: str = "factor") -> Weights:
    return Weights(Layout(((name, tuple(tensor.shape)),)), tensor.reshape(-1))


def test_a_sound_factor_passes() -> None:
    factor = features(3, 1).float()
    assert torch.equal(check_factor(factor_weights(factor), N), factor)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (None, "factor: expected one, found none"),
        (sent(torch.ones(N - 1, 3)), r"factor: expected shape \(30, up to 30\), found \(29, 3\)"),
        (sent(torch.ones(N, 0)), r"factor: expected shape \(30, up to 30\), found \(30, 0\)"),
        (sent(torch.ones(N, 3, 1)), r"factor: expected shape"),
        (sent(torch.ones(N)), r"factor: expected shape"),
        (Weights(Layout(()), torch.empty(0)), r"factor: expected shape .* found 0"),
        (sent(torch.ones(N, 3), "other"), "tensor factor: expected"),
        (sent(torch.ones(N, 3).double()), "expected torch.float32, found torch.float64"),
        (sent(torch.full((N, 3), float("nan"))), "tensor factor: 90 values are not finite"),
        (sent(torch.full((N, 3), 1e6)), r"expected a norm of at most 1e\+06, found 9.49e\+06"),
    ],
)
def test_an_unsound_factor_is_refused(weights: Weights | None, text: str) -> None:
    with pytest.raises(WireError, match=text):
        check_factor(weights, N)
    with pytest.raises(WireError, match=r"expected shape \(5000, up to 209\)"):
        check_factor(sent(torch.ones(5000, 210)), 5000)


# ---------------------------------------------------------------------- the reference set


def test_rows_are_fresh_each_round_and_the_same_for_all() -> None:
    one, other = draw_rows(100, 10, 1), draw_rows(100, 10, 2)
    assert torch.equal(draw_rows(100, 10, 1), one)
    assert len(set(one.tolist())) == 10 and set(one.tolist()) != set(other.tolist())
    assert sorted(draw_rows(5, 10, 3).tolist()) == [0, 1, 2, 3, 4]


def test_inputs_travel_in_half_precision_unless_that_changes_whole_numbers() -> None:
    pixels = torch.rand(4, 1, 3, 3)
    weights = reference_weights(pixels)
    assert weights.values.dtype == torch.float16
    torch.testing.assert_close(weights.values.float().view(4, 1, 3, 3), pixels, rtol=0, atol=5e-4)
    tokens = torch.tensor([[3.0, 2049.0], [1.0, 0.0]])
    assert torch.equal(reference_weights(tokens).values.view(2, 2), tokens)  # 2049 is none of float16's
    assert reference_weights(tokens.clamp(max=2048)).values.dtype == torch.float16
    assert reference_weights(torch.tensor([[1e6, 0.5]])).values.dtype == torch.float32


def test_the_digest_is_of_shape_type_and_content() -> None:
    inputs = torch.rand(4, 6)
    one = digest_of(reference_weights(inputs))
    assert digest_of(reference_weights(inputs.clone())) == one
    changed = inputs.clone()
    changed[2, 3] += 0.25
    others = [changed, inputs.view(4, 2, 3), inputs.flip(0)]
    assert len({one, *(digest_of(reference_weights(other)) for other in others)}) == 4


def test_inputs_alone_from_an_npz(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (7, 5, 5, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", x=images)
    found = read_reference(DataSpec(str(tmp_path / "x.npz")), 100)
    wanted = {image.tobytes() for image in images.transpose(0, 3, 1, 2)}
    assert found.shape == (7, 3, 5, 5)
    assert {(image * 255).round().byte().numpy().tobytes() for image in found} == wanted
    assert read_reference(DataSpec(str(tmp_path / "x.npz")), 4).shape == (4, 3, 5, 5)


def test_inputs_of_a_data_set_are_drawn_from_all_of_it() -> None:
    whole = read_reference(DataSpec("digits"), 10_000)
    some = read_reference(DataSpec("digits"), 200)
    assert whole.shape == (1797, 1, 8, 8) and some.shape == (200, 1, 8, 8)
    assert torch.equal(read_reference(DataSpec("digits"), 200), some)
    assert not torch.equal(read_reference(DataSpec("digits", seed=1), 200), some)
    with pytest.raises(DataError, match="nowhere"):
        read_reference(DataSpec("nowhere"), 3)
