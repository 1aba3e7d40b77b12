"""A study: runs that a file of results keeps as lines, and tables of them in pages.

`--only key=value` takes the runs of this kind, and what is in the file already is not run again.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures.pages import between, read

Line = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """Runs and their tables.

    Attributes:
        name: of the program `figures.NAME`, whose file of results is `figures/NAME.jsonl`.
        wanted: the keys of each run.
        measure: plays the run of such keys, which it gets by name, and returns what to keep beside them.
        tables: return lines as Markdown, by the word of the mark `<!-- figures.NAME: WORD -->` before a page's table.
    """

    name: str
    wanted: Sequence[Line]
    measure: Callable[..., Line]
    tables: Mapping[str, Callable[[Sequence[Line]], str]]

    def main(self, description: str, words: Sequence[str] | None = None) -> None:
        """Run what is missing and print the tables, or show what there is."""
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, prog=f"figures.{self.name}"
        )
        parser.add_argument("--results", type=Path, default=Path("figures") / f"{self.name}.jsonl")
        keys = ", ".join(dict.fromkeys(key for keys in self.wanted for key in keys))
        parser.add_argument("--only", nargs="+", default=[], metavar="KEY=VALUE", help=f"these runs; keys: {keys}")
        parser.add_argument("--table", action="store_true", help="print the tables of what there is")
        parser.add_argument("--page", type=Path, help="write the tables between this page's marks")
        args = parser.parse_args(words)
        only = dict(each.partition("=")[::2] for each in args.only)
        for key in only.keys() - set(keys.split(", ")):
            parser.error(f"--only {key}: expected one of {keys}")
        if not (args.table or args.page):
            self.complete(args.results, only)
        lines = read(args.results)
        if args.page:
            self.write(args.page, lines)
        else:
            print("\n".join(table(lines) for table in self.tables.values()))

    def complete(self, results: Path, only: Mapping[str, str]) -> None:
        """Run what is wanted and not in `results` yet; add a line for each run."""
        for keys in self.wanted:
            chosen = all(str(keys.get(key)) == value for key, value in only.items())
            if chosen and not any(line.items() >= keys.items() for line in read(results)):
                line = keys | self.measure(**keys)
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)

    def write(self, page: Path, lines: Sequence[Line]) -> None:
        """Write the tables of `lines` between the marks of a page, those whose marks it has."""
        text = page.read_text(encoding="utf-8")
        for word, table in self.tables.items():
            mark = f"<!-- figures.{self.name}: {word} -->"
            if mark in text:
                text = between(text, table(lines), mark, f"<!-- figures.{self.name}: end -->")
        page.write_text(text, encoding="utf-8")
