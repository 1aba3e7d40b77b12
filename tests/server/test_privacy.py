"""The ledger of a run: counted before it is asked for, never taken back."""

import json
from pathlib import Path

import pytest

from hyperbloom.common.config import PrivacyConfig, load_run_config
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.secrecy.noise import epsilon_of
from hyperbloom.server.cli import main
from hyperbloom.server.runs.folder import RunFolder

from .test_resume import begin, go_on, make_config

DP = PrivacyConfig(where="client", noise=30.0)


def ledger(folder: Path) -> dict[str, int]:
    clients = json.loads((folder / "privacy.json").read_text())["clients"]
    for each in clients.values():
        assert each["epsilon"] == epsilon_of([30.0] * each["releases"], 1e-5)
    return {name: each["releases"] for name, each in clients.items()}


def test_rounds_that_are_repeated_after_a_crash_are_spent_twice(tmp_path: Path) -> None:
    """Killed in round 3 of 4 after a checkpoint at 2; the noise of the third round is drawn twice."""
    config = make_config("pfedhn", privacy=DP, baselines=("fedavg", "local"), options={})
    begin(tmp_path / "whole", config)
    begin(tmp_path / "crashed", config, crash_after=3)
    assert sum(ledger(tmp_path / "crashed").values()) == 3 * config.cohort
    go_on(tmp_path / "crashed", config)
    whole, resumed = ledger(tmp_path / "whole"), ledger(tmp_path / "crashed")
    assert sum(whole.values()) == 2 * 4 * config.cohort  # local sends nothing
    again = {name: resumed[name] - count for name, count in whole.items()}
    assert sorted(again.values()) == [0, 0, 1, 1]
    third = [json.loads(line) for line in (tmp_path / "whole/clients.jsonl").read_text().splitlines()]
    assert {name for name, more in again.items() if more} == {
        line["client"] for line in third if line["round"] == 3 and "seconds" in line
    }
    assert not [line for line in third if "loss" in line], "a loss is of the same examples, and has no noise"


@pytest.mark.parametrize("content", [None, "{", "[]", '{"clients": {}}', '{"clients": {"a": 3}}'])
def test_a_run_whose_ledger_is_damaged_or_lost_is_not_resumed(tmp_path: Path, content: str | None) -> None:
    config = make_config("fedavg", privacy=DP)
    begin(tmp_path, config, crash_after=3)
    (tmp_path / "privacy.json").unlink()
    if content is not None:
        (tmp_path / "privacy.json").write_text(content)
    with pytest.raises(ConfigError, match="not known what has been spent on privacy"):
        RunFolder.resume(tmp_path, config, lambda text: None)


def test_the_guarantee_is_told_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--engine", "inline", "--clients", "2", "--rounds", "3", "--eval-every", "3", "--set", "local.steps=2"]
    assert main([*run, "--dp-clients", "--set", "privacy.noise=30", "--run-dir", str(tmp_path / "run")]) == 0
    spent = ledger(tmp_path / "run")
    most, least = max(spent.values()), min(spent.values())
    said = capsys.readouterr().out
    assert f"asked {most} times has ({epsilon_of([30.0] * most, 1e-5):.4g}, 1e-05)-differential privacy" in said
    assert least == most or f"client was asked: {least}, with epsilon {epsilon_of([30.0] * least, 1e-5):.4g}" in said
    assert main(["--resume", str(tmp_path / "run"), "--dp-clients"]) == 2
    assert "--dp-clients would change the run" in capsys.readouterr().err


def test_a_run_of_sums_has_no_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--strategy", "fedavg", "--clients", "3", "--cohort", "3", "--rounds", "1", "--eval-every", "1"]
    run += ["--secure-aggregation", "--set", "local.steps=2", "--run-dir", str(tmp_path / "run")]
    assert main([*run, "--engine", "inline", "--baselines", "local"]) == 0
    (round_line,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    clients = [json.loads(line) for line in (tmp_path / "run/clients.jsonl").read_text().splitlines()]
    assert round_line["clients"] == 3 and "loss" not in round_line
    assert len([line for line in clients if "seconds" in line]) == 3 and not [
        line for line in clients if "loss" in line
    ]
    assert load_run_config(tmp_path / "run/config.yaml", {}).secure_aggregation
    for args, message in (
        (
            [*run, "--engine", "inline", "--baselines", "pfedhn"],
            "secure_aggregation: it cannot work: pfedhn needs each single reply",
        ),
        (["--resume", str(tmp_path / "run"), "--secure-aggregation"], "--secure-aggregation would change the run"),
    ):
        assert main(args) == 2
        assert message in capsys.readouterr().err


def test_without_it_nothing_is_told(tmp_path: Path) -> None:
    begin(tmp_path, make_config("fedavg"))
    assert not (tmp_path / "privacy.json").exists()
