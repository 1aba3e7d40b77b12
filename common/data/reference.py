"""Inputs alone: a public or synthetic set whose labels, if it has any, do not matter."""

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

__all__ = ["read_reference"]


def read_reference(spec: DataSpec, most: int) -> Tensor:
    """Return up to `most` inputs of a data set, float32 `(n, *shape)`: the same ones for equal seeds, in their order.

    Args:
        spec: what any client can name, of which all portions are taken together; or an `.npz` with the key x alone.
        most: inputs beyond which some are drawn at random, without regard to labels.

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
            made = check_pair(x, nothing, f"{path}: key 'x'", f"{path}: no labels").portion
            return [made], Scaling(255.0 if x.dtype == np.uint8 else 1.0)
    pool = read_pool(replace(spec, partition=None))
    return list(pool.portions.values()), pool.scaling
