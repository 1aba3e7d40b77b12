"""Users' own data in one `.npz` file of numpy arrays."""

from pathlib import Path

from hyperbloom.common.data.files import read_arrays
from hyperbloom.common.data.own import Labelled, build_pool, check_pair, check_parts, split_three, split_train
from hyperbloom.common.data.pool import Pool
from hyperbloom.common.data.scaling import AnyArray
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.errors import DataError

__all__ = ["read_npz"]

FORMS = "x and y; or x_train, y_train, x_test, y_test, with x_val, y_val or without; class_names may be added"


def read_npz(spec: DataSpec) -> Pool:
    """Read the file `spec.data`.

    With the keys `x, y` the examples are split 70 / 15 / 15. With `x_train, y_train, x_test, y_test` a fifth of the
    training examples is held out unless there are `x_val, y_val`. Splits depend only on the seed.

    Raises:
        DataError: The file is missing or corrupt, or a key is missing or has an unusable value.
    """
    path = Path(spec.data).expanduser()
    if not path.is_file():
        raise DataError(
            f"{path}: expected an .npz file, found no file of this name; it is looked for from {Path.cwd()}"
        )
    arrays = read_arrays(path)
    names = _class_names(arrays, path)
    if {"x", "y"} <= arrays.keys():
        whole = _pair(arrays, "", path)
        return build_pool(str(path), split_three(whole, f"{path}: key 'x'", spec.seed), names)
    parts = [suffix for suffix in ("_train", "_val", "_test") if f"x{suffix}" in arrays or f"y{suffix}" in arrays]
    wanted = [f"{letter}{suffix}" for suffix in {"_train", "_test", *parts} for letter in "xy"]
    if not set(wanted) <= arrays.keys():
        raise DataError(f"{path}: expected the keys {FORMS}; found {', '.join(sorted(arrays)) or 'none'}")
    labelled = [_pair(arrays, suffix, path) for suffix in parts]
    check_parts(labelled, [f"{path}: key 'x{suffix}'" for suffix in parts])
    first, *val, test = labelled
    held = [first.portion, val[0].portion] if val else split_train(first, f"{path}: key 'x_train'", spec.seed)
    return build_pool(str(path), [*held, test.portion], names)


def _pair(arrays: dict[str, AnyArray], suffix: str, path: Path) -> Labelled:
    x, y = f"x{suffix}", f"y{suffix}"
    return check_pair(arrays[x], arrays[y], f"{path}: key '{x}'", f"{path}: key '{y}'")


def _class_names(arrays: dict[str, AnyArray], path: Path) -> list[str] | None:
    names = arrays.get("class_names")
    if names is None:
        return None
    if names.ndim != 1 or names.dtype.kind != "U":
        raise DataError(f"{path}: key 'class_names': expected strings (K,), found {names.dtype} {names.shape}")
    return [str(name) for name in names]
