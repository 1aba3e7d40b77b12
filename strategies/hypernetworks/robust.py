"""Robust updates: clip each change to a norm, and trim every coordinate, so that a few clients cannot steer learning.

Dong Yin, Yudong Chen, Kannan Ramchandran, Peter Bartlett: Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates, ICML 2018, https://arxiv.org/abs/1803.01498, section 4.2: cut a share of the largest and of the
smallest values off each coordinate, and average the rest.

A hypernetwork learns from each client's change, not from their mean. So cut values are replaced by the mean of the
rest. The mean over the cohort is then the trimmed mean, which the proximal rule finds in common to all replies. What
is particular to one client remains where it is not extreme.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from hyperbloom.strategies.hypernetworks.learner import Reply

__all__ = ["clip_norms", "harden", "trim"]

COLUMNS_AT_ONCE = 2**16


def harden(replies: Sequence[Reply], norm: float | Literal["median"] | None, share: float) -> list[Reply]:
    """Return a cohort's replies with changes clipped, and then trimmed among clients of one size.

    Args:
        replies: of a cohort; the result has the same order.
        norm: largest norm of a change; `median`: the median of the norms of one size; None: no clipping.
        share: share of the clients of a size that is cut at each end of each coordinate; rounded down.
    """
    if norm is None and not share:
        return list(replies)
    hardened: dict[int, Reply] = {}
    ordered = sorted(range(len(replies)), key=lambda index: replies[index].size)
    for _, group in groupby(ordered, key=lambda index: replies[index].size):
        indices = list(group)
        deltas = torch.stack([replies[index].delta for index in indices])  # (C, P)
        if norm is not None:
            deltas = clip_norms(deltas, norm)
        deltas = trim(deltas, share)
        hardened |= {i: replace(replies[i], delta=row) for i, row in zip(indices, deltas, strict=True)}
    return [hardened[index] for index in range(len(replies))]


def clip_norms(deltas: Tensor, norm: float | Literal["median"]) -> Tensor:
    """Return `(C, P)` with each row scaled down to at most `norm`; `median`: the median of the rows' norms."""
    norms = torch.linalg.vector_norm(deltas, dim=1, keepdim=True)  # (C, 1)
    # The median is the lower one of an even number: half of the clients must not be able to raise it.
    limit = norms.median() if norm == "median" else torch.tensor(norm).to(norms)
    factors: Tensor = (limit / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1.0)
    return deltas * factors


def trim(deltas: Tensor, share: float) -> Tensor:
    """Return `(C, P)` where, in each column, the mean of the rest replaces the `floor(share C)` values at each end."""
    cut = int(share * len(deltas))
    if not cut:
        return deltas
    trimmed = torch.empty_like(deltas)
    for start in range(0, deltas.shape[1], COLUMNS_AT_ONCE):
        columns = deltas[:, start : start + COLUMNS_AT_ONCE]
        order = columns.argsort(dim=0, stable=True)
        values = columns.gather(0, order)
        values[:cut] = values[len(values) - cut :] = values[cut : len(values) - cut].mean(0)
        trimmed[:, start : start + COLUMNS_AT_ONCE].scatter_(0, order, values)
    return trimmed
