"""`flower-client export`: a client takes a model that no one else has out of its state folder."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hyperbloom.client.cli import main
from hyperbloom.client.keep.own_model import write_own_model
from hyperbloom.client.keep.state import ClientState, Scored
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work import evaluation
from hyperbloom.client.work.client import Client
from hyperbloom.client.work.scoring import evaluate
from hyperbloom.common.data import DataSpec, Examples, load_client_data
from hyperbloom.common.errors import ConfigError, HyperbloomError, ModelError
from hyperbloom.common.files import export
from hyperbloom.common.files.export import read_model
from hyperbloom.common.models import ModelSpec, build
from hyperbloom.common.wire.orders import EvaluateOrder, Scope, SplitScore, Target
from hyperbloom.server.cli import main as server
from tests.common.models.backbones import image_folder

SHORT = ["--engine", "inline", "--rounds", "2", "--eval-every", "2", "--clients", "2", "--cohort", "2"]


@pytest.fixture(autouse=True)
def without_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds, and has its own tests."""
    monkeypatch.setattr(export, "HAS_ONNX", False)


def wanted(run: Path, out: Path, *more: str) -> list[str]:
    state = str(run / "clients" / "client-1")
    return ["export", "--client-id", "client-1", "--state-dir", state, "--out", str(out), "--data", "digits", *more]


SHARED = """
from torch import nn

class Tied(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, classes)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.head(self.b(self.a(x.flatten(1)).relu()).relu())

class Twice(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.a = nn.Linear(64, 64)
        self.net = nn.Sequential(nn.Flatten(), self.a, nn.ReLU(), self.a, nn.ReLU(), nn.Linear(64, classes))

    def forward(self, x):
        return self.net(x)

def tied(input_shape, num_classes):
    return Tied(num_classes)

def twice(input_shape, num_classes):
    return Twice(num_classes)
"""
"""Networks in which a parameter has two names, and a layer."""

CASES = {
    "local": ["--strategy", "local"],
    "head at home": ["--strategy", "pfedhn-pc"],
    "head and embedding at home": ["--strategy", "hyperfl", "--set", "hidden_dim=8"],
    "body at home": ["--strategy", "lg-fedavg"],
    "copy at home": ["--strategy", "pfedme"],
    "adapted": ["--strategy", "fedavg-ft"],
    "generated": ["--strategy", "ghn", "--set", "models=[mlp]"],
    "running norms": ["--strategy", "fedavg", "--set", "model=hafl-1", "--set", "sizes=[S]"],
    "generated, with running norms": ["--strategy", "ghn", "--set", "models=[hafl-1]", "--set", "sizes=[S]"],
    "generated, a tied weight": ["--strategy", "ghn", "--set", "models=[own_shared:tied]"],
    "generated, a layer of two names": ["--strategy", "ghn", "--set", "models=[own_shared:twice]"],
    "sent and refined, a tied weight": ["--strategy", "ghn-server", "--set", "models=[own_shared:tied]"],
    "local, a layer of two names": ["--strategy", "local", "--set", "models=[own_shared:twice]"],
}


