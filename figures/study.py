"""A study: runs that a file of results keeps as lines, and their tables, which `figures.pages` writes into pages.

`--only key=value` takes the runs of this kind, and what is in the file already is not run again.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures.pages import read

Line = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """Runs and their tables.

    Attributes:
        name: of the program `figures.NAME`, whose file of results is `figures/NAME.jsonl`.
        wanted: the keys of each run.
        measure: plays the run of such keys, which it gets by name, and returns what to keep beside them.
        tables: return lines as Markdown, by the word that stands in a page's mark.
    """

    name: str
    wanted: Sequence[Line]
    measure: Callable[..., Line]
    tables: Mapping[str, Callable[[Sequence[Line]], str]]

    @property
    def results(self) -> Path:
        """The committed file of results."""
        return Path(__file__).with_name(f"{self.name}.jsonl")

    @property
    def pages(self) -> dict[str, Callable[[], str]]:
        """What makes the tables of the committed results, by word."""
        return {word: lambda table=table: table(read(self.results)) for word, table in self.tables.items()}

    def main(self, description: str, words: Sequence[str] | None = None) -> None:
        """Run what is missing, and print the tables."""
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, prog=f"figures.{self.name}"
        )
        parser.add_argument("--results", type=Path, default=self.results)
        keys = ", ".join(dict.fromkeys(key for keys in self.wanted for key in keys))
        parser.add_argument("--only", nargs="+", default=[], metavar="KEY=VALUE", help=f"these runs; keys: {keys}")
        args = parser.parse_args(words)
        only = dict(each.partition("=")[::2] for each in args.only)
        for key in only.keys() - set(keys.split(", ")):
            parser.error(f"--only {key}: expected one of {keys}")
        self.complete(args.results, only)
        print("\n".join(table(read(args.results)) for table in self.tables.values()))

    def complete(self, results: Path, only: Mapping[str, str]) -> None:
        """Run what is wanted and not in `results` yet; add a line for each run."""
        for keys in self.wanted:
            chosen = all(str(keys.get(key)) == value for key, value in only.items())
            if chosen and not any(line.items() >= keys.items() for line in read(results)):
                line = keys | self.measure(**keys)
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)
