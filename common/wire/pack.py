"""Conversion of orders and answers to Flower's records and back.

A message is one `ConfigRecord` that holds the weights as one run of bytes. Flower sends each record, array and chunk as
an object with its own request, so three objects per message instead of six halve the time of a small round. `unpack`
checks every field before any other code uses the message.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Hashable
from functools import cache
from operator import attrgetter
from types import UnionType
from typing import Any, ClassVar, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch
from flwr.app import ConfigRecord, RecordDict

from hyperbloom.common.compression import Codec
from hyperbloom.common.errors import ConfigError, WireError, printable
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.methods import Method
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import Failed

LONGEST_LAYOUT = 2**22
"""Most characters of names and shapes as JSON; ResNet-152 has about 30,000."""
LONGEST_REASON = 300
"""Characters that the server keeps of a client's error text."""
LARGEST = torch.finfo(torch.float32).max
"""Largest number of a message: torch multiplies tensors of float32 by no larger ones."""

LONGEST_TENSOR_NAME, MOST_DIMENSIONS, LONGEST_SIDE = 1000, 16, 2**40

_KEY, FAILED = "hyperbloom", "hyperbloom.failed"
_DTYPES = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
_WEIGHTS = ("tensors", "dtype", "values")

_TEXTS: dict[Any, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    Method: (Method.model_dump_json, Method.from_json),
    Codec: (attrgetter("name"), Codec.parse),
    Reason: (str, Reason),
}
"""What travels as text: how it is written, and how it is read."""

MessageT = TypeVar("MessageT")


def pack(message: Any) -> RecordDict:
    """Return the content of a Flower message for an order or an answer, which is a frozen dataclass."""
    key = FAILED if isinstance(message, Failed) else _KEY
    return RecordDict({key: ConfigRecord(_flat(message, ""), keep_input=False)})


def unpack(kind: type[MessageT], content: RecordDict) -> MessageT:
    """Read an order or an answer of type `kind` from the content of a Flower message.

    Raises:
        WireError: a field is missing, unknown, of the wrong type or not finite.
    """
    record = content.get(_KEY)
    if not isinstance(record, ConfigRecord):
        raise WireError(f"expected a record {_KEY!r} with a {kind.__name__}, found {sorted(content)}")
    return _read(kind, dict(record))


def unpack_answer(kind: type[MessageT], content: RecordDict) -> MessageT | Failed:
    """Read a client's answer, or its `Failed`; WireError as in `unpack`."""
    record = content.get(FAILED)
    if not isinstance(record, ConfigRecord):
        return unpack(kind, content)
    failed = _read(Failed, dict(record))
    # Only the server gives the reason CONTENT.
    return Failed(Reason.FAILED if failed.reason is Reason.CONTENT else failed.reason, shown(failed.text))


def shown(text: str) -> str:
    """Return what a client says as it may stand in a log or on a terminal: printable, and not too long."""
    return printable(text[:LONGEST_REASON])


def weigh(content: RecordDict) -> int:
    """Return the size of a message's values in bytes: the length of texts and bytes, eight for a number.

    Flower's framing adds about 2 kB for an order and its answer (`benchmarks/wire_bytes.py`).
    """
    values = (value for record in content.config_records.values() for value in record.values())
    items = (item for value in values for item in (value if isinstance(value, list) else [value]))
    return sum(len(item) if isinstance(item, str | bytes) else 8 for item in items)


def _flat(message: Any, prefix: str) -> dict[str, Any]:
    """Return the fields of a dataclass by name; nested fields have the name of their part as prefix."""
    record: dict[str, Any] = {}
    for field in dataclasses.fields(message):
        value, name = getattr(message, field.name), prefix + field.name
        if isinstance(value, Weights):
            record |= {_inside(name) + key: part for key, part in _pack_weights(value).items()}
        elif isinstance(value, tuple(_TEXTS)):
            record[name] = next(write(value) for kind, (write, _) in _TEXTS.items() if isinstance(value, kind))
        elif dataclasses.is_dataclass(value):
            record |= _flat(value, f"{name}.")
        elif value is not None:
            record[name] = list(value) if isinstance(value, tuple) else value
    return record


def _inside(name: str) -> str:
    """Return the prefix for the parts of `Weights`, which is empty for the field `weights`."""
    return "" if name == "weights" else f"{name}."


