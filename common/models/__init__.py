"""Target networks, which clients train and run. They are built by name for an input shape.

Every network ends in a linear layer called `head`. A personal classifier keeps this part on the client.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import torch
from torch import Tensor, nn

from hyperbloom.common.data.texts import tokenizer_bytes
from hyperbloom.common.errors import ModelError
from hyperbloom.common.layout import Layout
from hyperbloom.common.models.adapt import ALL, Adapt, adapted, digest_of, merged, own_tensors
from hyperbloom.common.models.cnn import MLP, LeNet
from hyperbloom.common.models.factory import WHAT, build_from_factory, build_from_plugin
from hyperbloom.common.models.generated import FORM, Generated
from hyperbloom.common.models.parts import features, last_layer, represent
from hyperbloom.common.models.pretrained import head_of, load_backbone, vocabulary
from hyperbloom.common.models.residual import ARCHITECTURES, ResidualCNN
from hyperbloom.common.models.unet import UNet
from hyperbloom.common.program.plugins import find_plugin, plugins
from hyperbloom.common.tasks import CLASSIFICATION, Task

HEAD = "head."
"""Prefix of the names of the parameters of the last layer."""
OWN = "own"
"""Name of the client's own model in an order. The server does not know its real name."""
BACKBONE = "backbone"
"""Name, in an order, of the pretrained network that each client has on its own disk."""
MOST_PARAMETERS = 2**29
"""Of a network whose form a server chooses: as many as a message can carry."""

MOST_BACKBONES = 8
"""Most networks of which one process keeps what is frozen."""


@dataclass(frozen=True)
class ModelInfo:
    """A registered architecture: `make(input_shape, num_classes, width)`, and the width for each size."""

    make: Callable[[tuple[int, ...], int, int], nn.Module]
    widths: Mapping[str, int]
    description: str


CNN, _HAFL = {"S": 8, "M": 16, "L": 32}, {"S": 8, "M": 16, "L": 64}

MODELS: dict[str, ModelInfo] = {
    "lenet": ModelInfo(LeNet, CNN, "two 5x5 convolutions, three linear layers (pFedHN)"),
    "mlp": ModelInfo(MLP, {"S": 50, "M": 100, "L": 200}, "one hidden layer (pFedHN on MNIST)"),
    "unet": ModelInfo(UNet, CNN, "small U-Net for masks"),
    **{
        f"hafl-{number}": ModelInfo(partial(ResidualCNN, f"hafl-{number}", steps), _HAFL, f"{text} (HAFL-GHN)")
        for number, (text, steps) in enumerate(ARCHITECTURES.items())
    },
}


@dataclass(frozen=True)
class ModelSpec:
    """The values that determine a target network's architecture, and thus the names and shapes of its parameters.

    `adapt` says which of its parameters are adapted (`Adapt.parse`). `backbone` is where a pretrained network is on
    this machine (`load_backbone`), for the name `backbone`.
    """

    name: str
    size: str
    input_shape: tuple[int, ...]
    num_classes: int
    adapt: str = ALL
    backbone: str | None = None

    @property
    def is_new(self) -> bool:
        """Whether all of the network is made here and adapted."""
        return FORM.sub(ALL, self.adapt) == ALL and self.backbone is None

    def resolved(self, task: Task = CLASSIFICATION) -> "ModelSpec":
        """Return the spec with a name in place of 'auto', which depends on the backbone and on the task."""
        auto = BACKBONE if self.backbone else task.auto_model(self.input_shape)
        return replace(self, name=auto) if self.name == "auto" else self


def model_names() -> tuple[str, ...]:
    """Return the names of all architectures; plug-ins come last."""
    return tuple(dict.fromkeys([*MODELS, *plugins("models")]))


def find_model(name: str) -> ModelInfo:
    """Return the architecture with this name. Those of plug-ins have one size, M.

    Raises:
        ModelError: there is no such architecture, or the plug-in cannot be used.
    """
    plugin = find_plugin("models", name, MODELS, ModelError)
    if name in MODELS:
        return MODELS[name]
    if plugin is None:
        raise ModelError(f"model: expected one of {', '.join(sorted(model_names()))}, found {name!r}")
    plugin.load(WHAT, ModelError)
    return ModelInfo(lambda shape, classes, width: build_from_plugin(plugin, shape, classes), {"M": 0}, plugin.target)


def build(spec: ModelSpec) -> nn.Module:
    """Build the network with initial values of what is adapted from torch's global generator.

    Raises:
        ModelError: there is no such architecture, size or backbone, it does not fit inputs of this shape, or it has
            nothing to adapt.
    """
    if not spec.is_new:
        return adapted(*_backbone(spec, build), Adapt.parse(spec.adapt))
    if found := FORM.fullmatch(spec.adapt):
        return Generated(build(replace(spec, adapt=ALL)), HEAD, int(found[1]), int(found[2]))
    info = find_model(spec.name)
    if spec.size not in info.widths:
        raise ModelError(f"size: expected one of {', '.join(info.widths)}, found {spec.size!r}")
    if spec.num_classes < 1 or not spec.input_shape or min(spec.input_shape) < 1:
        raise ModelError(f"expected inputs and classes, found shape {spec.input_shape} and {spec.num_classes} classes")
    return info.make(spec.input_shape, spec.num_classes, info.widths[spec.size])


