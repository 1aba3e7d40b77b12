"""Users' own data from a function of theirs, named `package.module:function`."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hyperbloom.common.data.examples import ClientData, Examples
from hyperbloom.common.data.own import Labelled, build_pool, check_pair, check_parts
from hyperbloom.common.data.pool import AnyArray, ArrayBlock, Pool, Portion, Scaling
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.errors import DataError

__all__ = ["read_function"]

PARTS = ("train", "val", "test")
EXPECTED = "expected (train, val, test), each a pair (inputs, labels) of arrays or tensors, or a ClientData"


def read_function(spec: DataSpec) -> Pool:
    """Import and call the function `spec.data`; the current directory is importable meanwhile.

    Raises:
        DataError: It cannot be imported, fails, or returns something else than data.
    """
    with _current_directory():
        value = _call(_import(spec.data), spec.data)
    if isinstance(value, ClientData):
        return _from_client_data(value, spec.data)
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise DataError(f"{spec.data}: {EXPECTED}; found {_describe(value)}")
    return _from_pairs(value, spec.data)


@contextmanager
def _current_directory() -> Iterator[None]:
    # An installed command does not search the folder that it is started in.
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _import(name: str) -> Callable[[], object]:
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        searched = f"searched from {Path.cwd()}"
        raise DataError(f"{name}: expected to import {module_name!r}, found {_describe(error)}; {searched}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise DataError(f"{name}: expected a function {attribute!r} in {module_name!r}, found no such name")
        found = getattr(found, part)
    if not callable(found):
        raise DataError(f"{name}: expected a function without arguments, found {_describe(found)}")
    function: Callable[[], object] = found
    return function


def _call(function: Callable[[], object], name: str) -> object:
    try:
        return function()
    except Exception as error:
        raise DataError(f"{name}: expected data, found that the function fails with {_describe(error)}") from error


def _describe(value: object) -> str:
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__


def _from_pairs(value: tuple[object, ...] | list[object], name: str) -> Pool:
    checked = [_pair(pair, f"{name}: {part}") for part, pair in zip(PARTS, value, strict=True)]
    check_parts(checked, [f"{name}: {part} inputs" for part in PARTS])
    return build_pool(name, [labelled.portion for labelled in checked], None)


def _pair(pair: object, name: str) -> Labelled:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(f"{name}: {EXPECTED}; found {_describe(pair)}")
    inputs_name, labels_name = f"{name} inputs", f"{name} labels"
    return check_pair(_array(pair[0], inputs_name), _array(pair[1], labels_name), inputs_name, labels_name)


def _array(value: object, name: str) -> AnyArray:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        # numpy has no bfloat16, and float32 is what the tensor becomes in any case
        array: AnyArray = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        return array
    if isinstance(value, np.ndarray):
        return value
    raise DataError(f"{name}: {EXPECTED}; found {_describe(value)}")


def _from_client_data(data: ClientData, name: str) -> Pool:
    train, val, test = (_portion(part) for part in (data.train, data.val, data.test))
    return Pool(name, train, val, test, data.class_names, Scaling())


def _portion(examples: Examples) -> Portion:
    labels = examples.labels.cpu().numpy()
    return Portion((ArrayBlock(examples.inputs.cpu().numpy()),), np.arange(len(labels), dtype=np.int64), labels)
