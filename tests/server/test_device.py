"""The server's networks on another device: all of their tensors move, and the results are those of the CPU."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyperbloom.client.work.client import client_for
from hyperbloom.common.errors import ConfigError
from hyperbloom.server.cli import main
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.server.loop.listener import Checkpoint, Listener, Resume
from hyperbloom.server.loop.session import Session
from tests.server.test_resume import make_config
from tests.slow import quick

aten = torch.ops.aten

ACROSS = (aten.copy_.default, aten._to_copy.default, aten.index.Tensor, aten._index_put_impl_.default)
"""What CUDA, too, does with tensors of two devices; an index may be on the CPU."""

GRAPHS = {"latent": 8, "hidden": 4, "refine_epochs": 0}

RUNS: dict[str, dict[str, Any]] = {
    **{rule: {"options": {"hidden_dim": 8, "update": rule}} for rule in ("proximal", "mean")},
    "chunked": {"options": {"hypernetwork": "chunked", "chunk": 100, "hidden_dim": 8}},
    "linear": {"strategy": "figures.linear:PFedHNLinear"},
    "sparse": {"options": {"hidden_dim": 8, "embeddings": "sparse"}},
    "spectral": {"strategy": "figures.spectral_norm:PFedHNSpectral", "options": {"hidden_dim": 8}},
    "robust": {"options": {"hidden_dim": 8, "clip_deltas": "median"}, "cohort": 4},
    "asynchronous": {"options": {"hidden_dim": 8}, "asynchronous": True},
    "pfedhn-heads": {"strategy": "pfedhn-heads", "models": ("mlp", "cnn-1")},
    "odpfl": {"strategy": "odpfl", "novel": 25},
    "two-phase": {"strategy": "odpfl", "novel": 25, "options": {"hidden_dim": 8, "mode": "two-phase", "tune": 0.5}},
    "pfl-ensemble": {"strategy": "pfl-ensemble"},
    "pfl-nearest": {"strategy": "pfl-nearest"},
    "ghn": {"strategy": "ghn", "models": ("mlp", "cnn-1"), "options": GRAPHS},
    "ghn-server": {"strategy": "ghn-server", "models": ("mlp", "cnn-1"), "options": GRAPHS | {"fit_steps": 2}},
    "ghn-linear": {"strategy": "ghn-server", "models": ("mlp",), "options": GRAPHS | {"mode": "linear"}},
}


class Elsewhere(TorchDispatchMode):
    """Makes torch's meta device one from which zeros come back, and which computes with nothing of the CPU's.

    Attributes:
        computed: operations on the device.
    """

    computed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        kinds = {tensor.device.type for tensor in tensors}
        assert len(kinds) < 2 or func in ACROSS, f"{func} has tensors on {kinds}"
        if "meta" not in kinds:
            return func(*args, **kwargs)
        self.computed += 1
        if func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is aten._local_scalar_dense.default:
            return 1.0
        if func is aten._fused_sgd_.default:  # in place; torch has none for its meta device
            return None
        return func(*args, **kwargs)


class Last(Listener):
    """Keeps the last checkpoint, which a run that goes on can start from."""

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        if checkpoint.tensors:  # the CPU's are those that the algorithm goes on to change
            copies = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
            self.kept = replace(checkpoint, tensors=copies)


def play(name: str, folder: Path, device: str) -> Checkpoint:
    """Run to the end, go on from the last checkpoint as a new process would, and return the state."""
    config = make_config(**({"strategy": "pfedhn", "rounds": 3, "checkpoint_every": 2} | RUNS[name]))
    last = Last()
    client_for.cache_clear()
    Session(config, inline_grid(config, folder, False), "run", [last], device=device).run()
    again = Resume(last.kept, [(0, last.kept.progress.orders)], [])
    client_for.cache_clear()
    Session(config, inline_grid(config, folder, False), "run", [last], resume=again, device=device).run()
    return last.kept


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
@pytest.mark.parametrize("name", quick(RUNS, "chunked", "sparse", "spectral", "two-phase", "ghn-server"))
def test_no_tensor_stays_behind(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The optimiser asks which devices have a fused step.
    optimizers = sys.modules["torch.optim.optimizer"]
    monkeypatch.setattr(optimizers, "_get_fused_kernels_supported_devices", lambda: ["cpu", "cuda", "meta"])
    with Elsewhere() as elsewhere:
        kept = play(name, tmp_path, "meta")
    assert elsewhere.computed > 20
    assert all(tensor.device.type == "cpu" for tensor in kept.tensors.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", RUNS)
def test_cuda_gives_what_the_cpu_gives(name: str, tmp_path: Path) -> None:
    here, there = (play(name, tmp_path / device, device).tensors for device in ("cpu", "cuda"))
    assert here.keys() == there.keys()
    for key, tensor in here.items():
        torch.testing.assert_close(there[key], tensor, rtol=1e-3, atol=1e-4, msg=key)


def test_a_device_that_is_not_there_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(["--engine", "inline", "--device", "cuda:99", "--run-dir", str(folder)]) == ConfigError.exit_code
    assert "--device: expected auto or a device of this machine, found 'cuda:99'" in capsys.readouterr().err
    assert not folder.exists()
