"""`flower-client predict` and `keygen`: what they print and write."""

import json
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from hyperbloom.client.cli import main
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.files import export
from hyperbloom.common.files.export import Card, write_model
from hyperbloom.common.models import ModelSpec, build
from hyperbloom.common.secrecy.keys import fingerprint, public_pem, read_private_key, read_public_key
from hyperbloom.common.tasks import TaskSpec


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a model whose class is the sign of the first feature."""
    monkeypatch.setattr(export, "HAS_ONNX", False)
    spec = ModelSpec("mlp", "S", (4,), 2)
    module = build(spec)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        parameters = dict(module.named_parameters())
        first, head = parameters["fc1.weight"], parameters["head.weight"]
        first[0, 0], first[1, 0] = 1.0, -1.0
        head[0, 1], head[1, 0] = 1.0, 1.0
    write_model(tmp_path / "model", module, spec, ("minus [x]", "plus"), Scaling(1.0), Card("T", {}, ()))
    np.save(tmp_path / "inputs.npy", np.array([[2, 0, 0, 0], [-1, 0, 0, 0]], dtype=np.float32))
    return tmp_path / "model"


def test_lines_for_programs(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = model.parent / "inputs.npy"
    assert main(["predict", "--model", str(model), str(file)]) == 0
    plus, minus = 1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(-1.0))
    assert capsys.readouterr().out == f"{file}[0]\tplus\t{plus:.6f}\n{file}[1]\tminus [x]\t{minus:.6f}\n"
    assert main(["predict", "--model", str(model), "--json", str(file)]) == 0
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first["file"] == f"{file}[0]" and first["class"] == "plus"
    assert first["probabilities"] == pytest.approx([1 - plus, plus])
    assert second["probability"] == pytest.approx(minus)


def test_a_table_for_people(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["predict", "--model", str(model), str(model.parent / "inputs.npy")]) == 0
    shown = capsys.readouterr().out
    assert "probability" in shown and "minus [x]" in shown and "0.8808" in shown and "\t" not in shown


def test_more_inputs_than_go_through_at_once_keep_their_names(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = np.zeros((600, 4), np.float32)
    values[:, 0] = np.where(np.arange(600) % 7 == 0, -1, 1)
    np.save(model.parent / "many.npy", values)
    assert main(["predict", "--model", str(model), str(model.parent / "many.npy")]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[1] == "minus [x]" for line in lines] == [index % 7 == 0 for index in range(600)]
    assert lines[599][0].endswith("[599]")


def test_masks_are_files_and_lie_over_the_images_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "HAS_ONNX", False)
    spec = ModelSpec("unet", "S", (1, 8, 8), 2)
    write_model(
        tmp_path / "m", build(spec), spec, ("ground", "mask"), Scaling(1.0), Card("T", {}, ()), TaskSpec("segmentation")
    )
    np.save(tmp_path / "two.npy", np.random.default_rng(0).random((2, 1, 8, 8), dtype=np.float32))
    where = ["--masks", str(tmp_path / "masks"), "--report", str(tmp_path / "report.html")]
    assert main(["predict", "--model", str(tmp_path / "m"), "--json", *where, str(tmp_path / "two.npy")]) == 0
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(first["shares"].values()) == pytest.approx(1.0) and Path(second["mask"]).is_file()
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img") == 2 and "two.npy[1]" in page and "> mask" in page
    assert (
        main(["predict", "--model", str(tmp_path / "m"), "--masks", str(tmp_path / "more"), str(tmp_path / "two.npy")])
        == 0
    )
    shown = capsys.readouterr().out.splitlines()[0].split("\t")
    assert float(shown[1]) + float(shown[2]) == pytest.approx(1.0) and Path(shown[3]).is_file()


def test_a_report_is_for_images(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--model", str(model), "--report", "r.html", str(model.parent / "inputs.npy")]) == 2
    assert "--report: expected a model of images, found inputs of shape (4,)" in capsys.readouterr().err


def test_errors_are_one_line_and_code_2(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--model", str(model), "absent.png"]) == 2
    assert capsys.readouterr().err.startswith("flower-client predict: absent.png: expected an image")
    assert main(["predict", "--model", "absent", str(model.parent / "inputs.npy")]) == 2
    assert capsys.readouterr().err.startswith("flower-client predict: --model: expected a model folder")


# ---------------------------------------------------------------------- keygen


def test_the_pair_belongs_together_and_the_public_half_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ward-7.pem"
    assert main(["keygen", "--out", str(path)]) == 0
    public = public_pem(read_private_key(path, "--key"))
    assert read_public_key(tmp_path / "ward-7.pub", "--public-key") == public
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert capsys.readouterr().out == (
        f"{public}fingerprint {fingerprint(public)}\nthe private key is {path}, the public key {tmp_path}/ward-7.pub\n"
    )


@pytest.mark.parametrize("there", ["ward-7.pem", "ward-7.pub"])
def test_keys_are_never_overwritten(tmp_path: Path, there: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / there).write_text("precious")
    assert main(["keygen", "--out", str(tmp_path / "ward-7.pem")]) == 2
    assert capsys.readouterr().err == (
        f"flower-client keygen: --out: {tmp_path / there} is there already; keys are never overwritten\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "precious"


def test_a_folder_is_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["keygen", "--out", "."]) == 2
    assert "--out: . is there already" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_private_key_cannot_be_its_own_public_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", "--out", str(tmp_path / "ward-7.pub")]) == 2
    assert "expected another suffix than .pub, which the public key gets" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
