"""Checks and splits that all kinds of users' own data share."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyperbloom.common.data.draws import IntArray, generator, hold_out, three_parts
from hyperbloom.common.data.pool import ArrayBlock, Block, Pool, Portion
from hyperbloom.common.data.scaling import AnyArray, Scaling
from hyperbloom.common.errors import DataError

__all__ = ["BYTES", "Labelled", "build_pool", "check_inputs", "check_pair", "check_parts", "split_three", "split_train"]

CHANNELS = (1, 3, 4)

BYTES = Scaling(255.0)
"""The scaling of users' bytes."""


@dataclass(frozen=True)
class Labelled:
    """Checked inputs with their labels.

    Args:
        block: Stored inputs.
        labels: `(n,)`.
    """

    block: Block
    labels: IntArray

    @property
    def portion(self) -> Portion:
        """All examples, in order."""
        return Portion((self.block,), np.arange(len(self.labels), dtype=np.int64), self.labels)


def check_pair(inputs: AnyArray, labels: AnyArray, inputs_name: str, labels_name: str) -> Labelled:
    """Check a user's inputs and labels, and convert images to `(N, C, H, W)`.

    Args:
        inputs: `(N, F)`, `(N, H, W)`, `(N, H, W, C)` of uint8, or `(N, C, H, W)`.
        labels: `(N,)` integers from 0.
        inputs_name: Name of the inputs in errors, such as `"my.npz: key 'x'"`.
        labels_name: Name of the labels in errors.

    Raises:
        DataError: Inputs or labels have a wrong type, shape or length, or hold invalid values.
    """
    stored = check_inputs(inputs, inputs_name)
    checked = _labels(labels, labels_name)
    if len(stored) != len(checked):
        raise DataError(f"{labels_name}: expected {len(stored)} labels, as {inputs_name}, found {len(checked)}")
    return Labelled(ArrayBlock(stored), checked)


def check_inputs(inputs: AnyArray, name: str) -> AnyArray:
    """Return a user's inputs as `(N, C, H, W)` or `(N, F)`: bytes unchanged, all other types as float32.

    Raises:
        DataError: They have a wrong type or shape, or values that are not finite.
    """
    if inputs.dtype.kind not in "uifb":
        raise DataError(f"{name}: expected numbers, found dtype {inputs.dtype}")
    if inputs.ndim not in (2, 3, 4) or 0 in inputs.shape[1:]:
        expected = "(N, F), (N, H, W), (N, H, W, C) of uint8, or (N, C, H, W)"
        raise DataError(f"{name}: expected shape {expected}, found {inputs.shape}")
    if inputs.dtype == np.uint8:
        return _channels_first(inputs, name)
    with np.errstate(over="ignore"):
        converted = inputs.astype(np.float32)
    wrong = int(converted.size - np.count_nonzero(np.isfinite(converted)))
    if wrong:
        raise DataError(f"{name}: expected finite float32 numbers, found {wrong} that are not among {inputs.size}")
    if converted.ndim == 3:
        return converted[:, None]
    if converted.ndim == 4 and converted.shape[3] in CHANNELS and converted.shape[1] == converted.shape[2] > 4:
        raise DataError(f"{name}: expected floats as (N, C, H, W), found {inputs.shape}; transpose(0, 3, 1, 2) it")
    return converted


def _channels_first(images: AnyArray, name: str) -> AnyArray:
    if images.ndim == 2:
        return images
    if images.ndim == 3:
        return images[:, None]
    if images.shape[3] in CHANNELS:
        return images.transpose(0, 3, 1, 2)
    if images.shape[1] in CHANNELS:
        return images
    raise DataError(f"{name}: expected uint8 images as (N, H, W, C) with C of {CHANNELS}, found {images.shape}")


def _labels(labels: AnyArray, name: str) -> IntArray:
    if labels.dtype.kind not in "ui":
        raise DataError(f"{name}: expected integers, found dtype {labels.dtype}")
    if labels.ndim != 1:
        raise DataError(f"{name}: expected shape (N,), found {labels.shape}")
    if len(labels) and int(labels.min()) < 0:
        raise DataError(f"{name}: expected classes counted from 0, found {int(labels.min())}")
    if len(labels) and int(labels.max()) >= max(1000, len(labels)):
        found = f"{int(labels.max())} among {len(labels)} labels"
        raise DataError(f"{name}: expected classes counted from 0 without gaps, found {found}; number them anew")
    return labels.astype(np.int64)


def check_parts(parts: Sequence[Labelled], names: Sequence[str]) -> None:
    """Check that training, validation and test inputs have the same shape and stored type.

    Raises:
        DataError: A part differs from the first one.
    """
    nothing = np.arange(0)
    first = parts[0].block.take(nothing)
    for part, name in zip(parts, names, strict=True):
        other = part.block.take(nothing)
        if other.shape[1:] != first.shape[1:] or other.dtype != first.dtype:
            expected = f"{first.dtype} inputs of shape {first.shape[1:]} as {names[0]}"
            raise DataError(f"{name}: expected {expected}, found {other.dtype} {other.shape[1:]}")


def split_three(whole: Labelled, name: str, seed: int) -> list[Portion]:
    """Split 70 / 15 / 15, stratified by class; DataError if there are fewer than three examples."""
    rng = generator(seed, "own data", "three parts")
    _enough(len(whole.labels), 3, name)
    return [whole.portion.choose(part) for part in three_parts(whole.labels, 0.15, rng)]


def split_train(whole: Labelled, name: str, seed: int) -> list[Portion]:
    """Hold out a fifth of the training examples, stratified by class; DataError if there are fewer than two."""
    size = len(whole.labels)
    _enough(size, 2, name)
    kept, held = hold_out(whole.labels, max(1, size // 5), generator(seed, "own data", "validation"))
    return [whole.portion.choose(kept), whole.portion.choose(held)]


def _enough(size: int, least: int, name: str) -> None:
    if size < least:
        raise DataError(f"{name}: expected at least {least} examples to split, found {size}")


def build_pool(name: str, portions: Sequence[Portion], class_names: Sequence[str] | None) -> Pool:
    """Join three portions into a pool. Bytes are scaled to 0 .. 1; floats stay as they are.

    Args:
        name: Name of the data in errors.
        portions: Training, validation and test.
        class_names: One name for each class, or None to number them.

    Raises:
        DataError: There are fewer names than classes.
    """
    train, val, test = portions
    classes = 1 + max((int(part.labels.max()) for part in portions if len(part)), default=0)
    names = tuple(str(label) for label in range(classes)) if class_names is None else tuple(class_names)
    if len(names) < classes:
        raise DataError(f"{name}: expected a name for each of {classes} classes, found {len(names)}")
    bytes_stored = train.blocks[0].take(np.arange(0)).dtype == np.uint8
    return Pool(name, train, val, test, names, BYTES if bytes_stored else Scaling())
