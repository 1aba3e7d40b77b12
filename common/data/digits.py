"""The 1,797 handwritten digits of scikit-learn: the data set that needs no download.

E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49
"""

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from hyperbloom.common.data.draws import FIXED_SEED, generator, three_parts
from hyperbloom.common.data.pool import ArrayBlock, Pool, Portion
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.errors import DataError

__all__ = ["SCALING", "read_digits"]

# Mean and standard deviation of all pixels after division by 16.
SCALING = Scaling(16.0, (0.3053,), (0.3760,))


def read_digits(spec: DataSpec) -> Pool:
    """Return the digits, 1 x 8 x 8 in ten classes, split 60 / 20 / 20 in the same way in every run.

    Raises:
        DataError: scikit-learn is not installed, or lacks the file.
    """
    # Read the file, because importing scikit-learn for `load_digits` takes a third of a client's start-up time.
    package = find_spec("sklearn")
    file = Path(package.origin).parent / "datasets/data/digits.csv.gz" if package and package.origin else None
    if file is None or not file.exists():
        raise DataError(f"digits: expected the file of scikit-learn, found {file}: pip install scikit-learn")
    with gzip.open(file) as lines:
        table = np.loadtxt(lines, dtype=np.uint8, delimiter=",")  # (1797, 65): pixels from 0 to 16, and the digit
    images, labels = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)
    rng = generator(FIXED_SEED, "digits")
    train, val, test = Portion.of(ArrayBlock(images), labels).split(lambda strata: three_parts(strata, 0.2, rng))
    return Pool(spec.data, train, val, test, tuple(str(digit) for digit in range(10)), SCALING)
