"""Runs from a program: the same as the command's, in tables."""

import html
import re
import sys
import types
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hyperbloom
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import LocalConfig, RunConfig
from hyperbloom.common.errors import ConfigError, HyperbloomError
from hyperbloom.server.cli import main
from hyperbloom.server.flower_strategy import FlowerStrategy
from hyperbloom.server.runs.folder import RunFolder

KEYS = {"strategy": "pfedhn", "clients": 3, "cohort": 2, "rounds": 2, "eval_every": 2, "local.steps": 2}

pytestmark = pytest.mark.usefixtures("clean_process")


def test_a_run_of_the_library_is_the_command_s(tmp_path: Path) -> None:
    run = hyperbloom.run({**KEYS, "baselines": ["local"]}, run_dir=tmp_path / "library")
    words = ["--engine", "inline", "--strategy", "pfedhn", "--clients", "3", "--cohort", "2", "--rounds", "2"]
    words += ["--eval-every", "2", "--set", "local.steps=2", "--baselines", "local"]
    assert main([*words, "--run-dir", str(tmp_path / "command")]) == 0
    same = [hyperbloom.Run(folder) for folder in (run.folder, tmp_path / "command")]
    timeless = [[{**row, "seconds": 0, "elapsed": 0} for row in each.metrics] for each in same]
    assert timeless[0] == timeless[1]
    assert [(row["strategy"], row["round"]) for row in run.metrics] == [
        *(("pfedhn", 1), ("pfedhn", 2), ("local", 1), ("local", 2))
    ]
    assert same[0].accuracy == same[1].accuracy
    assert {(row["strategy"], row["client"]) for row in run.accuracy} == {
        (strategy, f"client-{index}") for strategy in ("pfedhn", "local") for index in range(3)
    }
    assert {row["client"] for row in run.clients if row["round"] == 2 and "test_accuracy" in row} == {
        f"client-{index}" for index in range(3)
    }


def test_a_file_describes_it_and_a_complete_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{strategy: local, clients: 1, rounds: 1, local: {steps: 1}}")
    run = hyperbloom.run(tmp_path / "run.yaml", run_dir=tmp_path / "run")
    assert (run.config.strategy, len(run.metrics)) == ("local", 1)
    report = (tmp_path / "run" / "report.html").stat()
    assert hyperbloom.run(tmp_path / "run.yaml", run_dir=tmp_path / "run") == run
    assert (tmp_path / "run" / "report.html").stat().st_mtime_ns == report.st_mtime_ns, "nothing was run"
    with pytest.raises(ConfigError, match=r"^rounds: expected .* found 0 in run\(\)$"):
        hyperbloom.run({"rounds": 0})


def test_a_client_of_a_run_and_its_report(tmp_path: Path) -> None:
    made = hyperbloom.run({**KEYS, "baselines": ["local"], "gains": True}, run_dir=tmp_path / "run")
    run = hyperbloom.Run(str(made.folder))  # type: ignore[arg-type]  # as people write it
    assert run == made
    client = run.client("client-1")
    assert isinstance(client, hyperbloom.Client) and client.about["train_examples"] > 0
    assert {row["client"] for row in client.rounds} == {"client-1"} and client.rounds
    told = {row["strategy"]: row["test_accuracy"] for row in run.accuracy if row["client"] == "client-1"}
    assert client.accuracy == told and set(told) == {"pfedhn", "local"}
    says, gain = client.gain or ("", None)
    assert says.startswith("client-1") and gain is not None and len(gain.models) == len(gain.test)
    module = torch.export.load(client.export(tmp_path / "model") / "model.pt2").module()
    scores = torch.as_tensor(module(torch.zeros(1, 1, 8, 8)))
    assert scores.shape == (1, 10)
    with pytest.raises(ConfigError, match=r"^client: expected one of client-0, client-1, client-2, found 'ward'"):
        run.client("ward")
    shown = run.report._repr_html_()
    assert run.report.path == run.folder / "report.html"
    frame = re.fullmatch('<iframe srcdoc="([^"<>]*)" sandbox="allow-scripts" .*></iframe>', shown, re.DOTALL)
    assert frame and html.unescape(frame[1]) == run.report.path.read_text(encoding="utf-8")


def test_a_folder_without_a_run_is_told_at_once(tmp_path: Path) -> None:
    """A typing error must not look like a run without results."""
    with pytest.raises(ConfigError, match="expected the folder of a run, found no "):
        hyperbloom.Run(tmp_path / "none")


def test_an_engine_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="engine"):
        hyperbloom.run(KEYS, "inlined")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.processes
def test_processes_give_the_same_run(tmp_path: Path) -> None:
    runs = [hyperbloom.run(KEYS, engine, run_dir=tmp_path / engine) for engine in ("inline", "grpc")]
    assert runs[0].accuracy == runs[1].accuracy


def test_a_run_made_in_python_is_as_one_from_a_file(tmp_path: Path) -> None:
    short = RunConfig(strategy="local", clients=1, rounds=2, local=LocalConfig(steps=1))
    run = hyperbloom.run(short, run_dir=tmp_path / "run")
    assert (run.config.eval_every, len(run.metrics)) == (1, 2) and run.report.path.exists()
    at_once = short.model_copy(update={"asynchronous": True})
    assert hyperbloom.run(at_once, run_dir=tmp_path / "asynchronous").config.local.schedule == "constant"
    assert FlowerStrategy(at_once).config.local.schedule == "constant"


def test_no_client_holds_its_data_when_a_run_has_ended_or_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison plays many runs in one process."""
    hyperbloom.run(KEYS, run_dir=tmp_path / "run")
    assert client_for.cache_info().currsize == 0

    def fail(folder: RunFolder, report: object) -> None:
        assert client_for.cache_info().currsize == KEYS["clients"]
        raise HyperbloomError("it fails")

    monkeypatch.setattr(RunFolder, "round_done", fail)
    with pytest.raises(HyperbloomError, match="it fails"):
        hyperbloom.run(KEYS, run_dir=tmp_path / "failed")
    assert client_for.cache_info().currsize == 0


def two_layers(width: int, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(*input_shape, width), nn.ReLU(), nn.Linear(width, num_classes))


def test_a_second_run_reads_files_and_names_that_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, whose cells are edited and run again."""
    widths, keys = [], {**KEYS, "strategy": "local", "data.name": str(tmp_path / "own.npz"), "models": ["notes:net"]}
    monkeypatch.chdir(tmp_path)
    for count, width in ((60, 8), (200, 32)):
        generator = np.random.default_rng(0)
        np.savez(tmp_path / "own.npz", x=generator.normal(size=(count, 4)).astype("float32"), y=np.arange(count) % 2)
        module = types.ModuleType("notes")
        module.net = partial(two_layers, width)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "notes", module)
        run = hyperbloom.run(keys, run_dir=tmp_path / f"run-{count}")
        stored = load_file(next((run.folder / "clients" / "client-0" / "personal").glob("*.safetensors")))
        widths.append(max(each.numel() for each in stored.values()))
        seen = run.client("client-0").about["train_examples"]
        assert (0.1 * count < seen < 0.5 * count) and widths[-1] >= 4 * width
    assert widths[0] < widths[1]
