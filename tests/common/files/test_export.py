"""Model folders: three formats with the same logits, and all or nothing on the disk."""

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hyperbloom.client.work.sgd import FlatPart
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.errors import ConfigError, HyperbloomError, ModelError
from hyperbloom.common.files import export
from hyperbloom.common.files.export import OPSET, Card, read_model, write_model
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import ModelSpec, build

CARD = Card("A model of | somebody's", {"run": "r <b>"}, ("Its name.",), ("epsilon 0.3",))
SPECS = {
    "mlp": ModelSpec("mlp", "S", (1, 8, 8), 3),
    "lenet": ModelSpec("lenet", "S", (3, 32, 32), 3),
    "norms": ModelSpec("hafl-1", "S", (3, 8, 8), 3),
}
NAMES = ("cat", "dog", "eel")
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def network(spec: ModelSpec) -> nn.Module:
    """Return a network as training leaves it: parameters are views of one vector, norms have seen examples."""
    torch.manual_seed(0)
    module = build(spec)
    module.train()
    module(torch.randn(8, *spec.input_shape))
    FlatPart(module, Layout.of(module))
    return module


@quiet
@pytest.mark.parametrize("name", SPECS)
def test_every_format_has_the_logits_of_the_network(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="extra export")
    onnx = pytest.importorskip("onnx", reason="extra export")
    spec, folder = SPECS[name], tmp_path / "a" / "model"
    module = network(spec)
    mean, std = (0.5,) * spec.input_shape[0], (0.25,) * spec.input_shape[0]
    files = write_model(folder, module, spec, NAMES, Scaling(255.0, mean, std), CARD)
    assert files == ["README.md", "model.json", "model.onnx", "model.pt2", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["model"]

    described, logits = read_model(folder)
    assert described.spec == spec
    assert described.class_names == NAMES
    assert described.preprocessing == Scaling(255.0, mean, std)
    program = torch.export.load(folder / "model.pt2").module()
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    assert [entry.version for entry in onnx.load(folder / "model.onnx").opset_import if not entry.domain] == [OPSET]
    module.eval()
    for batch in (1, 5):
        inputs = torch.randn(batch, *spec.input_shape)
        with torch.no_grad():
            expected = module(inputs)
        torch.testing.assert_close(logits(inputs), expected, rtol=0, atol=0)
        torch.testing.assert_close(program(inputs), expected, rtol=0, atol=1e-6)
        (found,) = session.run(["logits"], {"inputs": inputs.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-5)
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == module.state_dict().keys()
    assert (folder / "model.safetensors").stat().st_size < 2 * sum(4 * t.numel() for t in stored.values()) + 20_000


def test_the_network_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "HAS_ONNX", False)
    module = network(SPECS["mlp"])
    first = next(module.parameters())
    before = first.detach().clone()
    write_model(tmp_path / "m", module, SPECS["mlp"], NAMES, Scaling(1.0), CARD)
    assert module.training
    assert first.requires_grad
    assert torch.equal(first, before)


def test_without_the_extra_there_is_no_onnx_and_the_card_does_not_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "HAS_ONNX", False)
    files = write_model(tmp_path / "m", network(SPECS["mlp"]), SPECS["mlp"], NAMES, Scaling(1.0), CARD)
    assert "model.onnx" not in files
    readme = (tmp_path / "m" / "README.md").read_text()
    assert "onnx" not in readme
    for text in ("# A model of | somebody's", "| run | r &lt;b> |", "* Its name.", "* epsilon 0.3", "cat, dog, eel"):
        assert text in readme


def test_a_card_for_numbers_says_how_to_prepare_them(tmp_path: Path) -> None:
    spec = ModelSpec("mlp", "S", (4,), 3)
    write_model(tmp_path / "m", network(spec), spec, NAMES, Scaling(1.0, (0.5,) * 4, (2.0,) * 4), CARD)
    readme = (tmp_path / "m" / "README.md").read_text()
    assert "predict --model . INPUTS.npz" in readme and "image files" not in readme
    assert (
        "bytes: divided by 255, minus [0.5, 0.5, 0.5, 0.5], by [2.0, 2.0, 2.0, 2.0]; floats are taken as they are: give"
        in readme
    )


def test_a_small_logit_beside_large_ones_need_be_no_more_exact_than_these() -> None:
    expected = np.array([[-200.0, 0.01], [0.5, 0.01]], dtype=np.float32)
    found = expected + np.array([[0.0, 2e-4], [0.0, 2e-6]], dtype=np.float32)
    assert export.difference(found, expected) == pytest.approx(2e-6, rel=0.05)  # 1e-6 of 200, 2e-6 of 1
    assert export.difference(expected + np.float32(1.0), expected) == pytest.approx(1.0)


