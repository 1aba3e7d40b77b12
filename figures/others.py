"""Hyperbloom beside Flower alone, FL4Health, NVFlare and PFLlib: the table of the README and of the site's first page.

    python -m figures.others            # prints the table
    python -m figures.others --write    # writes it into README.md and docs/index.md, between two comments

`others.yaml` holds the cells, with a source for each.
"""

import argparse
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = {ROOT / "README.md": "docs/", ROOT / "docs/index.md": ""}
"""Pages with the table, and the way from each to the other pages."""
START, END = "<!-- others -->\n\n", "\n\n<!-- end of others -->"


def read() -> dict[str, Any]:
    """Return the projects, and the rows of the table."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "figures/others.yaml").read_text(encoding="utf-8"))
    return found


def source(project: dict[str, str] | None, path: str, docs: str) -> str:
    """Return the address of a cell's source: a page of ours in the folder `docs`, or a file of another project."""
    if project is None or path.startswith("ours:"):
        return docs + path.removeprefix("ours:")
    return f"https://github.com/{project['repository']}/blob/{project['commit']}/{path}"


def table(docs: str) -> str:
    """Return the table in Markdown, each cell with a link to what shows it."""
    known = read()
    projects: dict[str, Any] = {"Hyperbloom": None} | known["projects"]
    lines = ["| | " + " | ".join(projects) + " |", "|---" * (len(projects) + 1) + "|"]
    for row in known["rows"]:
        cells = [f"[{row[name][0]}]({source(project, row[name][1], docs)})" for name, project in projects.items()]
        lines.append(f"| {row['about']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_table(text: str, docs: str) -> str:
    """Return a page's text with the table as it is now."""
    before, rest = text.split(START)
    return before + START + table(docs) + END + rest.split(END)[1]


def main() -> None:
    """Print the table, or write it into the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into README.md and docs/index.md")
    if not parser.parse_args().write:
        print(table("docs/"))
        return
    for page, docs in PAGES.items():
        page.write_text(with_table(page.read_text(encoding="utf-8"), docs), encoding="utf-8")


if __name__ == "__main__":
    main()
