"""The table of other projects: the pages have it, and each cell has a source."""

import re

from figures.others import read, table


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
