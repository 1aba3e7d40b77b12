"""A study runs what is missing, and a page has its tables."""

import json
from pathlib import Path
from typing import Any

import pytest

from figures import cohorts
from figures.compression import STUDY as COMPRESSION
from figures.membership import STUDY as MEMBERSHIP
from figures.newcomers import STUDY as NEWCOMERS
from figures.pages import read
from figures.robust import STUDY as ROBUST
from figures.secure_aggregation import STUDY as SECURE_AGGREGATION
from figures.study import Study

TABLES = [
    ("compression", COMPRESSION),
    ("failures", ROBUST),
    ("on-demand", NEWCOMERS),
    ("privacy", MEMBERSHIP),
    ("privacy", SECURE_AGGREGATION),
]


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


@pytest.mark.parametrize(("page", "study"), TABLES, ids=[study.name for _, study in TABLES])
def test_pages_say_what_the_committed_runs_gave(page: str, study: Study, tmp_path: Path) -> None:
    committed, copy = Path("docs", page).with_suffix(".md"), tmp_path / "page.md"
    lines = read(Path("figures", study.name).with_suffix(".jsonl"))
    keys = [{key: line[key] for key in study.wanted[0]} for line in lines]
    assert len(keys) == len(study.wanted) and all(wanted in keys for wanted in study.wanted)
    copy.write_text(committed.read_text(encoding="utf-8"), encoding="utf-8")
    study.write(copy, lines)
    assert copy.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8")


def test_the_page_of_cohorts_says_what_the_committed_runs_gave(tmp_path: Path) -> None:
    committed, copy = Path("docs", "cohorts.md"), tmp_path / "page.md"
    copy.write_text(committed.read_text(encoding="utf-8"), encoding="utf-8")
    cohorts.write(read(Path("figures", "cohorts.jsonl")), copy)
    assert copy.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8")
