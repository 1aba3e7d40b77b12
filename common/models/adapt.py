"""What of a network a run adapts. The rest is its backbone: frozen, and equal at all clients.

    all                                      every parameter; there is no backbone
    head                                     the prediction head
    norms                                    the head, and the parameters of norms
    bias                                     the head, and all biases
    lora:r=8[,alpha=16][,targets=PATTERN]    the head, and a low-rank change of layers' weights, by peft

LoRA is Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen: LoRA: Low-Rank Adaptation of Large Language Models, ICLR
2022, https://arxiv.org/abs/2106.09685: `W + alpha/r B A` in place of `W`, with `B = 0` at the start.

What is adapted stays a parameter of the module, and the backbone's parameters become buffers. So layouts, messages,
optimisers, noise and masks see what is adapted and nothing else, and no strategy has to know of it.
"""

import copy
import hashlib
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hyperbloom.common.errors import ConfigError, ModelError, describe
from hyperbloom.common.files.storage import write_tensors

ALL = "all"
LORA = "default"
"""The name of LoRA's layers in a network."""
WRAPPED = "network."
"""Prefix of the names in a network of transformers, which `Transformer` wraps."""

_KINDS = (ALL, "head", "norms", "bias", "lora")
_FORM = "all, head, norms, bias or lora:r=8[,alpha=16][,targets=PATTERN]"
_LORA = re.compile(r"lora:r=(?P<rank>[1-9]\d{0,2})(,alpha=(?P<alpha>\d{1,9}(\.\d{1,30})?))?(,targets=(?P<targets>.+))?")
_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that read the weights of their layers and do not call these, so that LoRA would have no effect there."""


@dataclass(frozen=True)
class Adapt:
    """What is adapted.

    Attributes:
        alpha: LoRA's scale; `2 r` if the text has none.
        targets: shell patterns, separated by `|`, for the ends of layers' names; None: peft's choice for this
            architecture of transformers, or all linear layers and convolutions.
    """

    kind: str
    rank: int = 0
    alpha: float = 0.0
    targets: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Adapt":
        """Read the text form; ConfigError if it is not valid."""
        if text in _KINDS[:-1]:
            return cls(text)
        if (found := _LORA.fullmatch(text)) is None:
            raise ConfigError(f"adapt: expected {_FORM}, found {text!r}")
        return cls("lora", rank := int(found["rank"]), float(found["alpha"] or 2 * rank), found["targets"])


def adapted(backbone: nn.Module, head: tuple[str, ...], how: Adapt) -> nn.Module:
    """Return a network around a backbone, whose parameters it shares, with new values of what torch initialises.

    The head is drawn anew from torch's global generator, and so is LoRA's A. Norms and biases start as in the backbone.
    Norms whose parameters are frozen keep the backbone's statistics. With `head`, nothing in the backbone has a
    training mode, so that it computes the same for an input at all times.

    `head` are prefixes of the names of the head's parameters; `how` says what is adapted. The backbone stays as it is.

    Raises:
        ModelError: there is nothing to adapt, or peft cannot change a layer or is not installed.
    """
    module = copy.deepcopy(backbone, {id(parameter): parameter for parameter in backbone.parameters()})
    lora = _inject(module, head, how) if how.kind == "lora" else None
    chosen = _chosen(module, head, how)
    if how.kind != "head" and all(name.startswith(head) for name in chosen):
        raise ModelError(f"adapt: expected parameters of {how.kind} outside the head, found none in this network")
    frozen, made = set[str](), dict[int, nn.Parameter]()  # tied weights stay tied
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        part, values = module.get_submodule(owner), parameter.detach()
        if name not in chosen:
            frozen.add(name)
        if part._parameters.pop(leaf, None) is None:  # a layer with two names
            continue
        if name in chosen:
            setattr(part, leaf, made.setdefault(id(parameter), nn.Parameter(values.clone())))
        else:
            part.register_buffer(leaf, None)
            setattr(part, leaf, values)  # as an attribute: recurrent layers keep a list of their weights
    for prefix in head:
        for part in module.get_submodule(prefix.rstrip(".")).modules():
            if callable(reset := getattr(part, "reset_parameters", None)):
                reset()
    frozen |= _hold(module, how.kind == "head")
    module.frozen, module.lora = frozenset(frozen), lora  # type: ignore[assignment]
    return module


def digest_of(backbone: nn.Module, head: tuple[str, ...], tokenizer: bytes = b"") -> str:
    """Return the SHA-256 of a tokenizer, and of the names, shapes and bytes of all tensors outside the head."""
    found = hashlib.sha256(tokenizer)
    for name, tensor in sorted(backbone.state_dict().items()):
        if not name.startswith(head):
            found.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return f"sha256:{found.hexdigest()}"


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name without those of the backbone, which are the same everywhere."""
    frozen: frozenset[str] = getattr(module, "frozen", frozenset())
    return {name: tensor for name, tensor in module.state_dict().items() if name not in frozen}


