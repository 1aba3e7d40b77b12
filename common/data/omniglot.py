"""Omniglot, 1,623 characters of 50 alphabets drawn by 20 people each, from one packed `omniglot.npz`.

B. Lake, R. Salakhutdinov, J. Tenenbaum, "Human-level concept learning through probabilistic program induction",
Science 2015, https://github.com/brendenlake/omniglot

The file has three arrays for the background set (`bg_`) and for the evaluation set (`ev_`). `bits` is `(n, 1379)`
bytes: each row is a drawing of 105 x 105 points, packed eight to a byte, paper 1 and ink 0. `label` is `(n,)`, an index
into `names`, which are `alphabet/characterNN`.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hyperbloom.common.data.draws import FIXED_SEED, IntArray, generator, three_parts
from hyperbloom.common.data.files import find_file, pick_arrays
from hyperbloom.common.data.pool import Block, Pool, Portion
from hyperbloom.common.data.scaling import AnyArray, Scaling
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.errors import DataError

FILE = "omniglot.npz"
KEYS = tuple(f"{part}_{key}" for part in ("bg", "ev") for key in ("bits", "label", "names"))
RAW = 105
PACKED = -(-RAW * RAW // 8)
SIDE = 28
NUM_CLASSES = 55  # characters of the largest alphabet
HOW = "It cannot be downloaded here: put it into {root}, with the keys " + ", ".join(KEYS) + "."
CHUNK = 512  # rows unpacked at once: 23 MB as float32


@dataclass(frozen=True)
class _PackedBlock:
    """Drawings as bits, unpacked and reduced to 28 x 28 on access; ink is 1, paper is 0.

    Args:
        bits: uint8 `(n, 1379)`.
    """

    bits: AnyArray

    def __len__(self) -> int:
        return len(self.bits)

    def take(self, rows: IntArray) -> AnyArray:
        """Return float32 `(len(rows), 1, 28, 28)`; each value is the share of ink on its area."""
        images = np.empty((len(rows), 1, SIDE, SIDE), np.float32)
        for start in range(0, len(rows), CHUNK):
            bits = np.unpackbits(self.bits[rows[start : start + CHUNK]], axis=1, count=RAW * RAW)
            ink = torch.from_numpy(1 - bits.reshape(-1, 1, RAW, RAW)).to(torch.float32)
            images[start : start + CHUNK] = torch.nn.functional.adaptive_avg_pool2d(ink, SIDE).numpy()
        return images


def read_omniglot(spec: DataSpec) -> Pool:
    """Return Omniglot, 1 x 28 x 28. A label is a character's number within its alphabet, and an alphabet is an owner.

    The drawings of each character are split 70 / 15 / 15 in the same way in every run.
    """
    path = find_file(spec.folder, FILE, HOW)
    arrays = pick_arrays(path, KEYS)
    for part in ("bg", "ev"):
        _check(arrays[f"{part}_bits"], arrays[f"{part}_label"], arrays[f"{part}_names"], f"{path}: {part}_")
    names = [str(name) for part in ("bg", "ev") for name in arrays[f"{part}_names"][arrays[f"{part}_label"]]]
    alphabets = sorted({name.partition("/")[0] for name in names})
    owners = np.array([alphabets.index(name.partition("/")[0]) for name in names], dtype=np.int64)
    labels = np.array([_character(name, path) for name in names], dtype=np.int64)
    blocks: tuple[Block, ...] = (_PackedBlock(arrays["bg_bits"]), _PackedBlock(arrays["ev_bits"]))
    whole = Portion(blocks, np.arange(len(labels), dtype=np.int64), labels, owners)
    parts = three_parts(owners * NUM_CLASSES + labels, 0.15, generator(FIXED_SEED, "omniglot"))
    train, val, test = (whole.choose(part) for part in parts)
    classes = tuple(f"character{number:02d}" for number in range(1, NUM_CLASSES + 1))
    return Pool(spec.data, train, val, test, classes, Scaling(), "alphabet", tuple(alphabets))


def _check(bits: AnyArray, labels: AnyArray, names: AnyArray, where: str) -> None:
    if bits.dtype != np.uint8 or bits.ndim != 2 or bits.shape[1] != PACKED:
        raise DataError(f"{where}bits: expected uint8 rows of {PACKED} bytes, found {bits.dtype} {bits.shape}")
    if labels.shape != (len(bits),) or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"{where}label: expected {len(bits)} integers, found {labels.dtype} {labels.shape}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(names):
        found = f"{labels.min()} to {labels.max()}"
        raise DataError(f"{where}label: expected 0 to {len(names) - 1}, an index into {where}names, found {found}")


def _character(name: str, path: Path) -> int:
    digits = name.partition("/")[2].removeprefix("character")
    if not digits.isdecimal() or not 1 <= int(digits) <= NUM_CLASSES:
        expected = f"alphabet/characterNN with NN from 01 to {NUM_CLASSES}"
        raise DataError(f"{path}: names: expected {expected}, found {name!r}")
    return int(digits) - 1
