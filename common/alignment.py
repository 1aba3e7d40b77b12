"""Computations that FedHeNN's server and clients share: reference sets, their rows in a round, and kernel factors.

The reference set is the RAD (representation alignment data) of the paper (strategies/fedhenn.py): public inputs without
labels. Server and clients identify it by a hash of its content, so that it travels once.

An `n x n` kernel matrix `K` travels as a factor `F` `(n, r)` with `F F^T = K`. A client's factor is its features; the
factor of the mean is all clients' features side by side. A factor of more than `FACTOR_BYTES` is cut to its
leading directions. Up to 1,000 rows, `r = n` fits and the factor is exact.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from hyperbloom.common.cka import centred, linear_factor
from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Layout, Weights

FACTOR_BYTES = 4 * 2**20
"""Largest size of a factor on the wire, in both directions."""
LARGEST_REFERENCE = 5000
"""Most inputs of a reference set, as in the paper."""
EXACT = 1200
"""Largest matrix that is cut with exact eigenvectors, which then takes at most a second."""
SPARE = 16
"""Extra directions (oversampling) of the randomised SVD."""


def widest(rows: int) -> int:
    """Return the largest number of columns for a factor with `rows` rows; it needs at most `rows`."""
    return min(rows, max(1, FACTOR_BYTES // (4 * rows)))


def draw_rows(total: int, rows: int, draw: int) -> Tensor:
    """Draw the `min(rows, total)` indices of the reference inputs of a round; `draw` is the round's seed."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(draw))[:rows]


def reference_weights(inputs: Tensor) -> Weights:
    """Return inputs `(n, *shape)` for the wire: in half precision, unless that changes whole numbers or overflows."""
    half = inputs.half()
    whole = bool((inputs == inputs.round()).all())  # such as token numbers
    changes = not torch.equal(half.float(), inputs) if whole else not bool(half.isfinite().all())
    values = inputs.float() if changes else half
    return Weights(Layout((("inputs", tuple(values.shape)),)), values.reshape(-1))


def digest_of(reference: Weights) -> str:
    """Return the hash that identifies a reference set, made from its shape, its dtype and its values."""
    values = reference.values.contiguous()
    about = f"{reference.layout.shapes}{values.dtype}".encode()
    return hashlib.sha256(about + values.numpy().tobytes()).hexdigest()


def factor_of(features: Tensor, columns: int) -> Tensor:
    """Return a factor `(n, <= columns)` of the centred linear kernel of features `(n, d)`.

    The factor is exact if `columns` is at least `min(n, d)`. Otherwise it has the leading directions.
    """
    return _narrowed(centred(features), columns)


def mean_factor(factors: Sequence[Tensor], columns: int) -> Tensor:
    """Return a factor `(n, <= columns)` of the mean of kernel matrices, each of norm 1; it is centred and of norm 1."""
    return linear_factor(_narrowed(torch.cat([linear_factor(f) for f in factors], 1), columns))


def factor_weights(factor: Tensor) -> Weights:
    """Return a factor `(n, r)` as `Weights` for the wire."""
    return Weights(Layout((("factor", tuple(factor.shape)),)), factor.float().reshape(-1))


def check_factor(weights: Weights | None, rows: int) -> Tensor:
    """Return a factor from the wire as `(rows, r)`; WireError if its shape, values or norm are out of bounds."""
    if weights is None:
        raise WireError("factor: expected one, found none")
    shapes, most = weights.layout.shapes, widest(rows)
    shape = shapes[0][1] if len(shapes) == 1 else ()
    if len(shape) != 2 or shape[0] != rows or not 1 <= shape[1] <= most:
        raise WireError(f"factor: expected shape ({rows}, up to {most}), found {shape or len(shapes)}")
    weights.check(Layout((("factor", shape),)), torch.float32)
    weights.check_norm()
    return weights.values.view(shape)


def _narrowed(factor: Tensor, columns: int) -> Tensor:
    """Return a factor `(n, <= columns)` of `F F^T`, leading directions first: `F` itself if it is narrow enough."""
    rows, width = factor.shape
    if width <= columns:
        return factor
    if rows <= EXACT:
        values, vectors = torch.linalg.eigh((factor @ factor.T).cpu().double())
        return (vectors * values.clamp_min(0).sqrt()).flip(1)[:, :columns].to(factor)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the same cut on both sides and in every run
        left, values, _ = torch.svd_lowrank(factor, min(columns + SPARE, *factor.shape))
    return left[:, :columns] * values[:columns]
