"""The node of a computation graph for each module, function and method of torch.

Modules and functions share one table: `nn.MaxPool2d` and `F.max_pool2d` are looked up as `maxpool2d`, `Tensor.add_` as
`add`. Operations that only move, drop or repeat values (`PASSES`) have no node.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from hyperbloom.common.graphs.layer import ACTIVATIONS, CELLS, CONVOLUTIONS, NORMS, POOLS, LayerType

PASSES = frozenset(
    {"alphadropout", "clone", "contiguous", "dropout", "dropout1d", "dropout2d", "dropout3d", "featurealphadropout"}
    | {"flatten", "float", "identity", "reshape", "squeeze", "stochasticdepth", "to", "unflatten", "unsqueeze", "view"}
    | {"expand", "getrelativepositionbias", "repeat"}
)
"""Names of operations without a node. The next operation reads their input."""

_NAMES = {
    "add": "add iadd",
    "sub": "sub isub subtract rsub",
    "mul": "mul imul multiply",
    "div": "div truediv itruediv divide",
    "matmul": "matmul imatmul bmm einsum",
    "attention": "scaleddotproductattention shiftedwindowattention",
    "concat": "cat concat concatenate stack",
    "mean": "mean sum amax amin",
    "permute": "permute transpose movedim swapaxes pixelshuffle pixelunshuffle patchmergingpad channelshuffle",
    "split": "chunk split tensorsplit unbind narrow select getitem",
    "upsample": "interpolate upsample upsamplingnearest2d upsamplingbilinear2d",
    "pad": "pad zeropad1d zeropad2d constantpad1d constantpad2d reflectionpad2d replicationpad2d",
    "localresponsenorm": "localresponsenorm",
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}

ELEMENTWISE = frozenset({"add", "sub", "mul", "div"})
"""Kinds that have no node if only one operand depends on the input, which is scaling or shifting by a constant."""

_CELLS = {f"{cell}{form}": cell for cell in ("gru", "lstm", "rnn") for form in ("", "cell")}
_CELLS["multiheadattention"] = "attention"
_SAME_ACTIVATION = {"swish": "silu", "clip": "clamp"}
_NORM_MODULES = {
    "syncbatchnorm": "batchnorm",
    **{f"{kind}{d}d": kind for kind in ("batchnorm", "instancenorm") for d in (1, 2, 3)},
    **{name: name for name in NORMS if name not in ("batchnorm", "instancenorm")},
}


def plain_name(name: str) -> str:
    """Return the name that a module's class, a function and a method share."""
    return name.replace("_", "").lower()


def supported() -> str:
    """Return the names of all supported operations as text."""
    modules = {*CONVOLUTIONS, *_NORM_MODULES, *POOLS, *_CELLS, "linear", "prelu"}
    return ", ".join(sorted({*modules, *PASSES, *_KINDS, *ACTIVATIONS, *_SAME_ACTIVATION}))


def multiplies(node: fx.Node) -> bool:
    """Say whether a value, perhaps reshaped, multiplies or divides another one."""
    users = [(plain_name(getattr(user.target, "__name__", str(user.target))), user) for user in node.users]
    return any(_KINDS.get(name) in ("mul", "div") or (name in PASSES and multiplies(user)) for name, user in users)


def torch_name(module: nn.Module) -> str:
    """Return the plain name of the torch class that a module is an instance of."""
    return plain_name(next(kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn")))


def layers_of(module: nn.Module) -> list[tuple[LayerType, dict[str, nn.Parameter]]]:
    """Return the layers in a module of torch, in order, with their parameters by role.

    The list is empty if the module is to be looked up with `type_of_call`, or not all its parameters are known.
    """
    name, found = torch_name(module), dict(module.named_parameters())
    made = []
    for key, weight in found.items() if name in _CELLS else ():
        kind = _CELLS[name] + key.replace("weight_", "").split("_")[0]  # as in weight_hh_l0 and in_proj_weight
        if "weight" in key and kind in CELLS:
            bias = found.get(key.replace("weight", "bias"))
            named = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
            made.append((LayerType(kind, (weight.shape[1], weight.shape[0]), roles=tuple(named)), named))
    if (layer := _layer_of(module, name)) is not None:
        made = [(layer, {role: getattr(module, role) for role in layer.roles})]
    return made if sum(len(named) for _, named in made) == len(found) else []


def _layer_of(module: nn.Module, name: str) -> LayerType | None:
    roles = tuple(role for role in ("weight", "bias") if isinstance(getattr(module, role, None), nn.Parameter))
    if name in CONVOLUTIONS:
        return LayerType(
            name,
            (module.in_channels, module.out_channels),  # type: ignore[arg-type]
            module.kernel_size,  # type: ignore[arg-type]
            _unless_ones(module.stride),
            _unless_ones(module.dilation),
            module.groups,  # type: ignore[arg-type]
            roles,
        )
    if name == "linear":
        return LayerType(name, (module.in_features, module.out_features), roles=roles)  # type: ignore[arg-type]
    if name == "prelu":
        return LayerType(name, (module.num_parameters,), roles=roles)  # type: ignore[arg-type]
    if name in _NORM_MODULES:
        groups = getattr(module, "num_groups", 1)
        return LayerType(_NORM_MODULES[name], _features(module), groups=groups, roles=roles)
    return None


def type_of_call(name: str, arguments: Mapping[str, Any]) -> LayerType | None:
    """Return the type of an operation without parameters by its plain name; None if it is not supported.

    `arguments` are the given ones of `kernel_size`, `stride` and `output_size`.
    """
    if name in POOLS:
        dimensions = POOLS[name]
        window = arguments.get("output_size" if name.startswith("adaptive") else "kernel_size")
        kernel = _lengths(window, dimensions)
        stride = () if name.startswith("adaptive") else _lengths(arguments.get("stride") or kernel, dimensions)
        return LayerType(name, kernel=kernel, stride=_unless_ones(stride))
    name = _SAME_ACTIVATION.get(name, name)
    if name in ACTIVATIONS:
        return LayerType("act", activation=name)
    return LayerType(_KINDS[name]) if name in _KINDS else None


def _features(module: nn.Module) -> tuple[int, ...]:
    names = ("num_features", "num_channels", "normalized_shape")
    value: Any = next(getattr(module, name) for name in names if hasattr(module, name))
    return (value,) if isinstance(value, int) else tuple(value)


def _unless_ones(lengths: Any) -> tuple[int, ...]:
    return () if set(lengths) <= {1} else tuple(lengths)


def _lengths(value: Any, dimensions: int) -> tuple[int, ...]:
    """Return one length per dimension. None, by which adaptive pooling keeps a length, counts as 1."""
    values: Sequence[Any] = [value] * dimensions if isinstance(value, int) or value is None else list(value)
    if len(values) == 1:
        values = list(values) * dimensions
    return tuple(1 if length is None else int(length) for length in values)
