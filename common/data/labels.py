"""What labels look like: a class or several labels for each example, numbers, or a mask for each image."""

from typing import Literal

import numpy as np

from hyperbloom.common.data.draws import IntArray
from hyperbloom.common.data.scaling import AnyArray
from hyperbloom.common.errors import DataError

LabelKind = Literal["classification", "multilabel", "regression", "segmentation"]

BINS = 10
"""Strata of a number: tenths of the examples, by its quantiles."""

FORMS = (
    "integers (N,) or (N, 1) for classes, 0, 1 or NaN (N, L) for several labels, floats (N,) or (N, T) for numbers, or "
    "integers (N, H, W) for masks"
)


def label_kind(labels: AnyArray) -> LabelKind:
    """Return what checked labels are.

    Ask for all labels of a data set together, because some rows of two numbers may all be 0 and 1.

    Args:
        labels: int64 `(N,)` classes or `(N, H, W)` masks; float32 `(N, L)` of only 0, 1 and NaN: several labels; other
            float32 `(N,)` or `(N, T)`: numbers.
    """
    if labels.dtype.kind == "i":
        return "classification" if labels.ndim == 1 else "segmentation"
    return "multilabel" if labels.ndim == 2 and _are_binary(labels) else "regression"


def as_labels(stored: AnyArray, name: str) -> AnyArray:
    """Check a user's labels and return them as `label_kind` takes them.

    Args:
        stored: `(N,)`, `(N, L)` or `(N, H, W)` of any numeric type.
        name: Name of the labels in errors, such as `"my.npz: key 'y'"`.

    Raises:
        DataError: They have a wrong type or shape, or invalid values.
    """
    if stored.dtype.kind not in "uifb":
        raise DataError(f"{name}: expected {FORMS}, found dtype {stored.dtype}")
    whole = stored.dtype.kind != "f"
    if stored.ndim not in ((1, 2, 3) if whole else (1, 2)) or 0 in stored.shape[1:]:
        raise DataError(f"{name}: expected {FORMS}, found {stored.dtype} {stored.shape}")
    if not whole:
        return _numbers(stored, name)
    if stored.ndim == 2 and stored.shape[1] > 1:
        if not _are_binary(stored):
            found = f"{stored.dtype} {stored.shape} from {stored.min()} to {stored.max()}"
            raise DataError(f"{name}: expected labels (N, L) of 0 and 1, found {found}; store numbers as floats")
        return stored.astype(np.float32)
    return _classes(stored[:, 0] if stored.ndim == 2 else stored, name)


def _numbers(stored: AnyArray, name: str) -> AnyArray:
    with np.errstate(over="ignore"):
        labels = stored.astype(np.float32)
    if labels.ndim == 2 and _are_binary(labels):
        return labels
    wrong = np.argwhere(~np.isfinite(labels))
    if len(wrong):
        found = f"{len(wrong)} not finite, the first at {wrong[0].tolist()}"
        raise DataError(f"{name}: expected finite numbers, or labels (N, L) of 0, 1 and NaN, found {found}")
    return labels


def _classes(labels: AnyArray, name: str) -> IntArray:
    low, high = (int(labels.min()), int(labels.max())) if labels.size else (0, 0)
    if low < 0:
        raise DataError(f"{name}: expected floats, or classes counted from 0, found {low}")
    # Masks often mark pixels to ignore, or one class in white, by 255.
    if high >= (255 if labels.ndim == 3 else max(1000, len(labels))):
        found = f"{high} among {len(labels)} labels"
        raise DataError(f"{name}: expected floats, or classes from 0 without gaps, found {found}; number them anew")
    return labels.astype(np.int64)


def _are_binary(labels: AnyArray) -> bool:
    return bool(np.all((labels == 0) | (labels == 1) | (labels != labels)))


def strata_of(labels: AnyArray, kind: LabelKind) -> IntArray:
    """Return a number from 0 for each example, int64 `(N,)`, so that a split in proportion deals all labels alike.

    It is the class; the rarest label that is present, or L if none is; the tenth of the first number; or the class
    other than 0 that covers most of a mask.
    """
    if kind == "classification":
        return labels
    if not len(labels):
        return np.empty(0, np.int64)
    if kind == "multilabel":
        present = labels == 1
        rarest_first = np.argsort(present.sum(axis=0), kind="stable")
        strata = np.where(present.any(axis=1), rarest_first[present[:, rarest_first].argmax(axis=1)], labels.shape[1])
    elif kind == "regression":
        first = labels.reshape(len(labels), -1)[:, 0]
        strata = np.searchsorted(np.quantile(first, np.arange(1, BINS) / BINS), first, side="right")
    else:
        classes = range(1, 2 + int(labels.max()))
        covered = np.stack([(labels == each).sum(axis=(1, 2)) for each in classes])
        strata = np.where(covered.any(axis=0), 1 + covered.argmax(axis=0), 0)
    return np.asarray(strata, dtype=np.int64)
