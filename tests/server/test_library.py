"""Runs from a program: the same as the command's, in tables."""

from pathlib import Path

import pytest

import hyperbloom
from hyperbloom.common.errors import ConfigError
from hyperbloom.server.cli import main

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


def test_a_file_describes_it_and_a_complete_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{strategy: local, clients: 1, rounds: 1, local: {steps: 1}}")
    run = hyperbloom.run(tmp_path / "run.yaml", run_dir=tmp_path / "run")
    assert (run.config.strategy, len(run.metrics)) == ("local", 1)
    with pytest.raises(ConfigError, match="is complete"):
        hyperbloom.run(tmp_path / "run.yaml", run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"^rounds: expected .* found 0 in run\(\)$"):
        hyperbloom.run({"rounds": 0})


@pytest.mark.slow
@pytest.mark.processes
def test_processes_give_the_same_run(tmp_path: Path) -> None:
    runs = [hyperbloom.run(KEYS, engine, run_dir=tmp_path / engine) for engine in ("inline", "grpc")]
    assert runs[0].accuracy == runs[1].accuracy
