"""Users' own data: checks and splits that all kinds share, `.npz` files, and functions.

A function is named by `package.module:function` or by a plug-in.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from hyperbloom.common.data.draws import IntArray, generator, hold_out, three_parts
from hyperbloom.common.data.examples import ClientData
from hyperbloom.common.data.files import read_arrays
from hyperbloom.common.data.labels import as_labels
from hyperbloom.common.data.pool import Pool, Portion
from hyperbloom.common.data.scaling import AnyArray, Scaling
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.errors import DataError, describe, printable
from hyperbloom.common.program.plugins import Plugin, current_directory, find_function

log = logging.getLogger("hyperbloom.client")

CHANNELS = (1, 3, 4)

Units = Mapping[str, Sequence[AnyArray]]
"""Names of `owners` and `groups`, either or both, for each example of each portion."""
FEWEST_OF_OWNER = 7
"""Examples of an owner from which a split of 70 / 15 / 15 leaves it some in each part."""
BYTES = Scaling(255.0)
"""The scaling of users' bytes."""


def check_pair(inputs: AnyArray, labels: AnyArray, inputs_name: str, labels_name: str) -> Portion:
    """Check a user's inputs as `check_inputs` does, and labels as `as_labels`; DataError also if they do not fit.

    Both names are for errors, such as `"my.npz: key 'x'"`.
    """
    stored = check_inputs(inputs, inputs_name)
    checked = as_labels(labels, labels_name)
    if len(stored) != len(checked):
        raise DataError(f"{labels_name}: expected {len(stored)} labels, as {inputs_name}, found {len(checked)}")
    if checked.ndim == 3 and checked.shape[1:] != stored.shape[2:]:
        raise DataError(f"{labels_name}: expected masks as large as the images, found {checked.shape[1:]}")
    return Portion.of(stored, checked)


def check_inputs(inputs: AnyArray, name: str) -> AnyArray:
    """Return a user's inputs as `(N, C, H, W)` or `(N, F)`: bytes unchanged, all other types as float32.

    They may also be `(N, H, W)`, or `(N, H, W, C)` of uint8.

    Raises:
        DataError: They have a wrong type or shape, or values that are not finite.
    """
    if inputs.dtype.kind not in "uifb":
        raise DataError(f"{name}: expected numbers, found dtype {inputs.dtype}")
    if inputs.ndim not in (2, 3, 4) or 0 in inputs.shape[1:]:
        expected = "(N, F), (N, H, W), (N, H, W, C) of uint8, or (N, C, H, W)"
        raise DataError(f"{name}: expected shape {expected}, found {inputs.shape}")
    if inputs.dtype == np.uint8:
        return _channels_first(inputs, name)
    with np.errstate(over="ignore"):
        converted = inputs.astype(np.float32)
    wrong = np.argwhere(~np.isfinite(converted))
    if len(wrong):
        found = f"{len(wrong)} of {inputs.size} that are not, the first at {wrong[0].tolist()}"
        raise DataError(f"{name}: expected finite float32 numbers, found {found}")
    if converted.ndim == 3:
        return converted[:, None]
    if converted.ndim == 4 and converted.shape[3] in CHANNELS and converted.shape[1] not in CHANNELS:
        raise DataError(f"{name}: expected floats as (N, C, H, W), found {inputs.shape}; transpose(0, 3, 1, 2) it")
    return converted


def _channels_first(images: AnyArray, name: str) -> AnyArray:
    if images.ndim == 2:
        return images
    if images.ndim == 3:
        return images[:, None]
    if images.shape[3] in CHANNELS:
        return images.transpose(0, 3, 1, 2)
    if images.shape[1] in CHANNELS:
        return images
    raise DataError(f"{name}: expected uint8 images as (N, H, W, C) with C of {CHANNELS}, found {images.shape}")


def check_parts(parts: Sequence[Portion], names: Sequence[str]) -> None:
    """Raise a DataError unless inputs and labels of all parts have the shape and the stored type of the first one."""
    nothing = np.arange(0)
    first, labels = parts[0].blocks[0][nothing], parts[0].labels
    for part, name in zip(parts, names, strict=True):
        other = part.blocks[0][nothing]
        if other.shape[1:] != first.shape[1:] or other.dtype != first.dtype:
            expected = f"{first.dtype} inputs of shape {first.shape[1:]} as {names[0]}"
            raise DataError(f"{name}: expected {expected}, found {other.dtype} {other.shape[1:]}")
        if part.labels.shape[1:] != labels.shape[1:] or part.labels.dtype != labels.dtype:
            expected = f"labels of {labels.dtype} {labels.shape[1:]} as {names[0]}"
            raise DataError(f"{name}: expected {expected}, found {part.labels.dtype} {part.labels.shape[1:]}")