@pytest.mark.parametrize("case", CASES)
def test_the_model_has_the_accuracy_that_the_run_reports(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_shared.py").write_text(SHARED)
    monkeypatch.chdir(tmp_path)
    run, (_, strategy, *more) = tmp_path / "run", CASES[case]
    assert server([*CASES[case], *SHORT, "--set", "local.steps=3", "--run-dir", str(run)]) == 0
    assert main(wanted(run, tmp_path / "model", "--partition", "1/2")) == 0
    reported = json.loads((run / "summary.json").read_text())[strategy]["test_accuracy"]["client-1"]
    if "own_shared" in str(more):  # its architecture is not looked for in a model folder
        logits: Callable[[Tensor], Tensor] = torch.export.load(tmp_path / "model" / "model.pt2").module()
        stored = load_file(tmp_path / "model" / "model.safetensors")
        assert torch.equal(*[stored[name] for name in stored if name in ("a.weight", "b.weight", "net.1.weight")])
    else:
        _, logits = read_model(tmp_path / "model")
    test = load_client_data(DataSpec(partition=1, partitions=2)).test
    correct = int((logits(test.inputs).argmax(1) == test.labels).sum())
    assert 100 * correct / len(test) == pytest.approx(reported)
    readme = (tmp_path / "model" / "README.md").read_text()
    assert f"{reported:.1f} %" in readme and strategy in readme
    assert "training loss" in readme and "version of its program" in readme
    assert ("never left it" in readme) == (strategy == "local" or case.endswith("at home"))


@pytest.mark.parametrize("case", ["head at home", "running norms"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torch_and_onnx_compute_what_the_client_was_scored_with(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="extra export")
    monkeypatch.undo()
    scored: list[tuple[torch.Tensor, torch.Tensor]] = []

    def spy(module: nn.Module, data: Examples, *more: Any) -> SplitScore:
        with torch.no_grad():
            scored.append((data.inputs, module.eval()(data.inputs)))
        return evaluate(module, data, *more)

    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "evaluate", spy)
        args = [*CASES[case], *SHORT, "--set", "local.steps=3", "--run-dir", str(tmp_path / "run")]
        assert server(args) == 0
    inputs, expected = scored[-1]  # the last client's test examples
    assert main(wanted(tmp_path / "run", tmp_path / "model")) == 0
    assert (tmp_path / "model" / "model.onnx").exists()
    (found,) = onnxruntime.InferenceSession(tmp_path / "model" / "model.onnx").run(None, {"inputs": inputs.numpy()})
    program = torch.export.load(tmp_path / "model" / "model.pt2").module()
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(program(inputs), expected, rtol=1e-5, atol=1e-5)


def test_models_that_the_server_has_are_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    args = ["--strategy", "pfedhn", *SHORT, "--set", "local.steps=1", "--baselines", "fedavg", "--run-dir", str(run)]
    assert server(args) == 0
    assert not list(run.glob("clients/*/scored/*"))
    assert main(wanted(run, tmp_path / "model")) == 2
    assert "flower-server export" in capsys.readouterr().err


def test_a_full_disk_does_not_cost_the_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise HyperbloomError("the client cannot write its state: No space left on device")

    monkeypatch.setattr(ClientState, "save_scored", full)
    assert server(["--strategy", "local", *SHORT, "--set", "local.steps=1", "--run-dir", str(tmp_path / "run")]) == 0
    assert len(json.loads((tmp_path / "run" / "summary.json").read_text())["local"]["test_accuracy"]) == 2


def test_which_run_and_which_data_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    args = ["--strategy", "pfedhn-pc", *SHORT, "--set", "local.steps=1", "--baselines", "local", "--run-dir", str(run)]
    assert server(args) == 0
    np.savez(tmp_path / "other.npz", x=np.zeros((40, 1, 8, 8), np.float32), y=np.arange(40) % 3)
    np.savez(tmp_path / "larger.npz", x=np.zeros((40, 1, 9, 9), np.float32), y=np.arange(40) % 10)
    for flags, code, error in (
        ([], 2, "--run: expected one of"),
        (["--run", "absent"], 2, "expected the model of a run 'absent'"),
        (
            ["--run=-local", "--data", str(tmp_path / "other.npz")],
            2,
            "expected inputs of shape (1, 8, 8) in 10 classes, as the model has, found (1, 8, 8) in 3",
        ),
        (
            ["--run=-local", "--data", str(tmp_path / "larger.npz")],
            2,
            "expected inputs of shape (1, 8, 8) in 10 classes, as the model has, found (1, 9, 9) in 10",
        ),
    ):
        assert main(wanted(run, tmp_path / "model", *flags)) == code
        assert error in capsys.readouterr().err
    (scored,) = run.glob("clients/client-1/scored/*-local.safetensors")
    scored.write_bytes(b"{}")
    assert main(wanted(run, tmp_path / "model", "--run=-local")) == 1
    assert "cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
    assert main(wanted(run, tmp_path / "model", "--run=-pc")) == 0


def test_a_run_named_in_full_is_meant_though_another_begins_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "scored").mkdir()
    for run in ("r-fedhenn", "r-fedhenn-homogeneous"):
        (tmp_path / "scored" / f"{run}.safetensors").write_bytes(b"{}")
    settings = ClientSettings("a", DataSpec("digits"), state_dir=tmp_path)
    with pytest.raises(HyperbloomError, match=r"r-fedhenn\.safetensors cannot be read"):
        write_own_model(settings, "r-fedhenn", tmp_path / "model")
    with pytest.raises(ConfigError, match="--run: expected one of r-fedhenn, r-fedhenn-homogeneous"):
        write_own_model(settings, "fedhenn", tmp_path / "model")


@pytest.mark.parametrize("now", ["a layer more", "a layer less", "another shape"])
def test_a_network_that_has_changed_since_its_training_is_not_written(now: str, tmp_path: Path) -> None:
    """What is new in it would be random, and look like a trained model."""
    settings = ClientSettings("a", DataSpec(partition=0, partitions=2), state_dir=tmp_path)
    tensors = dict(build(ModelSpec("mlp", "M", (1, 8, 8), 10)).state_dict())
    name = next(iter(tensors))
    if now == "a layer less":
        tensors["lost.weight"] = tensors[name]
    elif now == "a layer more":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:1]
    facts = {"model": "mlp", "size": "M", "input_shape": (1, 8, 8), "num_classes": 10, "round": 1, "private": "all"}
    known = {"task": "classification", "moments": (), "metrics": {}, "total": 1}
    ClientState(tmp_path).save_scored("run", tensors, Scored.model_validate(facts | known))
    with pytest.raises(ModelError, match="mlp: is no longer the network that run trained"):
        write_own_model(settings, "run", tmp_path / "model")


