"""The papers' tables as configurations: what each column was run with, and the number beside each method.

A table is a YAML file in `server/compare/papers/` (`benchmarks/papers` links there):

    paper, url, table, title        where the numbers stand
    seeds                           how many the paper took, if it says so
    run                             keys of a run that all columns share
    metric                          what our number is (default: test_mean)
    differs                         where our settings are not the paper's, one line each
    columns.NAME                    title, run (wins over the table's), differs, and where they apply
        first                       run of others that comes first (wins over the method's), see `after_first`
        parts                       clients whose mean is one number, {part: [first, step]}; null is not measured
        stand_in                    what stands in for data that cannot be had
        cannot                      why the column cannot be run at all, and what would make it
    methods.NAME                    strategy (or why_not), run (wins over the column's), note, and
        everyone                    every client in every round
        after_first                 starts from what the column's first run has learned (`init_from`)
        columns                     run of single columns, wins over the method's
        numbers                     percent by column: a mean, [mean, deviation], or these by part
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hyperbloom.common.config import Positive, RunConfig, Section, check, make_run_config, read_yaml
from hyperbloom.common.errors import ConfigError
from hyperbloom.strategies import find_strategy

__all__ = ["Column", "Figure", "Method", "PaperTable", "load_table", "table_names"]

Percent = Annotated[float, Field(ge=0, le=100)]
Written = Percent | tuple[Percent, Percent] | dict[str, Percent | tuple[Percent, Percent]]
WHOLE = ""
"""The part that is all clients."""


@dataclass(frozen=True)
class Figure:
    """A number of a paper: a mean and, if it is told, a deviation."""

    mean: float
    deviation: float | None = None


class Column(Section):
    """A column of a table: a data set, a number of clients, ..."""

    title: str
    run: dict[str, Any] = Field({})
    first: dict[str, Any] = Field({})
    parts: dict[str, tuple[int, Positive] | None] = Field({})
    stand_in: str = ""
    cannot: str = ""
    differs: tuple[str, ...] = ()


class Method(Section):
    """A row of a table."""

    strategy: str | None = None
    why_not: str = ""
    run: dict[str, Any] = Field({})
    columns: dict[str, dict[str, Any]] = Field({})
    everyone: bool = False
    after_first: bool = False
    note: str = ""
    numbers: dict[str, Written] = Field({})

    @property
    def there(self) -> bool:
        """Whether this version has it; else `why_not` says what is missing."""
        return self.strategy is not None

    def figures(self, column: str) -> dict[str, Figure]:
        """Return the paper's numbers in a column, by part."""
        written = self.numbers.get(column, {})
        parts = written if isinstance(written, dict) else {WHOLE: written}
        return {part: Figure(*value) if isinstance(value, tuple) else Figure(value) for part, value in parts.items()}


class PaperTable(Section):
    """A table of a paper."""

    paper: str
    url: str
    table: str
    title: str
    seeds: Positive | None = None
    run: dict[str, Any] = Field({})
    metric: str = "test_mean"
    differs: tuple[str, ...] = ()
    columns: dict[str, Column]
    methods: dict[str, Method]

    def config(
        self,
        method: str,
        column: str,
        overrides: Mapping[str, Any] | None = None,
        rounds: int | None = None,
        first: bool = False,
    ) -> RunConfig:
        """Return the run behind a number.

        Args:
            method: of the table.
            column: of the table.
            overrides: keys that win, by dotted name; options are for the methods that have them.
            rounds: at most so many; a method that takes fewer keeps them.
            first: return the run that comes first instead.

        Raises:
            ConfigError: the values make no run.
        """
        values = self._values(method, column)
        if first:
            values = _merged(values, self.columns[column].first)
        if self.methods[method].everyone:
            values["cohort"] = (overrides or {}).get("clients", values.get("clients"))
        own = {key: value for key, value in (overrides or {}).items() if self.takes(method, key)}
        if rounds is not None:
            values["rounds"] = min(rounds, values.get("rounds", rounds))
            values["eval_every"] = min(values.get("eval_every", rounds), values["rounds"])
        return make_run_config(values, own, f"{self.table}, {column}, {method}")

    def takes(self, method: str, key: str) -> bool:
        """Return whether a dotted key is one of the run's, or an option of a method that can be run."""
        first, _, rest = key.partition(".")
        strategy = self.methods[method].strategy
        if strategy is None or key == "options" or (first in RunConfig.model_fields and first != "options"):
            return True
        option = (rest if first == "options" else key).partition(".")[0]
        return option in find_strategy(strategy).options_type.model_fields

    def _values(self, method: str, column: str) -> dict[str, Any]:
        row = self.methods[method]
        values = _merged(_merged(self.run, self.columns[column].run), {"strategy": row.strategy, **row.run})
        return _merged(values, row.columns.get(column, {}))


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, sections joined key by key; `above` wins."""
    both = {
        key: _merged(below[key], value) if isinstance(value, Mapping) and isinstance(below.get(key), Mapping) else value
        for key, value in above.items()
    }
    return {**below, **both}


def _folder() -> Traversable:
    return files("hyperbloom.server.compare") / "papers"


def table_names() -> list[str]:
    """Return the names of all tables."""
    return sorted(each.name.removesuffix(".yaml") for each in _folder().iterdir() if each.name.endswith(".yaml"))


def load_table(name: str) -> PaperTable:
    """Return a table.

    Raises:
        ConfigError: there is none of that name, or its file is wrong.
    """
    names = table_names()
    if name not in names:
        raise ConfigError(f"expected one of {', '.join(names)}; found {name!r}")
    path = Path(str(_folder() / f"{name}.yaml"))
    return check(PaperTable, read_yaml(path), str(path))
