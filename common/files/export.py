"""Export of a model: a folder that people, phones and other programs can use.

    DIR/model.json           architecture, classes, and preprocessing of inputs
    DIR/model.safetensors    parameters and buffers by name
    DIR/model.pt2            the network as a program: `torch.export.load(...).module()`, any batch size
    DIR/model.onnx           the same for ONNX runtimes, checked against torch; only with the extra `export`
    DIR/adapter/             LoRA's layers and the head, for peft, if LoRA was trained
    DIR/README.md            the model card: origin, what the client sent, accuracy, privacy

The network returns what its task takes: logits without softmax, or numbers. The folder appears whole or not at all.
"""

import copy
import importlib.util
import io
import logging
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from jinja2 import Environment, StrictUndefined
from numpy.typing import NDArray
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hyperbloom import __version__
from hyperbloom.common.config import Positive, Section, check
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.data.schema import Schema
from hyperbloom.common.data.texts import TOKENIZER, copy_tokenizer
from hyperbloom.common.errors import FULL, ConfigError, DiskError, ModelError, describe, printable
from hyperbloom.common.files.storage import write_bytes, write_tensors
from hyperbloom.common.models import ModelSpec, build, full_layout, merged, model_names
from hyperbloom.common.models.adapt import write_adapter
from hyperbloom.common.models.generated import Generated
from hyperbloom.common.models.pretrained import check_tokens, vocabulary
from hyperbloom.common.tasks import CLASSIFICATION, Task, TaskSpec, make_task

OPSET = 18
"""ONNX operator set of the files. Torch writes it without conversion, and runtimes since early 2023 read it."""
LARGEST_DIFFERENCE = 1e-5
"""Largest accepted difference between the logits of torch and ONNX runtime, relative to the largest logit above 1."""

ADAPTER = "adapter"
HAS_ONNX = all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime")))


class ModelFile(Section):
    """The content of `model.json`. Image files are always divided by 255."""

    format: Annotated[int, Field(ge=1, le=1)] = 1
    model: str
    size: str
    input_shape: tuple[Positive, ...]
    num_classes: Positive
    class_names: tuple[str, ...]
    task: str = "classification"
    moments: tuple[float, ...] = ()
    preprocessing: Scaling
    made_by: str
    tokens: int = Field(0, ge=0, description="how many tokens the network knows; 0 if it takes other inputs")
    table: Schema | None = Field(None, description="what the columns of a table mean")

    @property
    def spec(self) -> ModelSpec:
        """The architecture."""
        return ModelSpec(self.model, self.size, self.input_shape, self.num_classes)

    @property
    def learned(self) -> Task:
        """The task that the outputs are for."""
        half = len(self.moments) // 2
        return make_task(TaskSpec(self.task, self.moments[:half], self.moments[half:]))


@dataclass(frozen=True)
class Card:
    """The content of the model card beside the facts in `model.json`.

    Attributes:
        origin: facts about the origin of the model by name, such as accuracy.
        sent: sentences about what left the client's machine.
        privacy: sentences about the privacy guarantee; empty if there is none.
        remarks: sentences about what a user must know.
    """

    title: str
    origin: Mapping[str, str]
    sent: tuple[str, ...]
    privacy: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def write_model(
    folder: Path,
    module: nn.Module,
    spec: ModelSpec,
    class_names: tuple[str, ...],
    scaling: Scaling,
    card: Card,
    task: TaskSpec = CLASSIFICATION.spec,
    schema: Schema | None = None,
) -> list[str]:
    """Write a model folder and return its files' names; what torch cannot trace or convert is left out, with a warning.

    Raises:
        ConfigError: the folder is not empty, or cannot be written.
    """
    adapted = module.release() if isinstance(module, Generated) else module
    module = _detached(merged(adapted))
    description = ModelFile(
        model=spec.name,
        size=spec.size,
        input_shape=spec.input_shape,
        num_classes=spec.num_classes,
        class_names=class_names,
        task=task.name,
        moments=(*task.mean, *task.std),
        preprocessing=scaling,
        made_by=f"hyperbloom {__version__}",
        tokens=vocabulary(module),
        table=schema,
    )
    with beside(folder) as draft:
        write_bytes(draft / "model.json", f"{description.model_dump_json(indent=2)}\n".encode())
        write_tensors(draft / "model.safetensors", module.state_dict(), {"format": "pt"})
        write_adapter(draft / ADAPTER, adapted)
        if schema and schema.text_column and spec.backbone:
            copy_tokenizer(spec.backbone, draft / TOKENIZER)
        try:
            program = _trace(module, spec)
            torch.export.save(program, whole := io.BytesIO())  # to a full disk, torch's own writer ends the process
            write_bytes(draft / "model.pt2", whole.getvalue())
            if HAS_ONNX:
                _write_onnx(draft / "model.onnx", program, module, spec.input_shape)
        except (ConfigError, ModelError) as error:  # the weights are of use without it
            (draft / "model.onnx").unlink(missing_ok=True)
            logging.getLogger("hyperbloom").warning("some files of the model are left out: %s", error)
        there = {path.name for path in draft.iterdir()}
        write_bytes(draft / "README.md", _README.render(model=description, card=card, there=there).encode())
        files = sorted({*there, "README.md"})
        draft.rename(folder)
    return files


