"""Users' own data in one `.npz` file of numpy arrays."""

from pathlib import Path

from hyperbloom.common.data.files import read_arrays
from hyperbloom.common.data.own import build_pool, check_pair
from hyperbloom.common.data.pool import Pool
from hyperbloom.common.data.scaling import AnyArray
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.errors import DataError

FORMS = """x and y; or x_train, y_train, x_test, y_test, with x_val, y_val or without; or MedMNIST's train_images,
train_labels, ...; class_names may be added, and owner and group with the same endings as y""".replace("\n", " ")

MEDMNIST = {
    f"{part}_{theirs}": f"{ours}_{part}"
    for part in ("train", "val", "test")
    for theirs, ours in (("images", "x"), ("labels", "y"))
}
"""Our names of the arrays in the files of J. Yang et al., "MedMNIST v2", 2023, https://doi.org/10.1038/s41597-022-01721-8."""


def read_npz(spec: DataSpec) -> Pool:
    """Read the file `spec.data`.

    It has the keys `x, y`, or `x_train, y_train, x_test, y_test` and perhaps `x_val, y_val`. `build_pool` holds out
    what is missing.
    """
    path = Path(spec.data).expanduser()
    if not path.is_file():
        raise DataError(f"{path}: expected an .npz file, found none of this name; it is looked for from {Path.cwd()}")
    found = read_arrays(path)
    arrays = {MEDMNIST.get(key, key): array for key, array in found.items()}
    names = _class_names(arrays, path)
    parts = [end for end in ("_train", "_val", "_test") if f"x{end}" in arrays or f"y{end}" in arrays]
    whole = {"x", "y"} & arrays.keys()
    wanted = {f"{letter}{end}" for end in ([""] if whole else {*parts, "_train", "_test"}) for letter in "xy"}
    if not wanted <= arrays.keys() or (whole and parts):
        raise DataError(f"{path}: expected the keys {FORMS}; found {', '.join(sorted(found)) or 'none'}")
    parts = [""] if whole else parts
    keys = [(f"{path}: key 'x{end}'", f"{path}: key 'y{end}'") for end in parts]
    named = {x: check_pair(arrays[f"x{end}"], arrays[f"y{end}"], x, y) for end, (x, y) in zip(parts, keys, strict=True)}
    units = {f"{kind}s": [arrays[key] for key in _each(arrays, kind, parts, path)] for kind in ("owner", "group")}
    return build_pool(str(path), named, spec.seed, names, {kind: values for kind, values in units.items() if values})


def _each(arrays: dict[str, AnyArray], kind: str, parts: list[str], path: Path) -> list[str]:
    """Return the keys of the owners or groups of all parts, none if the file has none."""
    there = [f"{kind}{end}" for end in parts if f"{kind}{end}" in arrays]
    if there and len(there) < len(parts):
        raise DataError(f"{path}: expected {kind} for each of {', '.join(parts)}, found {', '.join(there)}")
    return there


def _class_names(arrays: dict[str, AnyArray], path: Path) -> list[str] | None:
    names = arrays.get("class_names")
    if names is None:
        return None
    if names.ndim != 1 or names.dtype.kind != "U":
        raise DataError(f"{path}: key 'class_names': expected strings (K,), found {names.dtype} {names.shape}")
    return [str(name) for name in names]
