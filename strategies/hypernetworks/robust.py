"""Robust updates: clip each client's change to a norm, so that a few clients cannot steer learning by large changes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from hyperbloom.strategies.hypernetworks.learner import Reply, by_size


def clip_changes(replies: Sequence[Reply], norm: float | Literal["median"]) -> list[Reply]:
    """Return a cohort's replies, in their order, with changes of at most `norm`; `median`: of the norms of one size."""
    clipped: dict[int, Reply] = {}
    for _, group in by_size(replies):
        deltas = clip_norms(torch.stack([reply.delta for reply in group]), norm)  # (C, P)
        clipped |= {reply.row: replace(reply, delta=row) for reply, row in zip(group, deltas, strict=True)}
    return [clipped[reply.row] for reply in replies]


def clip_norms(deltas: Tensor, norm: float | Literal["median"]) -> Tensor:
    """Return `(C, P)` with each row scaled down to at most `norm`; `median`: the median of the rows' norms."""
    norms = torch.linalg.vector_norm(deltas, dim=1, keepdim=True)  # (C, 1)
    # The median is the lower one of an even number: half of the clients must not be able to raise it.
    limit = norms.median() if norm == "median" else torch.tensor(norm).to(norms)
    factors: Tensor = (limit / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1.0)
    return deltas * factors
