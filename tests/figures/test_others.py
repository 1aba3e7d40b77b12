"""The table of other projects: the pages have it, and each cell has a source."""

import re

import pytest

from figures.others import PAGES, read, table, with_table


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_table_that_the_file_gives(page) -> None:  # type: ignore[no-untyped-def]
    text = page.read_text(encoding="utf-8")
    assert text == with_table(text, PAGES[page])
    changed = text.replace("| keys by default |", "| keys |", 1)
    assert changed != text == with_table(changed, PAGES[page])


def test_each_cell_links_to_a_file_at_a_commit_or_to_a_page_of_ours() -> None:
    known = read()
    rows = table("docs/").splitlines()[2:]
    assert len(rows) == len(known["rows"]) == 10
    commits = {f"{project['repository']}/blob/{project['commit']}/" for project in known["projects"].values()}
    assert all(re.search(r"/blob/[0-9a-f]{40}/$", commit) for commit in commits)
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
        links = [re.fullmatch(r"\[[^]]+\]\((\S+)\)", cell) for cell in cells]
        assert len(links) == 5 and all(links)
        for link in links:
            address = link[1].removeprefix("https://github.com/") if link else ""
            assert address.startswith(("docs/", *commits))


def test_nothing_is_said_to_be_missing_elsewhere() -> None:
    said = {row[name][0] for row in read()["rows"] for name in read()["projects"]}
    assert not said & {"no", "none", "missing", "-", ""}
