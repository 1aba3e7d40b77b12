"""Pretrained networks from a folder on this machine, or from a user's function. Nothing is fetched.

    FOLDER                     model.safetensors and config.json, of one of
                                   transformers, for images or texts, as `save_pretrained` writes them
                                   timm, as `timm.models.save_for_hf(..., safe_serialization=True)` writes them
                                   torchvision: {"library": "torchvision", "architecture": "resnet18"}
    package.module:function    called with (input_shape, num_classes), returns a network with its weights

The head of a folder's network is made anew for the classes of the run.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hyperbloom.common.errors import ModelError, describe
from hyperbloom.common.models.factory import build_from_factory, check_logits
from hyperbloom.common.models.parts import last_layer

WEIGHTS = "model.safetensors"
_FETCHES = ("pretrained", "checkpoint", "cache")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_CONVERT = (
    "python -c 'import torch; from safetensors.torch import save_file; "
    'save_file({{k: v.clone() for k, v in torch.load("{pickle}", weights_only=True).items()}}, "{weights}")\''
)


class Transformer(nn.Module):
    """A classifier of transformers as a function of one tensor.

    Shape:
        images `(B, C, H, W)`, or numbers of tokens `(B, T)` as floats, padded on the right; logits `(B, num_classes)`.
    """

    def __init__(self, network: nn.Module, padding: int | None) -> None:
        super().__init__()
        self.network, self.padding = network, padding

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits `(B, K)` of a batch."""
        if self.padding is None:
            return self.network(pixel_values=inputs).logits
        tokens = inputs.long()
        there = tokens != self.padding
        if not torch.compiler.is_compiling():  # no text in the batch is longer
            length = 1 + int((there * torch.arange(there.shape[1], device=there.device)).max())
            tokens, there = tokens[:, :length], there[:, :length]
        return self.network(input_ids=tokens, attention_mask=there.long()).logits


