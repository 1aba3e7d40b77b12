"""Multi-layer perceptron with one hidden layer: pFedHN's target network for MNIST (appendix C.1)."""

import math

from torch import Tensor, nn


class MLP(nn.Module):
    """Flatten, one hidden layer of `width` units with ReLU, linear head.

    Shape:
        inputs `(B, *input_shape)`; logits `(B, num_classes)`.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 100) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(input_shape), width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        return self.head(self.fc1(x.flatten(1)).relu())