def _pack_weights(weights: Weights) -> dict[str, Any]:
    values = weights.values.detach().cpu()
    dtype = str(values.dtype).removeprefix("torch.")
    if dtype not in _DTYPES or sys.byteorder != "little":
        raise WireError(f"cannot send {values.dtype} from a {sys.byteorder}-endian machine; send float32")
    shapes = json.dumps(weights.layout.shapes, separators=(",", ":"))
    return {"tensors": shapes, "dtype": dtype, "values": values.numpy().tobytes()}


def _read(kind: type[MessageT], left: dict[str, Any]) -> MessageT:
    message = _take_fields(left, kind, "", kind.__name__)
    if left:
        raise WireError(f"{kind.__name__}: unknown field {sorted(left)[0]!r}")
    return message


@cache
def _fields(kind: Hashable) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field of a dataclass, and whether it may be None."""
    found: dict[str, tuple[Any, bool]] = {}
    for name, hint in get_type_hints(cast(type, kind)).items():
        if get_origin(hint) is ClassVar:
            continue
        optional = get_origin(hint) in (Union, UnionType) and type(None) in get_args(hint)
        found[name] = (get_args(hint)[0] if optional else hint, optional)
    return found


def _take_fields(left: dict[str, Any], kind: type[MessageT], prefix: str, owner: str) -> MessageT:
    return kind(
        **{
            name: _take(left, prefix + name, hint, optional, f"{owner}.{name}")
            for name, (hint, optional) in _fields(cast(Hashable, kind)).items()
        }
    )


def _take(left: dict[str, Any], name: str, kind: Any, optional: bool, where: str) -> Any:
    """Remove a field from `left` and return it as `kind`."""
    if dataclasses.is_dataclass(kind) and kind not in _TEXTS:  # a part, whose own fields travel
        inside = _inside(name) if kind is Weights else f"{name}."
        if optional and not any(key.startswith(inside) if inside else key in _WEIGHTS for key in left):
            return None
        assert isinstance(kind, type)
        return _unpack_weights(left, inside, where) if kind is Weights else _take_fields(left, kind, inside, where)
    if name not in left:
        if optional:
            return None
        raise WireError(f"{where} is missing")
    value = left.pop(name)
    if kind not in _TEXTS:
        return _typed(value, kind, where)
    try:
        return _TEXTS[kind][1](_typed(value, str, where))
    except ConfigError as error:
        raise WireError(f"order: {error}") from None


def _typed(value: Any, kind: Any, where: str) -> Any:
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        if not isinstance(value, list):
            raise WireError(f"{where}: expected a list, found {type(value).__name__}")
        return tuple(_typed(element, item, where) for element in value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise WireError(f"{where}: expected {kind.__name__}, found {type(value).__name__}")
    if kind is float and not abs(value) <= LARGEST:
        expected = f"at most {LARGEST:.1e} in size" if math.isfinite(value) else "a finite number"
        raise WireError(f"{where}: expected {expected}, found {value}")
    return value


def _unpack_weights(left: dict[str, Any], inside: str, where: str) -> Weights:
    tensors, dtype_name, raw = (left.pop(inside + key, None) for key in _WEIGHTS)
    tensors = _typed(tensors, str, f"{where}.tensors")
    if len(tensors) > LONGEST_LAYOUT:
        raise WireError(f"{where}.tensors: expected at most {LONGEST_LAYOUT} characters, found {len(tensors)}")
    dtype = _DTYPES.get(_typed(dtype_name, str, f"{where}.dtype"))
    raw = _typed(raw, bytes, f"{where}.values")
    if dtype is None:
        raise WireError(f"{where}.dtype: expected one of {', '.join(_DTYPES)}")
    try:
        shapes = tuple((name, tuple(shape)) for name, shape in json.loads(tensors))
    except (ValueError, TypeError, RecursionError):
        raise WireError(f"{where}.tensors: expected names and shapes as JSON, found {tensors[:60]!r}") from None
    if not all(_is_tensor(name, shape) for name, shape in shapes):
        raise WireError(f"{where}.tensors: expected names and whole lengths from 0, found {tensors[:60]!r}")
    layout = Layout(shapes)
    expected = layout.numel * dtype.itemsize
    if len(raw) != expected:
        raise WireError(f"{where}.values: expected {expected} bytes for {len(shapes)} tensors, found {len(raw)}")
    values = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return Weights(layout, values)


def _is_tensor(name: object, shape: tuple[object, ...]) -> bool:
    """Return whether a name is short and printable, and lengths are small enough to multiply quickly."""
    sound = type(name) is str and len(name) <= LONGEST_TENSOR_NAME and name.isprintable()
    return sound and len(shape) <= MOST_DIMENSIONS and all(type(n) is int and 0 <= n < LONGEST_SIDE for n in shape)
