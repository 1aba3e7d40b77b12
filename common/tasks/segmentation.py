"""Segmentation: a class for each pixel of an image.

The loss is cross-entropy and soft Dice, in equal parts as in F. Isensee et al., "nnU-Net", Nature Methods 2021,
https://arxiv.org/abs/1809.10486. Dice as a loss is from F. Milletari, N. Navab, S.-A. Ahmadi, "V-Net", 3DV 2016,
https://arxiv.org/abs/1606.04797. Cross-entropy alone settles on the background if most pixels are.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperbloom.common.errors import ModelError
from hyperbloom.common.tasks import measures
from hyperbloom.common.tasks.classification import OfClasses
from hyperbloom.common.tasks.measures import Metric, confusion_of

SMOOTH = 1e-3
"""Share of a batch's pixels that is added to both parts of the Dice fraction, for classes that do not occur in it."""


class Segmentation(OfClasses):
    """Masks (N, H, W) of classes, 0 for the background, by the cross-entropy of each pixel and the Dice of each class.

    Dice and IoU are means over the classes except the background, over all pixels of a client together.
    """

    metrics: ClassVar[Mapping[str, Metric]] = {
        "dice": measures.DICE,
        "iou": measures.IOU,
        "accuracy": measures.ACCURACY,
    }
    usual: ClassVar[int] = 2
    looks: ClassVar[str] = "integers (N, H, W), classes of pixels counted from 0"
    axes: ClassVar[int] = 3

    def losses(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, None]:
        """Return the cross-entropy of each pixel `(N, H, W)`; ModelError if the network answers for whole images."""
        if outputs.shape[2:] != labels.shape[1:]:
            found = f"{tuple(outputs.shape[1:])} for a mask {tuple(labels.shape[1:])}"
            raise ModelError(f"expected a network with logits (B, K, H, W) of pixels, such as unet, found {found}")
        return F.cross_entropy(outputs, labels, reduction="none"), None

    def loss(
        self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None, share: Tensor | None = None
    ) -> Tensor:
        """Return the mean as in `Task.loss`, and 1 - the mean soft Dice of the classes but the background.

        With p the probability of class c and y whether a pixel is of c, each as means over a batch's pixels:

            dice_c = (2 mean(p y) + s) / (mean(p) + mean(y) + s),   s = SMOOTH
        """
        crossed = super().loss(outputs, labels, weights, share)
        classes = torch.arange(outputs.shape[1], device=outputs.device).view(1, -1, 1, 1)
        truth = (labels.unsqueeze(1) == classes).to(outputs)  # (B, K, H, W)
        told = outputs.softmax(1)
        of_examples = torch.stack([told * truth, told, truth]).mean((3, 4))  # (3, B, K)
        if share is not None:
            of_examples = of_examples * (share * (len(share) / share.sum())).view(1, -1, 1)
        both, told_part, true_part = of_examples.mean(1)[:, 1:]
        dice = (2 * both + SMOOTH) / (told_part + true_part + SMOOTH)
        return crossed + (1 - dice).sum() / max(1, len(dice))

    def answers(self, outputs: Tensor) -> Tensor:
        """Return the masks `(N, H, W)`."""
        return outputs.argmax(1).to(torch.int16)

    def counts(self, answers: Tensor, labels: Tensor, outputs: int) -> Tensor:
        """Return the confusion matrix `(K, K)` of pixels."""
        return confusion_of(answers, labels, outputs)

    def nothing(self, outputs: int) -> tuple[Tensor, Tensor]:
        """Return masks without pixels."""
        return torch.zeros(0, 1, 1), torch.zeros(0, 1, 1, dtype=torch.int64)

    def output_shape(self, outputs: int, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the logits of all pixels."""
        return (outputs, *input_shape[1:])

    def auto_model(self, input_shape: tuple[int, ...]) -> str:
        """Return a small U-Net."""
        return "unet"

    def show(self, outputs: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the mask, and the share of each class in it."""
        masks = self.answers(outputs)
        return [
            {
                "mask": mask.tolist(),
                "shares": {name: float((mask == k).double().mean()) for k, name in enumerate(names)},
            }
            for mask in masks
        ]

    def describe(self, names: Sequence[str]) -> str:
        """Return what the outputs are."""
        return f"logits of {len(names)} classes for each pixel: {', '.join(names)}"