def build_own(spec: ModelSpec) -> nn.Module:
    """Build a client's own network, whose name may also be 'auto' or `package.module:factory`; errors as in `build`."""
    if not spec.is_new:
        return adapted(*_backbone(spec, build_own), Adapt.parse(spec.adapt))
    if ":" in spec.name:
        return build_from_factory(spec.name, spec.input_shape, spec.num_classes)
    return build(spec.resolved())


def blank(spec: ModelSpec) -> nn.Module:
    """Build the network for values from elsewhere, random buffers alike everywhere; ModelError if it is too large."""
    whole = spec if spec.is_new else replace(spec, adapt=ALL)
    if spec.backbone is None and (found := full_layout(whole).numel) > MOST_PARAMETERS:  # measured without its memory
        raise ModelError(f"expected a network of at most {MOST_PARAMETERS:,} parameters, found {found:,}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(spec)


def check_outputs(spec: ModelSpec, task: Task) -> None:
    """Raise a ModelError if a server's or client's own network cannot be built, or its outputs are not for the task."""
    wanted = task.output_shape(spec.num_classes, spec.input_shape)
    where = "meta" if spec.is_new and spec.name in MODELS else "cpu"
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device(where):
        found = tuple(build_own(spec).eval()(torch.zeros(1, *spec.input_shape)).shape[1:])
    if found != wanted:
        raise ModelError(f"{spec.name}: expected outputs {wanted} of an input for {task.spec.name}, found {found}")


def full_layout(spec: ModelSpec) -> Layout:
    """Return the layout of all parameters that are adapted."""
    with torch.random.fork_rng(devices=[]), torch.device("meta" if spec.is_new and spec.name in MODELS else "cpu"):
        return Layout.of(build(spec))


def body_layout(spec: ModelSpec) -> Layout:
    """Return the layout of all adapted parameters except those of the head."""
    head = _head(spec)
    return Layout(tuple(item for item in full_layout(spec).shapes if not item[0].startswith(head)))


def head_layout(spec: ModelSpec) -> Layout:
    """Return the layout of the head's parameters."""
    head = _head(spec)
    return Layout(tuple(item for item in full_layout(spec).shapes if item[0].startswith(head)))


def first_values(spec: ModelSpec, layout: Layout, seed: int, make: Callable[[ModelSpec], nn.Module] = build) -> Tensor:
    """Return the initial values `(layout.numel,)` of parameters, drawn from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return layout.flatten(dict(make(spec).named_parameters()))


@lru_cache(MOST_BACKBONES)
def backbone_digest(spec: ModelSpec) -> str:
    """Return the digest of all that is not adapted, whatever is, apart from the head, and of the tokenizer."""
    return digest_of(*_backbone(spec, build), tokenizer_bytes(spec.backbone))


def backbone_features(spec: ModelSpec, inputs: Tensor) -> Tensor:
    """Return what enters the last layer of a backbone, `(N, ...)`, for inputs of its network, on their device."""
    return features(blank(replace(spec, adapt="head")).to(inputs.device), inputs)


def backbone_shape(spec: ModelSpec) -> tuple[int, ...]:
    """Return the shape of the features of one input; ModelError for one vector of each token, as of a GPT-2."""
    module, shape = _backbone(spec, build)[0], backbone_features(spec, torch.zeros(1, *spec.input_shape)).shape[1:]
    # A batch is as long as its longest text, so such features have no one shape.
    if vocabulary(module) and len(shape) > 1:
        raise ModelError("--backbone: expected a last layer that reads one vector of a text, found one of each token")
    return tuple(shape)


def _head(spec: ModelSpec) -> tuple[str, ...]:
    if FORM.fullmatch(spec.adapt):
        return ("embedding", f"network.{HEAD}")
    return (HEAD,) if spec.is_new else _backbone(spec, build)[1]


def _backbone(spec: ModelSpec, make: Callable[[ModelSpec], nn.Module]) -> tuple[nn.Module, tuple[str, ...]]:
    return frozen(replace(spec, adapt=ALL), make)


@lru_cache(MOST_BACKBONES)
def frozen(spec: ModelSpec, make: Callable[[ModelSpec], nn.Module]) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a network, all of which is adapted, and the prefixes of its head; there is one in a process."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # not on "meta", where a caller may look for layouts
        torch.manual_seed(0)  # what is not loaded from a file must be equal at all clients
        module = load_backbone(spec.backbone, spec.input_shape, spec.num_classes) if spec.backbone else make(spec)
    if not spec.backbone and any(name.startswith(HEAD) for name, _ in module.named_parameters()):
        return module, (HEAD,)
    return module, head_of(module, spec.input_shape)
