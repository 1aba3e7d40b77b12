"""Hyperbloom beside Flower alone, FL4Health, NVFlare and PFLlib: the table of the README and of the site's first page.

`others.yaml` holds the cells, with a source for each. `{ours}` and `{other}` stand for the seconds of a round over gRPC
that `benchmarks.round_overhead` measured.
"""

from pathlib import Path
from typing import Any

import yaml

from benchmarks.recorded import only

ROOT = Path(__file__).resolve().parent.parent


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
    seconds = vars(only("round_overhead"))
    for row in known["rows"]:
        told = [
            (row[name][0].format(**seconds), source(project, row[name][1], docs)) for name, project in projects.items()
        ]
        cells = [f"[{text}]({address})" for text, address in told]
        lines.append(f"| {row['about']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


TABLES = {"readme": lambda: table("docs/"), "site": lambda: table("")}