@quiet
def test_onnx_that_computes_something_else_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("onnxruntime", reason="extra export")
    monkeypatch.setattr(export, "LARGEST_DIFFERENCE", -1.0)
    files = write_model(tmp_path / "m", network(SPECS["mlp"]), SPECS["mlp"], NAMES, Scaling(1.0), CARD)
    assert files == ["README.md", "model.json", "model.pt2", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == files
    assert "some files of the model are left out: model.onnx: expected torch's logits" in caplog.text


@quiet
def test_onnx_that_its_runtime_cannot_load_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="extra export")

    def refuse(folder: Path, name: str) -> NoReturn:
        raise ConfigError(f"{folder / name}: expected a network in ONNX")

    monkeypatch.setattr(export, "_onnx_session", refuse)
    files = write_model(tmp_path / "m", network(SPECS["mlp"]), SPECS["mlp"], NAMES, Scaling(1.0), CARD)
    assert files == ["README.md", "model.json", "model.pt2", "model.safetensors"]


@quiet
def test_of_a_network_that_onnx_cannot_express_the_other_files_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("onnxruntime", reason="extra export")

    class Bessel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.linear(torch.special.bessel_j0(x.flatten(1)))
            return logits

    module = Bessel()
    assert write_model(tmp_path / "m", module, SPECS["mlp"], NAMES, Scaling(1.0), CARD) == [
        "README.md",
        "model.json",
        "model.pt2",
        "model.safetensors",
    ]
    assert "left out: model.onnx: torch cannot convert the network: " in caplog.text
    inputs = torch.rand(3, *SPECS["mlp"].input_shape)
    torch.testing.assert_close(torch.export.load(tmp_path / "m" / "model.pt2").module()(inputs), module(inputs))


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 6), (errno.EROFS, 6), (errno.EACCES, 2)])
def test_a_full_disk_and_a_folder_of_others_have_their_exit_codes(tmp_path: Path, number: int, code: int) -> None:
    with (
        pytest.raises(HyperbloomError, match=r"^--out: cannot write .*/model: ") as caught,
        export.beside(tmp_path / "model"),
    ):
        raise OSError(number, os.strerror(number))
    assert caught.value.exit_code == code and list(tmp_path.iterdir()) == []


FULL = """
import resource, signal, sys
from pathlib import Path
import torch
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.errors import DiskError
from hyperbloom.common.files.export import Card, write_model
from hyperbloom.common.models import ModelSpec, build
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
spec, out = ModelSpec("mlp", "M", (1, 8, 8), 3), Path(sys.argv[1])
weights = sum(each.numel() * each.element_size() for each in build(spec).state_dict().values())
resource.setrlimit(resource.RLIMIT_FSIZE, (weights + 2000, weights + 2000))
try:
    write_model(out, build(spec), spec, ("a", "b", "c"), Scaling(1.0), Card("a model", {}, ()))
except DiskError as error:
    print(error)
"""


def test_a_disk_that_is_full_before_the_program_is_written_is_told(tmp_path: Path) -> None:
    """Torch's own writer, which packs more than the weights, would end the process."""
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path / "m")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"--out: cannot write {tmp_path}/m: File too large\n"), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_current_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To rename a draft to it would leave the shell in a deleted one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"expected a new or empty folder, by its name, found \."):
        write_model(Path(), network(SPECS["mlp"]), SPECS["mlp"], NAMES, Scaling(1.0), CARD)


def test_a_folder_with_files_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="new or empty folder"):
        write_model(tmp_path, network(SPECS["mlp"]), SPECS["mlp"], NAMES, Scaling(1.0), CARD)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_of_a_network_that_cannot_be_traced_the_weights_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.linear(x.flatten(1))
            return logits if float(logits.detach().sum()) > 0 else -logits

    with caplog.at_level("WARNING", "hyperbloom"):
        files = write_model(tmp_path / "m", module := Moody(), SPECS["mlp"], NAMES, Scaling(1.0), CARD)
    assert files == ["README.md", "model.json", "model.safetensors"]
    assert "some files of the model are left out: mlp: torch.export cannot trace it: " in caplog.text
    assert "model.pt2" not in (tmp_path / "m" / "README.md").read_text()
    torch.testing.assert_close(load_file(tmp_path / "m" / "model.safetensors"), dict(module.state_dict()))


