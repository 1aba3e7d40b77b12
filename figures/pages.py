"""The tables of the pages, made from committed figures.

A page marks where a table stands, with `<!-- figures.robust: common -->` before it and `<!-- end -->` behind it. The
module of that name has `TABLES`, a function by the word of the mark, which returns the table from the file of results.

    python -m figures.pages            # writes the tables into README.md and docs/
    python -m figures.pages --check    # exit code 1 if a page does not say what the figures say
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hyperbloom.common.files.storage import write_bytes

TOP = Path(__file__).parents[1]
MARKED = re.compile(r"<!-- ((?:figures|benchmarks)\.\w+): (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results; none if it is not there."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def table_row(cells: Iterable[str]) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def with_tables(text: str) -> str:
    """Return a page's text with its tables as the figures are now.

    Raises:
        KeyError: the module of a mark has no such table.
    """

    def made(found: re.Match[str]) -> str:
        module, word = found.groups()
        return f"<!-- {module}: {word} -->\n\n{import_module(module).TABLES[word]().strip()}\n\n<!-- end -->"

    return MARKED.sub(made, text)


def main(words: Sequence[str] | None = None) -> int:
    """Write the pages, or compare them with the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args, stale = parser.parse_args(words), 0
    for page in [TOP / "README.md", *sorted((TOP / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        if (new := with_tables(text)) != text:
            stale += 1
            if not args.check:
                write_bytes(page, new.encode())
            print(f"{page.relative_to(TOP)}: {'stale' if args.check else 'written'}")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
