"""Networks that only tables of the papers need: of pFedHN on Omniglot, of FedHeNN, and of HAFL-GHN's ablation.

Importing this module registers them. Clients of their own may name one as `--model figures.networks:cnn_1`.

omniglot         four 3x3 convolutions, two linear layers: Shamsian, Navon, Fetaya, Chechik, 2021,
https://arxiv.org/abs/2103.04628, section 5, which gives their numbers only
cnn-1 .. cnn-5   Makhija, Han, Ho, Ghosh: Architecture Agnostic Federated Learning for Neural Networks, ICML 2022,
https://arxiv.org/abs/2202.07757, section IV.A, whose text gives the smallest and the largest, and
cnn-4 for clients of one architecture; the other two, kernels and widths are ours
cnn-64-2 .. -4   those of its authors' code (https://github.com/dishamakhija/FedHeNN), without dropout: two 5x5
convolutions of 64 filters, then two to four linear layers
lstm-1, lstm-2   for texts, from the same section: an LSTM of one or two layers, then two linear layers; widths ours
plain-4 .. -13   Litany et al., 2022, https://arxiv.org/abs/2201.08459, section 5.6: 4, 7, 10 or 13 layers, convolutions
of one type, all of `width` channels, without skips, and the head
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.common.errors import ModelError
from hyperbloom.common.models import CNN, MODELS, ModelInfo
from hyperbloom.common.models.residual import ResidualCNN, check_image

LAYERS = ((1, 1), (1, 2), (2, 2), (2, 3), (3, 3))
"""Numbers of convolutions and linear layers with the head."""

HIDDEN = (120, 84)
"""Widths of the linear layers before the head, as in LeNet. Networks with fewer layers use the last ones."""

VOCABULARY = 10_000
"""Rows of the embedding. Token 0 is padding, and tokens beyond the table share its last row."""

EMBEDDED = 32


class PooledCNN(nn.Module):
    """Convolutions, each with pooling by two, then linear layers and the head.

    pFedHN's network for Omniglot is one of these; the paper gives only its number of layers.

    Args:
        name: in errors.
        filters: of each convolution, in units of `width`.
        hidden: widths of the linear layers before the head.
        input_shape: shape of an image.
        num_classes: number of logits.
        width: unit of `filters`.
        kernel: height and width of the convolutions.
        padding: at each side of an image.

    Shape:
        inputs `(B, C, H, W)`, from which convolutions and pooling leave at least one point; logits `(B, num_classes)`.
    """

    def __init__(
        self,
        name: str,
        filters: Sequence[int],
        hidden: Sequence[int],
        input_shape: tuple[int, ...],
        num_classes: int,
        width: int = 16,
        kernel: int = 3,
        padding: int = 1,
    ) -> None:
        super().__init__()
        lost, least = kernel - 1 - 2 * padding, 1
        for _ in filters:
            least = 2 * least + lost
        check_image(input_shape, name, least)
        channels, *sides = input_shape
        made = [channels, *(width * each for each in filters)]
        self.convolutions = nn.ModuleList(nn.Conv2d(*pair, kernel, padding=padding) for pair in pairwise(made))
        for _ in filters:
            sides = [(side - lost) // 2 for side in sides]
        widths = [made[-1] * math.prod(sides), *hidden]
        self.linear = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        for convolution in self.convolutions:
            x = F.max_pool2d(convolution(x), 2).relu()  # ReLU on a quarter of the values
        x = x.flatten(1)
        for layer in self.linear:
            x = layer(x).relu()
        logits: Tensor = self.head(x)
        return logits


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


omniglot = partial(PooledCNN, "omniglot", (1, 2, 2, 2), HIDDEN[-1:])
cnn_1, cnn_2, cnn_3, cnn_4, cnn_5 = (
    partial(PooledCNN, f"cnn-{number}", [2**n for n in range(convolutions)], HIDDEN[len(HIDDEN) - linear + 1 :])
    for number, (convolutions, linear) in enumerate(LAYERS, start=1)
)
cnn_64_2, cnn_64_3, cnn_64_4 = (
    partial(PooledCNN, f"cnn-64-{len(hidden) + 1}", (1, 1), hidden, kernel=5, padding=0)
    for hidden in ((120,), (120, 64), (200, 120, 64))
)
lstm_1, lstm_2 = partial(TextLSTM, 1), partial(TextLSTM, 2)
plain_4, plain_7, plain_10, plain_13 = (
    partial(ResidualCNN, f"plain-{layers}", [(1, 1, False)] * (layers - 2)) for layers in (4, 7, 10, 13)
)

MODELS["omniglot"] = ModelInfo(omniglot, CNN, "four 3x3 convolutions, two linear layers (pFedHN)")
for number, make in enumerate((cnn_1, cnn_2, cnn_3, cnn_4, cnn_5), start=1):
    said = f"convolutions: {LAYERS[number - 1][0]}, linear layers: {LAYERS[number - 1][1]} (FedHeNN)"
    MODELS[f"cnn-{number}"] = ModelInfo(make, CNN, said)
for number, make in enumerate((cnn_64_2, cnn_64_3, cnn_64_4), start=2):
    said = f"two 5x5 convolutions, linear layers: {number} (FedHeNN's code)"
    MODELS[f"cnn-64-{number}"] = ModelInfo(make, {"S": 16, "M": 64, "L": 128}, said)
for number, text in enumerate((lstm_1, lstm_2), start=1):
    said = f"text: {number}-layer LSTM, two linear (FedHeNN)"
    MODELS[f"lstm-{number}"] = ModelInfo(text, {"S": 32, "M": 64, "L": 128}, said)
for layers, plain in ((4, plain_4), (7, plain_7), (10, plain_10), (13, plain_13)):
    MODELS[f"plain-{layers}"] = ModelInfo(plain, {"S": 8, "M": 16, "L": 64}, f"{layers} layers of one type (HAFL-GHN)")
