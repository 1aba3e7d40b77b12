"""The 1,797 handwritten digits that scikit-learn carries: the data set that needs no files.

E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49
"""

import numpy as np

from hyperbloom.common.data.draws import FIXED_SEED, generator, three_parts
from hyperbloom.common.data.files import need
from hyperbloom.common.data.pool import ArrayBlock, Pool, Portion
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.data.spec import DataSpec

__all__ = ["SCALING", "read_digits"]

# Mean and standard deviation of all pixels after division by 16.
SCALING = Scaling(16.0, (0.3053,), (0.3760,))


def read_digits(spec: DataSpec) -> Pool:
    """Return the digits, 1 x 8 x 8 in ten classes, split 60 / 20 / 20 in the same way in every run.

    Raises:
        DataError: scikit-learn is not installed.
    """
    bunch = need("sklearn.datasets", "scikit-learn").load_digits()
    images = np.asarray(bunch.images, dtype=np.uint8)[:, None]  # (1797, 1, 8, 8)
    labels = np.asarray(bunch.target, dtype=np.int64)
    whole = Portion((ArrayBlock(images),), np.arange(len(labels), dtype=np.int64), labels)
    parts = three_parts(labels, 0.2, generator(FIXED_SEED, "digits"))
    train, val, test = (whole.choose(part) for part in parts)
    return Pool(spec.data, train, val, test, tuple(str(digit) for digit in range(10)), SCALING)
