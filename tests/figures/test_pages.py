"""Results are read line by line, and a page keeps all that is not between the marks."""

from importlib import import_module
from pathlib import Path

import pytest

from figures import pages, robust
from figures.pages import MARKED, TOP, main, read, table_row, with_tables

PAGES = [TOP / "README.md", *(TOP / "docs").glob("*.md")]


def test_results_are_the_lines_of_a_file_that_may_not_be_there(tmp_path: Path) -> None:
    (tmp_path / "found.jsonl").write_text('{"seed": 0}\n{"seed": 1}\n')
    assert read(tmp_path / "found.jsonl") == [{"seed": 0}, {"seed": 1}]
    assert read(tmp_path / "missing.jsonl") == []


def test_what_stands_between_the_marks_is_made_anew_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust, "TABLES", {"one": lambda: "| new |\n", "two": lambda: "| newer |"})
    page = "a\n<!-- figures.robust: one -->\nold\n<!-- end -->\nb\n<!-- figures.robust: two -->\n<!-- end --> c\n"
    made = with_tables(page)
    assert made == (
        "a\n<!-- figures.robust: one -->\n\n| new |\n\n<!-- end -->\nb\n"
        "<!-- figures.robust: two -->\n\n| newer |\n\n<!-- end --> c\n"
    )
    assert with_tables(made) == made
    with pytest.raises(KeyError, match="three"):
        with_tables("<!-- figures.robust: three -->\n<!-- end -->")


def test_the_pages_say_what_the_figures_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert (main(["--check"]), capsys.readouterr().out) == (0, "")


def test_every_table_stands_in_a_page() -> None:
    marked = {found.groups() for page in PAGES for found in MARKED.finditer(page.read_text(encoding="utf-8"))}
    made = {(name, word) for name, _ in marked for word in import_module(name).TABLES}
    assert marked == made and len(marked) > 25


def test_a_stale_page_is_told_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("<!-- figures.others: readme -->\n<!-- end -->\n")
    monkeypatch.setattr(pages, "TOP", tmp_path)
    assert (main(["--check"]), capsys.readouterr().out) == (1, "README.md: stale\n")
    assert (main([]), capsys.readouterr().out) == (0, "README.md: written\n")
    assert main(["--check"]) == 0 and "NVFlare" in (tmp_path / "README.md").read_text()


def test_a_row_of_a_table() -> None:
    assert table_row(["heart disease", "", "3"]) == "| heart disease |  | 3 |"
