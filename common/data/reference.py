"""Reference sets: public or synthetic inputs, without labels."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor, cat

from hyperbloom.common.data.draws import generator
from hyperbloom.common.data.files import read_arrays
from hyperbloom.common.data.own import check_pair
from hyperbloom.common.data.pool import Portion
from hyperbloom.common.data.registry import read_pool
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.data.spec import DataSpec


def read_reference(spec: DataSpec, most: int) -> Tensor:
    """Return up to `most` inputs of a data set, float32 `(n, *shape)`, which depend only on the seed.

    Args:
        spec: any data set that a client can name, of which all portions count, or an `.npz` with only the key x.
        most: number of inputs above which that many are drawn at random.

    Raises:
        DataError: the set cannot be found or read.
    """
    portions, scaling = _portions(spec)
    sizes = [len(portion) for portion in portions]
    drawn = generator(spec.seed, "unlabelled").permutation(sum(sizes))[:most]
    starts = np.cumsum([0, *sizes])
    chosen = []
    for portion, start in zip(portions, starts, strict=False):
        here = np.sort(drawn[(drawn >= start) & (drawn < start + len(portion))]) - start
        if len(here):
            chosen.append(portion.choose(here).examples(scaling).inputs)
    return cat(chosen)


def _portions(spec: DataSpec) -> tuple[list[Portion], Scaling]:
    path = Path(spec.data).expanduser()
    if spec.data.endswith(".npz") and path.is_file():
        arrays = read_arrays(path)
        if set(arrays) == {"x"}:
            x = arrays["x"]
            nothing = np.zeros(len(x), dtype=np.int64)
            made = check_pair(x, nothing, f"{path}: key 'x'", f"{path}: no labels")
            return [made], Scaling(255.0 if x.dtype == np.uint8 else 1.0)
    pool = read_pool(replace(spec, partition=None))
    return list(pool.portions.values()), pool.scaling