def merged(module: nn.Module) -> nn.Module:
    """Return a network without LoRA's layers that computes the same: `B A` is added to the weights of a copy."""
    found = [name for name, part in module.named_modules() if hasattr(part, "lora_A")]
    if not found:
        return module
    module = copy.deepcopy(module)
    with torch.no_grad():
        for name in found:
            layer: Any = module.get_submodule(name)
            layer.merge(safe_merge=True)  # in place it would change weights that are tied to these
            module.set_submodule(name, layer.get_base_layer())
    return module


def write_adapter(folder: Path, module: nn.Module) -> None:
    """Write LoRA's layers and the head as a folder for `peft.PeftModel.from_pretrained`; nothing without LoRA."""
    config = getattr(module, "lora", None)
    if config is None:
        return
    tensors = {
        f"base_model.model.{name.removeprefix(WRAPPED)}".replace(f".{LORA}.", "."): values
        for name, values in module.named_parameters()
    }
    write_tensors(folder / "adapter_model.safetensors", tensors, {"format": "pt"})
    config.save_pretrained(folder)


def _inject(module: nn.Module, head: tuple[str, ...], how: Adapt) -> Any:
    """Add LoRA's layers to a network, and return peft's description of them."""
    try:
        import peft
        from transformers.pytorch_utils import Conv1D
    except ImportError:
        raise ModelError("adapt: LoRA needs peft: pip install 'hyperbloom[backbone]'") from None
    # peft's names are those in the user's network, whatever we wrap around it.
    wrapped = any(name.startswith(WRAPPED) for name in head)
    root = module.get_submodule(WRAPPED.rstrip(".")) if wrapped else module
    head = tuple(name.removeprefix(WRAPPED) if wrapped else name for name in head)
    readers = {name for name, part in root.named_modules() if isinstance(part, _READERS)}
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D, nn.Embedding)
    layers = {
        name: part
        for name, part in root.named_modules()
        if isinstance(part, kinds) and not f"{name}.".startswith(head) and name.rpartition(".")[0] not in readers
    }
    plain = [n for n, part in layers.items() if not isinstance(part, nn.Embedding) and getattr(part, "groups", 1) == 1]
    if how.targets is None:
        architectures = (getattr(getattr(part, "config", None), "model_type", "") for part in module.modules())
        known = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        usual = known.get(next(filter(None, architectures), ""), ())
        targets = [name for name in plain if name.rpartition(".")[2] in usual] or plain
    else:
        # Shell patterns, because a server may lie, and some regular expressions take for ever.
        ends = [f"*.{end}" for end in how.targets.split("|")]
        targets = [name for name in layers if any(fnmatchcase(f".{name}", end) for end in ends)]
    if not targets:
        some = ", ".join(list(layers)[:8])
        wanted = "layers for LoRA" if how.targets is None else f"layers that match {how.targets!r}"
        raise ModelError(f"adapt: expected {wanted}, found none among {some or 'no layers'}")
    exact = "|".join(map(re.escape, targets))
    turned = all(isinstance(layers[name], Conv1D) for name in targets)  # GPT-2's layers keep `(in, out)`
    config = peft.LoraConfig(r=how.rank, lora_alpha=how.alpha, target_modules=exact, fan_in_fan_out=turned)
    try:
        peft.inject_adapter_in_model(config, root, LORA)
    except ValueError as error:
        raise ModelError(f"adapt: peft cannot change a layer: {describe(error)}") from None
    config.modules_to_save = [name.rstrip(".") for name in head]  # the head, for whoever reads it
    return config


def _chosen(module: nn.Module, head: tuple[str, ...], how: Adapt) -> set[str]:
    chosen = set()
    for name, _ in module.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        in_norm = "norm" in type(module.get_submodule(owner)).__name__.lower()
        by_kind = {ALL: True, "norms": in_norm, "bias": "bias" in leaf, "lora": ".lora_" in name}
        if name.startswith(head) or by_kind.get(how.kind, False):
            chosen.add(name)
    return chosen


def _hold(module: nn.Module, everything: bool) -> set[str]:
    """Keep frozen norms, or all of the backbone, in evaluation mode; return the names of the norms' statistics."""
    held = set()
    for name, part in module.named_modules():
        if next(part.parameters(), None) is not None:
            continue
        if isinstance(part, _BatchNorm):
            held |= {f"{name}.{leaf}" for leaf, _ in part.named_buffers()}
            part.track_running_stats = False  # read, and not written
        if everything or isinstance(part, _BatchNorm):
            part.eval()
            part.train = MethodType(lambda part, mode=True: part, part)
    return held
