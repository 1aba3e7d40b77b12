"""A study runs what is missing, and a page has its tables."""

import json
from pathlib import Path
from typing import Any

import pytest

from figures.study import Study


def test_what_is_there_is_not_run_again_and_a_page_keeps_all_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played: list[tuple[str, int]] = []

    def measure(way: str, seed: int) -> dict[str, Any]:
        played.append((way, seed))
        return {"found": 10 * seed}

    wanted = [{"way": way, "seed": seed} for way in ("a", "b") for seed in (0, 1)]
    tables = {way: lambda lines, way=way: "\n".join(str(x["found"]) for x in lines if x["way"] == way) for way in "ab"}
    study, results, page = Study("mine", wanted, measure, tables), tmp_path / "results.jsonl", tmp_path / "page.md"
    study.main("", ["--results", str(results), "--only", "way=b", "seed=1"])
    study.main("", ["--results", str(results)])
    assert played == [("b", 1), ("a", 0), ("a", 1), ("b", 0)]
    assert json.loads(results.read_text().splitlines()[0]) == {"way": "b", "seed": 1, "found": 10}
    page.write_text("before\n<!-- figures.mine: b -->\nold\n<!-- figures.mine: end -->\nafter\n")
    study.main("", ["--results", str(results), "--page", str(page)])
    assert page.read_text() == "before\n<!-- figures.mine: b -->\n\n10\n0\n\n<!-- figures.mine: end -->\nafter\n"
    with pytest.raises(SystemExit):
        study.main("", ["--results", str(results), "--only", "sed=1"])
    assert "expected one of way, seed" in capsys.readouterr().err and len(played) == 4
