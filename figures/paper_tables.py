"""The papers' tables as configurations: the settings of each column, and the paper's number for each method.

A table is a YAML file in `figures/papers/`:

    paper, url, table, title        source of the numbers
    seeds                           number of the paper's seeds, if stated
    run                             keys of a run that all columns share
    metric                          our number (default: test_mean)
    searched                        keys that the paper searched or left open: a run with any value can be compared
    spread                          what the second number of a pair is: deviation (default), or error: of the mean
    differs                         our departures from the paper's settings, one line each
    columns.NAME                    title, run (overrides the table's), differs, and where they apply
        first                       run of others that comes first (overrides the method's), see `after_first`
        parts                       clients whose mean is one number, {part: [first, step]}; null is not measured
        stand_in                    the replacement for data that are not available
        cannot                      why the column cannot be run at all, and what would make it possible
    methods.NAME                    strategy (or why_not), run (overrides the column's), note, and
        everyone                    every client in every round
        after_first                 starts from what the column's first run has learned (`init_from`)
        columns                     run of single columns, overrides the method's
        numbers                     percent by column: a mean, [mean, deviation], or these by part
        control                     without numbers: not in the paper, run beside all its columns
        why                         by column, or by `column, part`: the experiment that explains why our number differs
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

import figures.dss
import figures.fedma
import figures.hafl_distillation
import figures.lg_fedavg
import figures.networks
import figures.per_fedavg
import figures.pfedhn_heads
import figures.pfedme
import figures.pfl
import figures.section_5_3
import figures.set_transformer  # noqa: F401 - all register what they have
from hyperbloom.common.config import Positive, RunConfig, Section, check, make_run_config, read_yaml
from hyperbloom.common.errors import ConfigError
from hyperbloom.strategies import find_strategy

Percent = Annotated[float, Field(ge=0, le=100)]
Name = Annotated[str, Field(pattern="^[^,]+$")]
"""A name that can be one of several in a list with commas, as `--methods` takes."""
Written = Percent | tuple[Percent, Percent] | dict[str, Percent | tuple[Percent, Percent]]
WHOLE = ""
"""Name of the part that includes all clients."""


@dataclass(frozen=True)
class Figure:
    """A number of a paper: a mean and, if stated, a deviation."""

    mean: float
    deviation: float | None = None


class Column(Section):
    """A column of a table, such as a data set with a number of clients."""

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
    control: bool = False
    note: str = ""
    numbers: dict[str, Written] = Field({})
    why: dict[str, str] = Field({})

    @property
    def there(self) -> bool:
        """Return whether this version has the method; else `why_not` says what is missing."""
        return self.strategy is not None

    def is_in(self, column: str) -> bool:
        """Return whether the method has a number in a column, or is run beside it."""
        return self.control or column in self.numbers

    def reason(self, column: str, part: str = WHOLE) -> str:
        """Return what explains the difference of a number, or ""; that of a part comes before that of its column."""
        return self.why.get(f"{column}, {part}") or self.why.get(column, "")

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
    searched: tuple[str, ...] = ()
    spread: Literal["deviation", "error"] = "deviation"
    differs: tuple[str, ...] = ()
    columns: dict[str, Column]
    methods: dict[Name, Method]

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
            method: a row of the table.
            column: a column of the table.
            overrides: keys that override the table's, by dotted name; a method ignores options that it does not have.
            rounds: upper limit; a method with fewer rounds keeps them.
            first: return the run that comes first instead.

        Raises:
            ConfigError: the values do not make a valid run.
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
        return make_run_config({"gains": False, **values}, own, f"{self.table}, {column}, {method}")

    def takes(self, method: str, key: str) -> bool:
        """Return whether a dotted key belongs to the run, or is an option of the method if it can be run."""
        first, _, rest = key.partition(".")
        strategy = self.methods[method].strategy
        if strategy is None or key == "options" or (first in RunConfig.model_fields and first != "options"):
            return True
        option = (rest if first == "options" else key).partition(".")[0]
        return option in find_strategy(strategy).options_type.model_fields

    def _values(self, method: str, column: str) -> dict[str, Any]:
        row = self.methods[method]
        values = _merged(_merged(self.run, self.columns[column].run), {"strategy": row.strategy, **row.run})
        values = _merged(values, row.columns.get(column, {}))
        starts = row.strategy is not None and "start" in find_strategy(row.strategy).options_type.model_fields
        return _merged({"options": {"start": "hypernetwork"}}, values) if starts else values  # as in the papers


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return both mappings, with sections merged key by key; `above` wins."""
    both = {
        key: _merged(below[key], value) if isinstance(value, Mapping) and isinstance(below.get(key), Mapping) else value
        for key, value in above.items()
    }
    return {**below, **both}


def _folder() -> Path:
    return Path(__file__).with_name("papers")


def table_names() -> list[str]:
    """Return the names of all tables."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def load_table(name: str) -> PaperTable:
    """Return a table.

    Raises:
        ConfigError: there is no such table, or its file is wrong.
    """
    names = table_names()
    if name not in names:
        raise ConfigError(f"expected one of {', '.join(names)}; found {name!r}")
    path = _folder() / f"{name}.yaml"
    return check(PaperTable, read_yaml(path), str(path))
