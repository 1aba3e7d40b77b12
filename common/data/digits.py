"""Two data sets that come with scikit-learn and need no download: 1,797 handwritten digits, and 442 diabetes patients.

`digits`: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49
`diabetes`: ten measurements, and a number for the progress of the disease a year later. B. Efron, T. Hastie,
I. Johnstone, R. Tibshirani, "Least Angle Regression", Annals of Statistics 32, 2004, https://doi.org/10.1214/009053604000000067
"""

import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from hyperbloom.common.data.draws import FIXED_SEED, generator, three_parts
from hyperbloom.common.data.pool import Pool, Portion
from hyperbloom.common.data.scaling import AnyArray, Scaling
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.errors import DataError

# Mean and standard deviation of all pixels after division by 16.
SCALING = Scaling(16.0, (0.3053,), (0.3760,))


def read_digits(spec: DataSpec) -> Pool:
    """Return the digits, 1 x 8 x 8 in ten classes, split 60 / 20 / 20 in the same way in every run."""
    table = _numbers("digits", "digits.csv.gz", ",").astype(np.uint8)  # (1797, 65): pixels from 0 to 16, and the digit
    images, labels = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)
    rng = generator(FIXED_SEED, "digits")
    train, val, test = Portion.of(images, labels).split(lambda strata: three_parts(strata, 0.2, rng))
    return Pool(spec.data, train, val, test, tuple(str(digit) for digit in range(10)), SCALING)


def read_diabetes(spec: DataSpec) -> Pool:
    """Return the patients, ten numbers each, standardised over all, split 60 / 20 / 20 the same in every run."""
    inputs = _numbers("diabetes", "diabetes_data_raw.csv.gz", None).astype(np.float32)
    labels = _numbers("diabetes", "diabetes_target.csv.gz", None).astype(np.float32)
    rng = generator(FIXED_SEED, "diabetes")
    train, val, test = Portion.of(inputs, labels).split(lambda strata: three_parts(strata, 0.2, rng))
    scaling = Scaling(1.0, tuple(inputs.mean(axis=0).tolist()), tuple(inputs.std(axis=0).tolist()))
    return Pool(spec.data, train, val, test, ("progression",), scaling)


@cache  # a process with many virtual clients reads for each of them
def _numbers(name: str, file: str, delimiter: str | None) -> AnyArray:
    # Read the file, because importing scikit-learn for `load_digits` takes a third of a client's start-up time.
    package = find_spec("sklearn")
    path = Path(package.origin).parent / "datasets/data" / file if package and package.origin else None
    if path is None or not path.exists():
        raise DataError(f"{name}: expected the file of scikit-learn, found {path}: pip install scikit-learn")
    with gzip.open(path) as lines:
        return np.loadtxt(lines, delimiter=delimiter)
