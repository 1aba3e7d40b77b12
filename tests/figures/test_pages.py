"""Results are read line by line, and a page keeps all that is not between the marks."""

from pathlib import Path

import pytest

from figures.pages import between, read, table_row, write_between


def test_results_are_the_lines_of_a_file_that_may_not_be_there(tmp_path: Path) -> None:
    (tmp_path / "found.jsonl").write_text('{"seed": 0}\n{"seed": 1}\n')
    assert read(tmp_path / "found.jsonl") == [{"seed": 0}, {"seed": 1}]
    assert read(tmp_path / "missing.jsonl") == []


@pytest.mark.parametrize("text", ["new", "new\n"])
def test_what_stands_between_the_marks_is_replaced_and_nothing_else(text: str, tmp_path: Path) -> None:
    page = "before <a> old <z> after <b> other <z>\n"
    assert between(page, text, "<a>", "<z>") == "before <a>\n\nnew\n\n<z> after <b> other <z>\n"
    assert between(page, text, "<b>", "<z>") == "before <a> old <z> after <b>\n\nnew\n\n<z>\n"
    (tmp_path / "page.md").write_text(page)
    write_between(tmp_path / "page.md", text, "<a>", "<z>")
    assert (tmp_path / "page.md").read_text() == between(page, text, "<a>", "<z>")


def test_a_row_of_a_table() -> None:
    assert table_row(["heart disease", "", "3"]) == "| heart disease |  | 3 |"