def read_model(folder: Path) -> tuple[ModelFile, Callable[[Tensor], Tensor]]:
    """Return the description of a model folder, and a function from inputs `(B, *input_shape)` to outputs.

    A registered architecture is built and loads the weights. A user's own architecture runs in ONNX runtime: its code
    may not be importable here, and reading `model.pt2` unpickles, which can run foreign code.

    Raises:
        ConfigError: the folder is no model folder, or is damaged.
        ModelError: the architecture is a user's own, and the ONNX file or the runtime is missing.
    """
    path = folder / "model.json"
    try:
        described = check(ModelFile, path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--model: expected a model folder with model.json, found {folder} ({error})") from None
    if len(described.class_names) != described.num_classes:
        raise ConfigError(f"{path}: expected {described.num_classes} class_names, found {len(described.class_names)}")
    if len(described.moments) not in (0, 2 * described.num_classes) or not all(map(math.isfinite, described.moments)):
        raise ConfigError(f"{path}: expected moments: {described.num_classes} means, and as many deviations")
    if not all(name.isprintable() for name in described.class_names):
        raise ConfigError(f"{path}: expected class_names that can be printed, found control characters")
    if described.table is not None and described.input_shape != (described.table.width,):
        raise ConfigError(f"{path}: its table has {described.table.width} inputs, found {described.input_shape}")
    scaling = described.preprocessing
    if len(scaling.mean) != len(scaling.std) or len(scaling.std) not in (0, 1, *described.input_shape[:1]):
        raise ConfigError(f"{path}: expected in preprocessing a mean and a std for each channel, one for all, or none")
    own = described.model not in model_names()
    network = _onnx_session(folder, described.model) if own else _network(folder, described.spec)
    shape = described.learned.output_shape(described.num_classes, described.input_shape)
    return described, _checked(network, folder, shape, described.tokens)


def _network(folder: Path, spec: ModelSpec) -> Callable[[Tensor], Tensor]:
    path = folder / "model.safetensors"
    try:
        needed = 2 * full_layout(spec).numel  # bytes at least; a description may ask for more memory than there is
        if needed > path.stat().st_size:
            raise ValueError(f"it needs {needed} bytes or more")
        module = build(spec).eval()
        module.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        reason = (str(error).splitlines() or [describe(error)])[-1].strip()
        raise ConfigError(f"{path}: expected the weights of model.json: {reason}") from None
    return torch.no_grad()(module)


def _checked(
    network: Callable[[Tensor], Tensor], folder: Path, shape: tuple[int, ...], tokens: int
) -> Callable[[Tensor], Tensor]:
    """Return the network of a folder from elsewhere: it may fail, or return something else."""

    def logits(inputs: Tensor) -> Tensor:
        check_tokens("--model", tokens, inputs)
        try:
            found = network(inputs)
        except Exception as error:
            raise ConfigError(f"{folder}: its network fails on {tuple(inputs.shape)}: {describe(error)}") from error
        if found.shape != (len(inputs), *shape):
            wanted = " x ".join(map(str, shape))
            raise ConfigError(f"{folder}: expected {wanted} outputs for each input, found {tuple(found.shape)}")
        return found

    return logits


def _onnx_session(folder: Path, name: str) -> Callable[[Tensor], Tensor]:
    path = folder / "model.onnx"
    if not path.is_file() or not importlib.util.find_spec("onnxruntime"):
        what = "onnxruntime: pip install onnxruntime" if path.is_file() else f"{path}, which is not there"
        raise ModelError(f"{name} is an architecture of a user's own; to run it here takes {what}")
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)  # it would print what it raises, before our own line
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # it has classes of its own for each fault
        raise ConfigError(f"{path}: expected a network in ONNX: {describe(error)}") from None
    return lambda inputs: torch.from_numpy(session.run(None, {"inputs": inputs.numpy()})[0])


