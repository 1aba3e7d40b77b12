"""The digits: those of scikit-learn, without its import."""

from collections import Counter

import numpy as np
import pytest
from sklearn.datasets import load_digits

from hyperbloom.common.data import DataSpec, digits, load_client_data
from hyperbloom.common.data.digits import SCALING
from hyperbloom.common.errors import DataError


def test_they_are_scikit_learns() -> None:
    data, theirs = load_client_data(DataSpec("digits")), load_digits()
    found: Counter[tuple[bytes, int]] = Counter()
    for part in (data.train, data.val, data.test):
        pixels = (part.inputs.numpy() * SCALING.std[0] + SCALING.mean[0]) * SCALING.divisor
        images, labels = np.rint(pixels).astype(np.uint8), part.labels.tolist()
        found.update(zip((image.tobytes() for image in images), labels, strict=True))
    expected = zip((image.astype(np.uint8).tobytes() for image in theirs.images), theirs.target.tolist(), strict=True)
    assert found == Counter(expected)


def test_without_scikit_learn_they_are_told_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    monkeypatch.setattr(digits, "_numbers", digits._numbers.__wrapped__)  # not what another test has read
    with pytest.raises(DataError, match="pip install scikit-learn"):
        digits.read_digits(DataSpec("digits"))