def load_backbone(where: str, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return the network of a folder or of a user's function, checked with a batch of zeros.

    Raises:
        ModelError: there is none, a library for it is not installed, its weights are a pickle, or it does not fit.
    """
    if ":" in where and not Path(where).is_dir():
        return build_from_factory(where, input_shape, num_classes)
    folder = Path(where).expanduser()
    config = _config(folder)
    most = config.get("max_position_embeddings", config.get("n_positions"))  # the latter is GPT-2's
    if "vocab_size" in config and isinstance(most, int) and 0 < most < input_shape[0]:
        how = f"set model_max_length in {folder / 'tokenizer_config.json'} to that"
        raise ModelError(f"--backbone: expected rows of at most {most} tokens, found {input_shape[0]}; {how}")
    if not (folder / WEIGHTS).is_file() and not (folder / f"{WEIGHTS}.index.json").is_file():
        pickles = sorted(path for pattern in _PICKLES for path in folder.glob(pattern))
        if not pickles:
            raise ModelError(f"--backbone: expected {folder / WEIGHTS}, found none")
        how = _CONVERT.format(pickle=pickles[0], weights=folder / WEIGHTS)
        raise ModelError(f"--backbone: {pickles[0]} is a pickle, which may run code; convert it once: {how}")
    kernel = "/" in f"{config.get('attn_implementation')}{config.get('_attn_implementation')}"
    if kernel or config.get("model_type") == "timm_wrapper" or (folder / "adapter_config.json").exists():
        raise ModelError(f"--backbone: expected a network alone in {folder}, found an adapter, kernel or timm_wrapper")
    try:
        if config.get("library") == "torchvision":
            from torchvision.models import get_model

            network = get_model(config["architecture"], weights=None, num_classes=num_classes)
            module = _filled(network, folder, input_shape)
        elif "model_type" in config:
            module = _transformer(folder, str(config["model_type"]), input_shape, num_classes)
        else:
            import timm

            arguments = {"num_classes": num_classes, "in_chans": input_shape[0], "pretrained": False}
            name, more = str(config["architecture"]), dict(config.get("model_args") or {})
            if ":" in name or any(key.startswith(_FETCHES) for key in more):  # timm would fetch, or open other files
                raise ValueError(f"expected a name of timm's and arguments of its network, found {name}, {list(more)}")
            module = _filled(timm.create_model(name, **{**more, **arguments}), folder, input_shape)
    except ImportError as error:
        raise ModelError(f"--backbone: {folder} needs {error.name}: pip install 'hyperbloom[backbone]'") from None
    except Exception as error:  # of several libraries
        raise ModelError(f"--backbone: expected a network in {folder}: {describe(error)}") from error
    check_logits(module, str(folder), input_shape, num_classes)
    return module.eval()


def usual_shape(where: str) -> tuple[int, ...]:
    """Return the shape of inputs that a folder's network was trained on; ModelError if its description has none."""
    config = _config(Path(where).expanduser()) if ":" not in where or Path(where).is_dir() else {}
    if config.get("library") == "torchvision":
        return (3, 224, 224)
    if "max_position_embeddings" in config or "vocab_size" in config:
        return (min(8, config.get("max_position_embeddings") or 8),)  # tokens: as many as one likes
    more, trained = config.get("model_args") or {}, config.get("pretrained_cfg") or {}
    if side := config.get("image_size") or more.get("img_size"):
        sides = side if isinstance(side, list) else (side, side)
        return (config.get("num_channels") or more.get("in_chans") or 3, *sides)
    if not (found := trained.get("input_size")):
        raise ModelError(f"--input-shape: expected one, as {where} does not say what it takes")
    return tuple(found)


def vocabulary(module: nn.Module) -> int:
    """Return how many tokens a network for texts knows; 0 for other networks."""
    for_texts = isinstance(module, Transformer) and module.padding is not None
    return int(module.network.get_input_embeddings().num_embeddings) if for_texts else 0  # type: ignore[union-attr, operator]


def check_tokens(flag: str, known: int, *inputs: Tensor) -> None:
    """Raise a ModelError if inputs `(N, T)` of a network that knows so many tokens are other numbers; 0 takes all."""
    for part in inputs if known else ():
        if len(wrong := part[(part != part.floor()) | (part < 0) | (part >= known)]):
            raise ModelError(f"{flag}: expected tokens, whole numbers from 0 to {known - 1}; found {wrong[0]:g}")


def head_of(module: nn.Module, input_shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the prefixes of the names of the head's parameters: the last layer, or all beside a transformer's body."""
    if isinstance(module, Transformer):
        body = getattr(module.network, "base_model_prefix", "")
        if body and hasattr(module.network, body):
            named = module.network.named_parameters()
            beside = dict.fromkeys(name.partition(".")[0] for name, _ in named if not name.startswith(f"{body}."))
            return tuple(f"network.{name}." for name in beside)
    last = last_layer(module, input_shape)
    return tuple(f"{name}." for name, part in module.named_modules() if part is last)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"--backbone: expected a folder with config.json, found {folder}: {describe(error)}") from None
    if not isinstance(config, dict):
        raise ModelError(f"--backbone: expected keys and values in {path}, found {type(config).__name__}")
    return config


def _transformer(folder: Path, model_type: str, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    import transformers
    from transformers.models.auto import modeling_auto as known

    images = model_type in known.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    if not images and model_type not in known.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise ValueError(f"transformers classifies neither images nor texts with {model_type!r}")
    auto = transformers.AutoModelForImageClassification if images else transformers.AutoModelForSequenceClassification
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()  # it would say that the head is new
    log.disable_progress_bar()
    try:
        network, told = auto.from_pretrained(
            folder,
            num_labels=num_classes,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
    lacking = [*told["missing_keys"], *(name for name, *_ in told["mismatched_keys"])]
    module = Transformer(network, None if images else network.config.pad_token_id or 0)
    return _whole(module, [f"network.{name}" for name in lacking], input_shape)


def _filled(module: nn.Module, folder: Path, input_shape: tuple[int, ...]) -> nn.Module:
    """Load the folder's tensors; those of another shape must belong to the last layer, which is made anew."""
    found, wanted = load_file(folder / WEIGHTS), module.state_dict()
    lacking = [name for name, tensor in wanted.items() if name not in found or found[name].shape != tensor.shape]
    module.load_state_dict({name: tensor for name, tensor in found.items() if name not in lacking}, strict=False)
    return _whole(module, lacking, input_shape)


def _whole(module: nn.Module, lacking: list[str], input_shape: tuple[int, ...]) -> nn.Module:
    """Return a network; ValueError if its file lacks a layer beside the head and a pooler, which BERT's may lack."""
    head = head_of(module, input_shape) if lacking else ()
    if wrong := sorted(name for name in lacking if not name.startswith(head) and ".pooler." not in name):
        raise ValueError(f"tensors are missing or of another shape: {', '.join(wrong[:3])}")
    return module