def _detached(module: nn.Module) -> nn.Module:
    """Return a copy on the CPU whose tensors own their memory, because in training they are views of one vector."""
    module = copy.deepcopy(module).cpu().eval()
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)
        tensor.requires_grad_(False)
        tensor.grad = None
    return module


@contextmanager
def beside(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside `folder`, and remove it afterwards unless it was renamed; ConfigError if that fails."""
    if folder.exists() and (not folder.name or not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out: expected a new or empty folder, by its name, found {folder}")
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)  # of an export that was killed
    try:
        draft.mkdir(parents=True)
        yield draft
    except OSError as error:
        kind = DiskError if error.errno in FULL else ConfigError
        raise kind(f"--out: cannot write {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _trace(module: nn.Module, spec: ModelSpec) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    try:
        # Two examples, because torch would treat a batch of one as a constant.
        return torch.export.export(module, (torch.zeros(2, *spec.input_shape),), dynamic_shapes=({0: batch},))
    except Exception as error:
        raise ModelError(f"{spec.name}: torch.export cannot trace it: {describe(error)[:300]}") from error


def _write_onnx(path: Path, program: torch.export.ExportedProgram, module: nn.Module, shape: tuple[int, ...]) -> None:
    names: dict[str, Any] = {"input_names": ["inputs"], "output_names": ["logits"]}
    told = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            onnx = torch.onnx.export(program, opset_version=OPSET, dynamo=True, verbose=False, **names)
    except Exception as error:  # it has classes of its own for each fault
        raise ModelError(f"{path.name}: torch cannot convert the network: {describe(error)[:300]}") from error
    finally:
        logging.disable(told)
    assert onnx is not None
    onnx.save(path)
    network = _onnx_session(path.parent, path.name)
    rows = [each.num_embeddings for each in module.modules() if isinstance(each, nn.Embedding)]
    known = vocabulary(module) or min(rows, default=0)
    for batch in (1, 3):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(batch, *shape, generator=generator)
        if known:  # numbers of tokens
            inputs = torch.randint(known, (batch, *shape), generator=generator).float()
        with torch.no_grad():
            expected = module(inputs).numpy()
        worst = difference(network(inputs).numpy(), expected)
        if not worst <= LARGEST_DIFFERENCE:
            raise ModelError(f"model.onnx: expected torch's logits to {LARGEST_DIFFERENCE}, found a difference {worst}")


def difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return the largest difference of logits `(B, K)`, relative to the largest expected logit of a row above 1."""
    return float(np.max(np.abs(found - expected) / np.maximum(1.0, np.abs(expected).max(axis=1, keepdims=True))))


def _plain(text: str) -> str:
    """Escape names that others chose, so that they are no markup."""
    return " ".join(printable(text).split()).replace("|", "\\|").replace("<", "&lt;")


_TEMPLATES = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)
_TEMPLATES.filters["plain"] = _plain
_README = _TEMPLATES.from_string(Path(__file__).with_name("readme.md").read_text(encoding="utf-8"))
