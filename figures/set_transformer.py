"""Set transformer: samples attend to each other, and attention pools them.

Importing this module registers it as an encoder of odpfl.

Lee et al., Set Transformer, ICML 2019, https://arxiv.org/abs/1810.00825: two induced self-attention blocks (equation 9)
and pooling by multi-head attention with one seed (equation 11), on features from a network per sample.
"""

import torch
from torch import Tensor, nn

from hyperbloom.common.encoders import ENCODERS
from hyperbloom.common.encoders.base import Encoder, per_sample

WIDTH, HEADS, INDUCING = 64, 4, 16


class _MAB(nn.Module):
    """Multi-head attention of `x` `(1, Q, d)` to `y` `(1, N, d)`, a residual, then a row-wise layer (equation 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.row = nn.Linear(WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm1(x + self.attention(x, y, y, need_weights=False)[0])
        out: Tensor = self.norm2(h + self.row(h).relu())
        return out


class _ISAB(nn.Module):
    """Self-attention through a few learned points. Its cost is linear in N, not quadratic."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(1, INDUCING, WIDTH))
        self.there, self.back = _MAB(), _MAB()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.back(x, self.there(self.points, x))
        return out


class SetTransformer(Encoder):
    """A network per sample, two attention blocks between samples, pooling by attention, and a linear layer."""

    def __init__(self, input_shape: tuple[int, ...], dim: int) -> None:
        super().__init__()
        self.features = per_sample(input_shape, WIDTH)
        self.between = nn.Sequential(_ISAB(), _ISAB())
        self.seed = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pool = _MAB()
        self.tail = nn.Linear(WIDTH, dim)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the descriptor of a set."""
        x = self.between(self.features(inputs)[None])  # (1, N, d)
        descriptor: Tensor = self.tail(self.pool(self.seed, x)[0, 0])
        return descriptor


ENCODERS["set-transformer"] = SetTransformer
