"""Omniglot, which clients name as `figures.omniglot:read`: 1,623 characters of 50 alphabets, drawn by 20 people each.

B. Lake, R. Salakhutdinov, J. Tenenbaum, "Human-level concept learning through probabilistic program induction",
Science 2015, https://github.com/brendenlake/omniglot

It is read from one packed `omniglot.npz` with three arrays for the background set (`bg_`) and for the evaluation set
(`ev_`). `bits` is `(n, 1379)` bytes: each row is a drawing of 105 x 105 points, packed eight to a byte, paper 1 and ink
0. `label` is `(n,)`, an index into `names`, which are `alphabet/character`.
"""

from dataclasses import dataclass

import numpy as np
import torch

from figures.files import find_file
from figures.stand_ins import pick_arrays
from hyperbloom.common.data import DataSpec
from hyperbloom.common.data.draws import FIXED_SEED, IntArray, generator, three_parts
from hyperbloom.common.data.pool import Pool, Portion
from hyperbloom.common.data.scaling import AnyArray, Scaling
from hyperbloom.common.errors import DataError

FILE = "omniglot.npz"
KEYS = tuple(f"{part}_{key}" for part in ("bg", "ev") for key in ("bits", "label", "names"))
RAW = 105
PACKED = -(-RAW * RAW // 8)
SIDE = 28
HOW = f"It cannot be downloaded here: put it into {{root}}, with the keys {', '.join(KEYS)}."
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

    def __getitem__(self, rows: IntArray, /) -> AnyArray:
        """Return float32 `(len(rows), 1, 28, 28)`; each value is the share of ink on its area."""
        images = np.empty((len(rows), 1, SIDE, SIDE), np.float32)
        for start in range(0, len(rows), CHUNK):
            bits = np.unpackbits(self.bits[rows[start : start + CHUNK]], axis=1, count=RAW * RAW)
            ink = torch.from_numpy(1 - bits.reshape(-1, 1, RAW, RAW)).to(torch.float32)
            images[start : start + CHUNK] = torch.nn.functional.adaptive_avg_pool2d(ink, SIDE).numpy()
        return images


def read() -> Pool:
    """Return Omniglot, 1 x 28 x 28. An alphabet is an owner, so `split: owner` with 50 clients gives each an alphabet.

    A label is one of 1,623 characters, so clients' labels are disjoint, as in pFedHN's section 5.1. For so many classes
    no confusion matrix is sent. The drawings of each character are split 70 / 15 / 15 in the same way in every run.
    """
    path = find_file(DataSpec().folder, FILE, HOW)
    arrays = pick_arrays(path, KEYS)
    for part in ("bg", "ev"):
        _check(arrays[f"{part}_bits"], arrays[f"{part}_label"], arrays[f"{part}_names"], f"{path}: {part}_")
    drawn = np.concatenate([arrays[f"{part}_names"][arrays[f"{part}_label"]] for part in ("bg", "ev")])
    names, character = np.unique(drawn, return_inverse=True)
    alphabets, alphabet = np.unique([name.partition("/")[0] for name in names.tolist()], return_inverse=True)
    blocks = (_PackedBlock(arrays["bg_bits"]), _PackedBlock(arrays["ev_bits"]))
    whole = Portion(blocks, np.arange(len(drawn), dtype=np.int64), character, alphabet[character])
    train, val, test = map(whole.choose, three_parts(character, 0.15, generator(FIXED_SEED, "omniglot")))
    return Pool("omniglot", train, val, test, tuple(names.tolist()), Scaling(1.0), tuple(alphabets.tolist()))


def _check(bits: AnyArray, labels: AnyArray, names: AnyArray, where: str) -> None:
    if bits.dtype != np.uint8 or bits.ndim != 2 or bits.shape[1] != PACKED:
        raise DataError(f"{where}bits: expected uint8 rows of {PACKED} bytes, found {bits.dtype} {bits.shape}")
    if labels.shape != (len(bits),) or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"{where}label: expected {len(bits)} integers, found {labels.dtype} {labels.shape}")
    if names.ndim != 1 or names.dtype.kind != "U" or not all("/" in name for name in names.tolist()):
        raise DataError(f"{where}names: expected strings alphabet/character, found {names.dtype} {names.tolist()[:3]}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(names):
        found = f"{labels.min()} to {labels.max()}"
        raise DataError(f"{where}label: expected 0 to {len(names) - 1}, an index into {where}names, found {found}")
