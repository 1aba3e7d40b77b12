"""Random draws that every client repeats exactly, whatever its process, platform or hash seed."""

import hashlib

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

# Seed of the splits of registered data sets. All runs have the same test set, whatever their own seed.
FIXED_SEED = 0


def generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """Return the generator for one purpose in a run, such as `"dirichlet", 3`; two purposes never share a stream."""
    words = "/".join(str(word) for word in (seed, *purpose))
    return np.random.default_rng(int.from_bytes(hashlib.sha256(words.encode()).digest(), "big"))


def hold_out(strata: IntArray, count: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Choose `count` examples so that each stratum loses its proportion, give or take one example.

    Every `n / count`-th example is picked from a list ordered by the `strata` `(n,)`, usually the labels, and shuffled
    within each. Both the examples kept, `(n - count,)`, and held out, `(count,)`, are ascending indices.
    """
    size = len(strata)
    order = np.lexsort((rng.random(size), strata))
    position = np.arange(size, dtype=np.int64)
    picked = (position + 1) * count // max(size, 1) > position * count // max(size, 1)
    return np.sort(order[~picked]), np.sort(order[picked])


def three_parts(strata: IntArray, share: float, rng: np.random.Generator) -> tuple[IntArray, IntArray, IntArray]:
    """Split into train, validation and test, the latter two with a `share` of the examples each, from 0 to 0.5.

    `strata` `(n,)` are usually the labels. The ascending indices of the three parts together hold all of `0 .. n - 1`.
    """
    count = max(1, round(share * len(strata))) if len(strata) >= 3 else 0
    rest, test = hold_out(strata, count, rng)
    kept, val = hold_out(strata[rest], count, rng)
    return rest[kept], rest[val], test
