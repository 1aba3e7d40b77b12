"""A study runs what is missing."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from figures.pages import read
from figures.study import Study


def test_what_is_there_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    played: list[tuple[str, int]] = []

    def measure(way: str, seed: int) -> dict[str, Any]:
        played.append((way, seed))
        return {"found": 10 * seed}

    wanted = [{"way": way, "seed": seed} for way in ("a", "b") for seed in (0, 1)]
    tables = {way: lambda lines, way=way: "\n".join(str(x["found"]) for x in lines if x["way"] == way) for way in "ab"}
    study, results = Study("mine", wanted, measure, tables), tmp_path / "results.jsonl"
    study.main("", ["--results", str(results), "--only", "way=b", "seed=1"])
    study.main("", ["--results", str(results)])
    assert played == [("b", 1), ("a", 0), ("a", 1), ("b", 0)]
    assert json.loads(results.read_text().splitlines()[0]) == {"way": "b", "seed": 1, "found": 10}
    assert capsys.readouterr().out.splitlines()[-4:] == ["0", "10", "10", "0"]
    with pytest.raises(SystemExit):
        study.main("", ["--results", str(results), "--only", "sed=1"])
    assert "expected one of way, seed" in capsys.readouterr().err and len(played) == 4


@pytest.mark.parametrize("name", ["compression", "membership", "newcomers", "probes", "robust", "secure_aggregation"])
def test_all_runs_of_a_study_are_committed(name: str) -> None:
    study = import_module(f"figures.{name}").STUDY
    found = read(study.results)
    assert all(any(line.items() >= wanted.items() for line in found) for wanted in study.wanted)
    assert len(found) == len(study.wanted)