def test_what_a_killed_export_left_is_deleted_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / ".m.draft"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    write_model(tmp_path / "m", network(SPECS["mlp"]), SPECS["mlp"], NAMES, Scaling(1.0), CARD)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert sorted(path.name for path in (tmp_path / "m").iterdir())[-1] == "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(export, "HAS_ONNX", False)
    write_model(tmp_path / "m", network(SPECS["mlp"]), SPECS["mlp"], NAMES, Scaling(1.0), CARD)
    return tmp_path / "m"


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("class_names", ["cat"], "expected 3 class_names, found 1"),
        ("num_classes", 0, "num_classes: expected"),
        ("format", 2, "format: expected"),
        ("size", "L", "expected the weights of model.json"),
        ("extra", 1, "extra: unknown key"),
        ("class_names", ["\x1b[2J", "dog", "eel"], "expected class_names that can be printed"),
        ("moments", [1.0, 2.0, 3.0], "expected moments: 3 means, and as many deviations"),
        ("moments", [math.nan] * 6, "expected moments: "),
        ("input_shape", [10**9], "expected the weights of model.json"),
        ("input_shape", [2**70], "expected"),
        ("num_classes", 2**40, "expected"),
        ("preprocessing", {"divisor": 255.0, "mean": [0.5] * 7, "std": [1.0]}, "expected in preprocessing a mean and"),
    ],
)
def test_a_damaged_description_is_told(folder: Path, key: str, value: object, error: str) -> None:
    path = folder / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=error):
        read_model(folder)


def test_a_description_that_is_too_deep_is_told(folder: Path) -> None:
    (folder / "model.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"model\.json: Invalid JSON: recursion limit"):
        read_model(folder)


@quiet
@pytest.mark.parametrize("outputs", [0, 2])
def test_a_foreign_network_that_is_none_or_another_is_told(tmp_path: Path, outputs: int) -> None:
    """In place of model.onnx lies garbage, or a network with fewer classes."""
    pytest.importorskip("onnxruntime", reason="extra export")
    for name, classes in (("m", 3), ("other", 2)):
        spec = ModelSpec("mynets:make", "M", (5,), classes)
        write_model(tmp_path / name, nn.Sequential(nn.Linear(5, classes)), spec, NAMES[:classes], Scaling(1.0), CARD)
    onnx = tmp_path / "m" / "model.onnx"
    onnx.write_bytes((tmp_path / "other" / "model.onnx").read_bytes() if outputs else b"garbage")
    with pytest.raises(
        ConfigError, match="expected 3 outputs for each input" if outputs else "expected a network in ONNX"
    ):
        read_model(tmp_path / "m")[1](torch.zeros(4, 5))
    with pytest.raises(ConfigError, match="its network fails on" if outputs else "expected a network in ONNX"):
        read_model(tmp_path / "m")[1](torch.zeros(4, 6))


def test_no_model_folder_is_told(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model: expected a model folder"):
        read_model(tmp_path / "absent")
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="expected the weights"):
        read_model(folder)


@quiet
def test_an_architecture_of_a_users_own_goes_through_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="extra export")
    spec = ModelSpec("mynets:make", "M", (5,), 3)
    module = nn.Sequential(nn.Linear(5, 3))
    write_model(tmp_path / "m", module, spec, NAMES, Scaling(1.0), CARD)
    _, logits = read_model(tmp_path / "m")
    inputs = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32))
    torch.testing.assert_close(logits(inputs), module(inputs).detach(), rtol=1e-5, atol=1e-5)
    (tmp_path / "m" / "model.onnx").unlink()
    with pytest.raises(ModelError, match=r"model.onnx, which is not there"):
        read_model(tmp_path / "m")


@quiet
def test_an_own_network_of_token_numbers_is_exported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Any numbers would be no rows of its table. Those of an input may be none: the error is all that a user reads."""
    pytest.importorskip("onnxruntime", reason="extra export")

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(50, 4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.linear(self.table(x.long()).mean(1))
            return logits

    module = Words()
    write_model(tmp_path / "m", module, ModelSpec("mynets:make", "M", (6,), 3), NAMES, Scaling(1.0), CARD)
    _, logits = read_model(tmp_path / "m")
    inputs = torch.randint(50, (4, 6)).float()
    torch.testing.assert_close(logits(inputs), module(inputs).detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match=r"its network fails on \(4, 6\): .* idx=50 must be within"):
        logits(inputs.fill_(50))
    assert capfd.readouterr().err == ""
