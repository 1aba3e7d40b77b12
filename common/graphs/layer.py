"""Types of nodes of a computation graph, and the line of text that names a type on the wire and in reports.

A type is a layer type of Litany et al. (HAFL-GHN, https://arxiv.org/abs/2201.08459, section 4.2): the operation, input
and output channels, kernel, stride and the activation that follows. Here it also has dilation, groups, and the roles
(weight, bias) that are generated. Layers of one type share a decoder of the graph hypernetwork.

    conv2d 64,128 k3x3 s2x2 wb +relu        linear 512,10 wb        batchnorm 64 wb +relu        add +relu

Attention and recurrent cells are linear maps of kinds of their own. A parameter outside a layer is a `parameter`, or a
`factor` if it multiplies; its channels are its shape.

    attentionin 64,192 wb        gruhh 32,96 wb        parameter 1,1,64 w        factor 64,1,1 w
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property

from hyperbloom.common.errors import ModelError, WireError


class LayerError(ModelError):
    """The values form no valid layer type. Callers add where the values come from."""


_DIMENSIONS = ("1d", "2d", "3d")
CONVOLUTIONS = {f"{name}{d}": n for name in ("conv", "convtranspose") for n, d in enumerate(_DIMENSIONS, 1)}
NORMS = frozenset({"batchnorm", "instancenorm", "groupnorm", "layernorm", "rmsnorm"})
_POOLS = ("maxpool", "avgpool", "lppool", "adaptiveavgpool", "adaptivemaxpool")
POOLS = {f"{name}{d}": n for name in _POOLS for n, d in enumerate(_DIMENSIONS, 1)}
JOINS = frozenset({"add", "sub", "mul", "div", "concat", "matmul", "attention"})
OTHERS = frozenset({"input", "output", "act", "mean", "localresponsenorm", "pad", "permute", "split", "upsample"})
CELLS = frozenset({"attentionin", "attentionout", "gruih", "gruhh", "lstmih", "lstmhh", "lstmhr", "rnnih", "rnnhh"})
_LINEAR = CELLS | {"linear"}
FREE = frozenset({"parameter", "factor"})
SHAPED = NORMS | FREE | {"prelu"}
"""Kinds whose channels are the shape of their parameters."""
KINDS = frozenset({*CONVOLUTIONS, *SHAPED, *POOLS, *JOINS, *OTHERS, *_LINEAR})

ACTIVATIONS = frozenset(
    {"celu", "clamp", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leakyrelu", "logsigmoid", "logsoftmax"}
    | {"mish", "relu", "relu6", "rrelu", "selu", "sigmoid", "silu", "softmax", "softplus", "softsign", "tanh"}
)

MAX_LENGTH = 2**24
"""Longest dimension of a layer: a bound for messages from the wire, far above real networks."""

_TEXT = re.compile(
    r"(?P<kind>[a-z0-9]+)(?: (?P<channels>\d+(?:,\d+)*))?(?: k(?P<kernel>\d+(?:x\d+)*))?(?: s(?P<stride>\d+(?:x\d+)*))?"
    r"(?: d(?P<dilation>\d+(?:x\d+)*))?(?: g(?P<groups>\d+))?(?: (?P<roles>wb?|b))?(?: \+(?P<activation>[a-z0-9]+))?",
    re.ASCII,
)
_ROLES = {"w": "weight", "b": "bias"}


@dataclass(frozen=True)
class LayerType:
    """The type of a layer, which selects the decoder of its parameters.

    Args:
        kind: the operation, such as `conv2d` or `add`.
        channels: `(in, out)` of a convolution or linear map; shape of the parameters of other kinds.
        kernel: size of the kernel, or for adaptive pooling, of the output.
        stride: stride of a convolution or pooling; empty for all ones.
        dilation: dilation of a convolution; empty for all ones.
        groups: groups of a convolution or of group normalisation. A depthwise convolution has as many as channels in.
        roles: roles (`weight`, `bias`) that the layer has and the hypernetwork generates.
        activation: activation on the output, or empty.

    Raises:
        LayerError: the values form no valid layer.
    """

    kind: str
    channels: tuple[int, ...] = ()
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    roles: tuple[str, ...] = ()
    activation: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise LayerError(f"layer type: expected one of {', '.join(sorted(KINDS))}, found {self.kind[:40]!r}")
        lengths = (*self.channels, *self.kernel, *self.stride, *self.dilation, self.groups)
        if not all(1 <= length <= MAX_LENGTH for length in lengths):
            raise LayerError(f"layer type {self}: expected lengths from 1 to {MAX_LENGTH}")
        if self.activation and self.activation not in ACTIVATIONS:
            known = ", ".join(sorted(ACTIVATIONS))
            raise LayerError(f"layer type {self.kind}: expected one of {known}, found {self.activation[:40]!r}")
        if self.activation == "" and self.kind == "act":
            raise LayerError("layer type act: expected an activation, found none")
        _check_fields(self)

    @classmethod
    def parse(cls, text: str) -> "LayerType":
        """Read the text of a type, as `str` writes it; WireError if it has another form, or the layer is not valid."""
        found = _TEXT.fullmatch(text) if len(text) <= 200 else None
        if found is None:
            raise WireError(f"layer type: expected text such as 'conv2d 64,128 k3x3 s2x2 wb', found {text[:60]!r}")
        lengths = {
            name: tuple(int(n) for n in re.split("[,x]", found[name] or "") if n)
            for name in ("channels", "kernel", "stride", "dilation")
        }
        roles = tuple(_ROLES[letter] for letter in found["roles"] or "")
        try:
            layer = cls(
                kind=found["kind"],
                groups=int(found["groups"] or 1),
                roles=roles,
                activation=found["activation"] or "",
                **lengths,
            )
        except LayerError as error:
            raise WireError(str(error)) from None
        if str(layer) != text:
            raise WireError(f"layer type: expected {str(layer)!r}, found {text!r}")
        return layer

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        words = [self.kind, ",".join(map(str, self.channels))]
        for letter, lengths in (("k", self.kernel), ("s", self.stride), ("d", self.dilation)):
            words.append(letter + "x".join(map(str, lengths)) if lengths else "")
        words.append(f"g{self.groups}" if self.groups != 1 else "")
        words.append("".join(role[0] for role in self.roles))
        words.append(f"+{self.activation}" if self.activation else "")
        return " ".join(word for word in words if word)

    def shape(self, role: str) -> tuple[int, ...]:
        """Return the shape of the layer's `weight` or `bias`, as torch lays it out."""
        if self.kind in SHAPED:
            return self.channels
        given, made = self.channels
        if role == "bias":
            return (made,)
        if self.kind in _LINEAR:
            return (made, given)
        first, second = (given, made) if self.kind.startswith("convtranspose") else (made, given)
        return (first, second // self.groups, *self.kernel)

    @property
    def fan_in(self) -> float:
        """Number of inputs in the sum of one output of a convolution or linear layer, on average over positions."""
        inputs = self.channels[0] // self.groups * math.prod(self.kernel)
        # A transposed convolution has prod(stride) times as many outputs as inputs.
        return inputs / math.prod(self.stride) if self.kind.startswith("convtranspose") else float(inputs)

    @property
    def numel(self) -> int:
        """Number of parameters of one layer of this type."""
        return sum(math.prod(self.shape(role)) for role in self.roles)


def _check_fields(layer: LayerType) -> None:
    """Raise a LayerError for fields that the kind does not have, and for channels that the groups do not divide."""
    dimensions = CONVOLUTIONS.get(layer.kind, 0)
    window = dimensions or POOLS.get(layer.kind, 0)
    pair, shaped = dimensions or layer.kind in _LINEAR, layer.kind in SHAPED
    fewest, most = (2, 2) if pair else (0 if layer.kind in FREE else 1, 4) if shaped else (0, 0)
    roles = ("weight",), ("bias",), ("weight", "bias")
    allowed = {
        "channels": fewest <= len(layer.channels) <= most,
        "kernel": len(layer.kernel) == window,
        "stride": len(layer.stride) in (0, window) and not (layer.stride and set(layer.stride) == {1}),
        "dilation": len(layer.dilation) in (0, dimensions) and not (layer.dilation and set(layer.dilation) == {1}),
        "groups": layer.groups == 1 or bool(dimensions) or layer.kind == "groupnorm",
        "parameters": not layer.roles or ((pair or shaped) and layer.roles in roles),
    }
    if wrong := [name for name, fine in allowed.items() if not fine]:
        raise LayerError(f"layer type {layer}: the {wrong[0]} do not fit a layer of kind {layer.kind}")
    if any(length % layer.groups for length in layer.channels):
        raise LayerError(f"layer type {layer}: expected channels that {layer.groups} groups divide")
