"""Updates that a few clients cannot turn: changes clipped to a norm, and trimmed coordinate by coordinate.

Dong Yin, Yudong Chen, Kannan Ramchandran, Peter Bartlett: Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates, ICML 2018, https://arxiv.org/abs/1803.01498, section 4.2: the mean of what is left of each coordinate
after a share of the largest and of the smallest values is cut off.

A hypernetwork learns from each client's change, not from their mean. So what is cut off is replaced by the mean of what
is left: the mean over the cohort is the trimmed mean, and that is what the proximal rule finds that all have in common;
what a client has of its own stays where it is not extreme.
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
    """Return a cohort's replies with changes clipped, and then trimmed among those of one size.

    Args:
        replies: of a cohort, in any order, which is kept.
        norm: to which each change is clipped; `median`: of the cohort's norms, size by size.
        share: of the clients of a size that is cut off at each end of each coordinate; rounded down.
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
    """Return `(C, P)` with each row scaled down to at most a norm; `median`: that of the rows' norms."""
    norms = torch.linalg.vector_norm(deltas, dim=1, keepdim=True)  # (C, 1)
    # Of an even number the lower one: half of the clients must not be able to raise it.
    limit = norms.median() if norm == "median" else torch.tensor(norm).to(norms)
    factors: Tensor = (limit / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1.0)
    return deltas * factors


def trim(deltas: Tensor, share: float) -> Tensor:
    """Return `(C, P)` where, in each column, the `floor(share C)` largest and smallest are the mean of the others."""
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
