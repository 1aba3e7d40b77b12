"""Users' own data from a function, which `package.module:function` or a plug-in names."""

from collections.abc import Callable

import numpy as np
import torch

from hyperbloom.common.data.examples import ClientData
from hyperbloom.common.data.own import build_pool, check_pair
from hyperbloom.common.data.pool import ArrayBlock, Pool, Portion
from hyperbloom.common.data.scaling import AnyArray, Scaling
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.errors import DataError
from hyperbloom.common.program.importing import current_directory, describe, find_function
from hyperbloom.common.program.plugins import Plugin

PARTS = ("train", "val", "test")
_WHAT = "a function without arguments"
EXPECTED = "expected (train, val, test), each a pair (inputs, labels) of arrays or tensors, or a ClientData"


def read_function(spec: DataSpec) -> Pool:
    """Import and call the function `spec.data`. The current directory is importable during the call."""
    with current_directory():
        return _pool(find_function(spec.data, _WHAT, DataError), spec.data)


def read_plugin(plugin: Plugin) -> Pool:
    """Import and call a plug-in's function; DataError if it cannot be imported, fails, or returns no valid data."""
    return _pool(plugin.load(_WHAT, DataError), plugin.name)


def _pool(function: Callable[[], object], name: str) -> Pool:
    try:
        value = function()
    except Exception as error:
        raise DataError(f"{name}: expected data, found that the function fails with {describe(error)}") from error
    if isinstance(value, Pool):
        return value
    if isinstance(value, ClientData):
        train, val, test = (
            Portion.of(ArrayBlock(part.inputs.cpu().numpy()), part.labels.cpu().numpy())
            for part in (value.train, value.val, value.test)
        )
        return Pool(name, train, val, test, value.class_names, Scaling(1.0))
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise DataError(f"{name}: {EXPECTED}; found {describe(value)}")
    named = zip((f"{name}: {part}" for part in PARTS), value, strict=True)
    checked = {f"{part} inputs": _pair(pair, part) for part, pair in named}
    return build_pool(name, checked, 0, None)


def _pair(pair: object, name: str) -> Portion:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(f"{name}: {EXPECTED}; found {describe(pair)}")
    inputs_name, labels_name = f"{name} inputs", f"{name} labels"
    return check_pair(_array(pair[0], inputs_name), _array(pair[1], labels_name), inputs_name, labels_name)


def _array(value: object, name: str) -> AnyArray:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        # Convert to float32 here, because numpy has no bfloat16.
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if isinstance(value, np.ndarray):
        return value
    raise DataError(f"{name}: {EXPECTED}; found {describe(value)}")