def test_a_head_is_written_with_the_backbone_of_its_training_only(tmp_path: Path) -> None:
    """Another network under the same head is another model, and looks like the one that was scored."""
    right, other = image_folder(tmp_path / "right"), image_folder(tmp_path / "other", seed=1)
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).random((60, 1, 8, 8), np.float32), y=np.arange(60) % 3)
    run = tmp_path / "run"
    more = ["--data", str(tmp_path / "x.npz"), "--set", f"backbone={right}", "--set", "adapt=head"]
    assert server(["--strategy", "ditto", *SHORT, *more, "--set", "local.steps=1", "--run-dir", str(run)]) == 0
    data = DataSpec(str(tmp_path / "x.npz"), partition=1, partitions=2)
    for found, message in (
        (right, ""),
        (other, "--backbone: expected sha256:.*found sha256:"),
        (None, "--backbone: exp"),
    ):
        where = None if found is None else str(found)
        settings = ClientSettings("client-1", replace(data, backbone=where), state_dir=run / "clients" / "client-1")
        with pytest.raises(HyperbloomError, match=message) if message else nullcontext():
            write_own_model(settings, None, tmp_path / "model")
    assert (tmp_path / "model" / "model.json").exists()


def test_a_model_of_a_table_keeps_the_schema_of_its_run(tmp_path: Path) -> None:
    """The server of a later run hands out another scale, and the client reads its table by that from then on."""
    (tmp_path / "t.csv").write_text("\n".join(["age,ill", *(f"{age},{age % 2}" for age in range(40))]))
    settings = ClientSettings("a", DataSpec(str(tmp_path / "t.csv"), label="ill"), "cpu", state_dir=tmp_path / "a")
    text = '{"label": ["ill"], "classes": ["0", "1"], "columns": [{"name": "age", "kind": "number", "std": %s}]}'
    for run, std in (("one", "2.0"), ("two", "5.0")):
        worker = Client(settings)
        worker.adopt(text % std)
        network = build(ModelSpec("mlp", "M", worker.input_shape, worker.num_classes))
        score = SplitScore(1, 0.5, ("accuracy",), (1.0,))
        order = EvaluateOrder(scope=Scope(run_id=run, round=1, seed=0), target=Target("mlp", 2, "none"))
        evaluation.keep_scored(worker, order, dict(network.state_dict()), score)
        write_own_model(settings, run, tmp_path / run)
    found = [read_model(tmp_path / run)[0].table for run in ("one", "two")]
    assert [schema.columns[0].std for schema in found if schema] == [2.0, 5.0]


def test_a_model_of_a_registered_table_is_written_too(tmp_path: Path) -> None:
    run, data = tmp_path / "run", ["--data", "heart-disease", "--split", "owner"]
    size = ["--clients", "4", "--cohort", "4", "--rounds", "1", "--set", "gains=false", "--set", "local.steps=1"]
    assert server(["--engine", "inline", "--strategy", "pfedhn-pc", *data, *size, "--run-dir", str(run)]) == 0
    state = ["--state-dir", str(run / "clients/client-0"), "--partition", "0/4"]
    assert main(["export", "--client-id", "client-0", *data, *state, "--out", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "model.json").exists()
