"""`flower-client export`: a client that trained alone takes its model out of its state folder."""

import json
from pathlib import Path

import pytest

from hyperbloom.client.cli import main
from hyperbloom.common import export
from hyperbloom.common.data import DataSpec, load_client_data
from hyperbloom.common.export import read_model
from hyperbloom.server.cli import main as server

SHORT = ["--engine", "inline", "--rounds", "2", "--eval-every", "2", "--clients", "2", "--cohort", "2"]


@pytest.fixture(autouse=True)
def without_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds, and has its own tests."""
    monkeypatch.setattr(export, "_ONNX", ("no_such_package",))


def wanted(run: Path, out: Path, *more: str) -> list[str]:
    state = str(run / "clients" / "client-1")
    return ["export", "--client-id", "client-1", "--state-dir", state, "--out", str(out), "--data", "digits", *more]


def test_the_model_has_the_accuracy_that_the_run_reports(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert server(["--strategy", "local", *SHORT, "--set", "local.steps=5", "--run-dir", str(run)]) == 0
    assert main(wanted(run, tmp_path / "model", "--partition", "1/2")) == 0
    reported = json.loads((run / "summary.json").read_text())["local"]["test_accuracy"]["client-1"]
    _, logits = read_model(tmp_path / "model")
    test = load_client_data(DataSpec(partition=1, partitions=2)).test
    correct = int((logits(test.inputs).argmax(1) == test.labels).sum())
    assert 100 * correct / len(test) == pytest.approx(reported)
    readme = (tmp_path / "model" / "README.md").read_text()
    assert f"{reported:.1f} %" in readme and "local" in readme


def test_a_part_of_a_model_and_no_model_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    args = ["--strategy", "pfedhn-pc", *SHORT, "--set", "local.steps=1", "--baselines", "local", "--run-dir", str(run)]
    assert server(args) == 0
    for flags, code, error in (
        ([], 2, "--run: expected one of"),
        (["--run", "pfedhn-pc"], 1, "belongs to another architecture"),
        (["--run", "absent"], 2, "expected the personal model of a run 'absent'"),
    ):
        assert main(wanted(run, tmp_path / "model", "--partition", "1/2", *flags)) == code
        assert error in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
    assert main(wanted(run, tmp_path / "model", "--partition", "1/2", "--run=-local")) == 0
