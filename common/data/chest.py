"""A thousand chest X-rays, 500 with pneumonia and 500 without finding, from one `nih_chestxray_1000.npz`.

They are part of X. Wang et al., "ChestX-ray8", CVPR 2017, https://arxiv.org/abs/1705.02315 (112,120 images, 14 labels).
The file holds `x`: uint8 `(N, 128, 128)`, `y`: `(N,)`, 1 for pneumonia, and `patient`: `(N,)`.
"""

from dataclasses import replace

from hyperbloom.common.data.draws import FIXED_SEED, generator, three_parts
from hyperbloom.common.data.files import check_labels, missing, read_arrays
from hyperbloom.common.data.own import check_pair, number
from hyperbloom.common.data.pool import Pool
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.errors import DataError

__all__ = ["read_chest"]

FILE = "nih_chestxray_1000.npz"
KEYS = ("x", "y", "patient")
CLASSES = ("no finding", "pneumonia")
SIDE = 128
HOW = f"It cannot be downloaded here: put it into {{root}}, with the keys {', '.join(KEYS)}."


def read_chest(spec: DataSpec) -> Pool:
    """Return the X-rays, 1 x 128 x 128 in two classes. All images of a patient are in the same portion.

    Raises:
        DataError: The file is missing or corrupt.
    """
    path = spec.folder / FILE
    if not path.is_file():
        raise missing(FILE, [path], spec.folder, HOW)
    arrays = read_arrays(path)
    if not set(KEYS) <= arrays.keys():
        raise DataError(f"{path}: expected the keys {', '.join(KEYS)}, found {', '.join(arrays)}")
    whole = check_pair(arrays["x"], arrays["y"], f"{path}: key 'x'", f"{path}: key 'y'")
    check_labels(whole.labels, len(CLASSES), path)
    patients = arrays["patient"]
    if arrays["x"].shape[1:] != (SIDE, SIDE) or patients.shape != (len(whole),):
        found = f"{arrays['x'].shape} and {patients.shape}"
        raise DataError(f"{path}: expected images (N, {SIDE}, {SIDE}) and as many patients, found {found}")
    (groups,), _ = number([patients], [whole], f"{path}: key 'patient'")
    rng = generator(FIXED_SEED, "chest")
    train, val, test = replace(whole, groups=groups).split(lambda strata: three_parts(strata, 0.15, rng))
    return Pool(spec.data, train, val, test, CLASSES, Scaling(255.0))
