"""The text networks of FedHeNN: an LSTM of one or two layers, then two linear layers.

Makhija, Han, Ho, Ghosh: Architecture Agnostic Federated Learning for Neural Networks, ICML 2022,
https://arxiv.org/abs/2202.07757, section IV.A. Widths are ours.
"""

import torch
from torch import Tensor, nn

from hyperbloom.common.errors import ModelError

VOCABULARY = 10_000
"""Rows of the embedding. Token 0 is padding, and tokens beyond the table share its last row."""

EMBEDDED = 32


class TextLSTM(nn.Module):
    """An embedding for tokens, an LSTM with `width` units, a hidden linear layer of `width`, and the head.

    The hidden layer reads the LSTM's output at the last token that is not padding: 0, or a vector of zeros.

    Shape:
        inputs `(B, T)`, token numbers as floats, or `(B, 1, T, E)`, embedded tokens as from an .npz of `(N, T, E)`;
        logits `(B, num_classes)`.
    """

    def __init__(self, layers: int, input_shape: tuple[int, ...], num_classes: int, width: int = 64) -> None:
        super().__init__()
        if len(input_shape) != 1 and not (len(input_shape) == 3 and input_shape[0] == 1):
            raise ModelError(
                f"lstm-{layers}: expected tokens (length,) or embedded tokens (1, length, width), found {input_shape}"
            )
        self.embedding = nn.Embedding(VOCABULARY, EMBEDDED) if len(input_shape) == 1 else None
        self.lstm = nn.LSTM(EMBEDDED if self.embedding else input_shape[-1], width, layers, batch_first=True)
        self.fc1 = nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        if self.embedding is None:
            x = x.squeeze(1)  # (B, T, E)
            there = x.detach().ne(0).any(2)  # (B, T)
        else:
            there = x.ne(0)
            x = self.embedding(x.long().clamp(0, VOCABULARY - 1))
        length = x.shape[1]
        last = (there * torch.arange(length, device=x.device)).amax(1)  # (B,)
        out, _ = self.lstm(x)  # (B, T, width)
        chosen = out.gather(1, last[:, None, None].expand(-1, 1, out.shape[2])).squeeze(1)
        logits: Tensor = self.head(self.fc1(chosen).relu())
        return logits
