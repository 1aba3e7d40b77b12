"""Files of results, with a JSON object a line, and tables of them between two marks of a page."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results; none if it is not there."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def table_row(cells: Iterable[str]) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def between(page: str, text: str, begin: str, end: str) -> str:
    """Return a page with `text` in the place of what stands between two marks; the first of each counts."""
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{text.rstrip()}\n\n{end}{rest.partition(end)[2]}"


def write_between(path: Path, text: str, begin: str, end: str) -> None:
    """Write `text` between two marks of the page at `path`."""
    path.write_text(between(path.read_text(encoding="utf-8"), text, begin, end), encoding="utf-8")