def with_units(portions: Sequence[Portion], units: Units, name: str) -> tuple[list[Portion], list[str]]:
    """Return portions with their owners and groups, numbered alike in all of them, and the owners' names.

    Raises:
        DataError: There is not one string or integer for each example.
    """
    made, names = list(portions), {"owners": list[str]()}
    ends = np.cumsum([len(portion) for portion in portions])
    for kind, values in units.items():
        for each, portion in zip(values, portions, strict=True):
            if each.shape != (len(portion),) or each.dtype.kind not in "uiU":
                expected = f"{len(portion)} {kind}, strings or integers"
                raise DataError(f"{name}: expected {expected}, found {each.dtype} {each.shape}")
        found, of = np.unique(np.concatenate(values), return_inverse=True)
        numbers, names[kind] = np.split(of.astype(np.int64), ends[:-1]), [str(each) for each in found]
        pairs = zip(made, numbers, strict=True)
        made = [replace(p, owners=n) if kind == "owners" else replace(p, groups=n) for p, n in pairs]
    return made, names["owners"]


def build_pool(
    name: str,
    portions: Mapping[str, Portion],
    seed: int,
    class_names: Sequence[str] | None,
    units: Units = MappingProxyType({}),
) -> Pool:
    """Join portions into a pool. Bytes are scaled to 0 .. 1; floats stay as they are.

    A single portion is split 70 / 15 / 15. Of training and test examples, a fifth of the training ones is held out for
    validation. Both are in proportion to the strata, depend only on the seed, and cut no group. If an owner would be
    left without a part, though all have `FEWEST_OF_OWNER`, they are in proportion to owners and strata.

    Args:
        name: Name of the data in errors.
        portions: By its name in errors, all examples; training and test; or training, validation and test.
        seed: Seed of what is held out.
        class_names: One name for each class, label or number, or None to number them.
        units: Owners and groups of the examples.

    Raises:
        DataError: Portions differ in shape or type, or have too few examples; there are not as many names as classes;
            or a group is in two portions or has two owners.
    """
    parts, owner_names = with_units(list(portions.values()), units, name)
    check_parts(parts, list(portions))
    whole, *others = parts
    if len(portions) < 3:
        least = 3 - len(others)
        size, what = (len(whole), "examples") if whole.groups is None else (len(np.unique(whole.groups)), "groups")
        if size < least:
            raise DataError(f"{next(iter(portions))}: expected at least {least} {what} to split, found {size}")

        def cut(strata: IntArray) -> tuple[IntArray, ...]:
            rng = generator(seed, "own data", "validation" if others else "three parts")
            return hold_out(strata, max(1, len(strata) // 5), rng) if others else three_parts(strata, 0.15, rng)

        train, val, *rest = whole.split(cut)
        if whole.owners is not None and np.bincount(whole.owners).min() >= FEWEST_OF_OWNER:
            there = [np.unique(part.owners) for part in (val, *rest) if part.owners is not None]
            if any(len(owners) < len(owner_names) for owners in there):
                train, val, *rest = whole.split(cut, by_owner=True)
        (test,) = others or rest
    else:
        train, val, test = parts
    scaling = BYTES if train.blocks[0][np.arange(0)].dtype == np.uint8 else Scaling(1.0)
    pool = Pool(name, train, val, test, (), scaling, tuple(owner_names))
    least = pool.least_outputs
    # Spreadsheets have spaces that do not break.
    names = tuple(map(printable, map(str, range(least) if class_names is None else class_names)))
    if len(names) < least or (len(names) > least and train.labels.dtype.kind == "f"):
        raise DataError(f"{name}: expected a name for each of {least} classes, found {len(names)}")
    if len(set(names)) < len(names):
        raise DataError(f"{name}: expected each class name once, found {', '.join(names)}")
    check_groups(name, (train, val, test))
    return replace(pool, class_names=names)


def check_groups(name: str, portions: Sequence[Portion]) -> None:
    """Raise a DataError if a group is in two portions or has two owners."""
    places: dict[int, tuple[int, int]] = {}
    for part, portion in enumerate(portions):
        groups = [] if portion.groups is None else portion.groups.tolist()
        owners = repeat(0) if portion.owners is None else portion.owners.tolist()
        for group, owner in zip(groups, owners, strict=False):
            if places.setdefault(group, (part, owner)) != (part, owner):
                raise DataError(
                    f"{name}: expected each group in one of train, val and test, and with one owner; "
                    "found a group in two, or with two"
                )


_KEYS = """x and y; or x_train, y_train, x_test, y_test, with x_val, y_val or without; or MedMNIST's train_images,
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
    names = _names_of(arrays, path)
    parts = [end for end in ("_train", "_val", "_test") if f"x{end}" in arrays or f"y{end}" in arrays]
    whole = {"x", "y"} & arrays.keys()
    wanted = {f"{letter}{end}" for end in ([""] if whole else {*parts, "_train", "_test"}) for letter in "xy"}
    if not wanted <= arrays.keys() or (whole and parts):
        raise DataError(f"{path}: expected the keys {_KEYS}; found {', '.join(sorted(found)) or 'none'}")
    parts = [""] if whole else parts
    more = {"class_names", *(f"{kind}{end}" for kind in ("owner", "group") for end in parts)}
    if unused := sorted(arrays.keys() - wanted - more):
        log.warning("%s: not used: %s; who the examples are of is in owner and group", path, ", ".join(unused))
    keys = [(f"{path}: key 'x{end}'", f"{path}: key 'y{end}'") for end in parts]
    named = {x: check_pair(arrays[f"x{end}"], arrays[f"y{end}"], x, y) for end, (x, y) in zip(parts, keys, strict=True)}
    units = {f"{kind}s": [arrays[key] for key in _keys_of(arrays, kind, parts, path)] for kind in ("owner", "group")}
    return build_pool(str(path), named, spec.seed, names, {kind: values for kind, values in units.items() if values})


def _keys_of(arrays: dict[str, AnyArray], kind: str, parts: list[str], path: Path) -> list[str]:
    """Return the keys of the owners or groups of all parts, none if the file has none."""
    there = [f"{kind}{end}" for end in parts if f"{kind}{end}" in arrays]
    if there and len(there) < len(parts):
        raise DataError(f"{path}: expected {kind} for each of {', '.join(parts)}, found {', '.join(there)}")
    return there


def _names_of(arrays: dict[str, AnyArray], path: Path) -> list[str] | None:
    names = arrays.get("class_names")
    if names is None:
        return None
    if names.ndim != 1 or names.dtype.kind != "U":
        raise DataError(f"{path}: key 'class_names': expected strings (K,), found {names.dtype} {names.shape}")
    return [str(name) for name in names]


_WHAT = "a function without arguments"
_EXPECTED = "expected (train, val, test), each a pair (inputs, labels) of arrays or tensors, or a ClientData"


def read_function(spec: DataSpec, plugin: Plugin | None = None) -> Pool:
    """Import and call a plug-in's function, or the function `spec.data`, for which the current directory is importable.

    Raises:
        DataError: It cannot be imported, fails, or returns no valid data.
    """
    with current_directory():
        return _pool(plugin.load(_WHAT, DataError) if plugin else find_function(spec.data, _WHAT, DataError), spec.data)


def _pool(function: Callable[[], object], name: str) -> Pool:
    try:
        value = function()
    except Exception as error:
        raise DataError(f"{name}: expected data, found that the function fails with {describe(error)}") from error
    if isinstance(value, Pool):
        return value
    if isinstance(value, ClientData):
        train, val, test = (
            replace(Portion.of(part.inputs.cpu().numpy(), part.labels.cpu().numpy()), groups=part.groups)
            for part in (value.train, value.val, value.test)
        )
        return Pool(name, train, val, test, value.class_names, Scaling(1.0))
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise DataError(f"{name}: {_EXPECTED}; found {describe(value)}")
    named = zip((f"{name}: {part}" for part in ("train", "val", "test")), value, strict=True)
    return build_pool(name, {f"{part} inputs": _pair(pair, part) for part, pair in named}, 0, None)


def _pair(pair: object, name: str) -> Portion:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(f"{name}: {_EXPECTED}; found {describe(pair)}")
    inputs_name, labels_name = f"{name} inputs", f"{name} labels"
    return check_pair(_array(pair[0], inputs_name), _array(pair[1], labels_name), inputs_name, labels_name)


def _array(value: object, name: str) -> AnyArray:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        # Convert to float32 here, because numpy has no bfloat16.
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if isinstance(value, np.ndarray):
        return value
    raise DataError(f"{name}: {_EXPECTED}; found {describe(value)}")
