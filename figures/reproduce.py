"""Reproduction of a column of a paper's table: our numbers beside the paper's, and the differences in settings."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import click
from rich.console import Console

from figures.paper_tables import WHOLE, Figure, PaperTable, load_table, table_names
from hyperbloom.common.config import RunConfig, parse_assignment
from hyperbloom.common.data import DATASETS, DataSpec, data_source
from hyperbloom.common.errors import ConfigError, DataError
from hyperbloom.common.files.storage import write_bytes
from hyperbloom.common.metrics import title_of
from hyperbloom.common.program.commands import Flag, command, execute, names
from hyperbloom.server.compare.comparison import Cell, check_cells, open_comparison, run_cells
from hyperbloom.server.compare.table import markdown, mean_and_deviation, plus_minus, read_results
from hyperbloom.server.flags import ENGINES, OUT, set_flag
from hyperbloom.server.grids.local_clients import client_settings
from hyperbloom.server.loop.session import check_run
from hyperbloom.server.runs.course import Course


@dataclass(frozen=True)
class Reproduction:
    """A request to reproduce a column.

    Attributes:
        name: of the table.
        table: the table.
        column: of the table.
        methods: rows; None for all.
        seeds: of the runs.
        rounds: upper limit; None for the paper's.
        overrides: keys of every run, by dotted name.
    """

    name: str
    table: PaperTable
    column: str
    methods: Sequence[str] | None
    seeds: Sequence[int]
    rounds: int | None
    overrides: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Refuse methods that the table does not have, and options that no method has."""
        for method in self.methods or ():
            if method not in self.table.methods:
                raise ConfigError(f"--methods: expected some of {', '.join(self.table.methods)}; found {method!r}")
        there = [method for method in self.rows if self.table.methods[method].there]
        for key in self.overrides:
            if there and not any(self.table.takes(method, key) for method in there):
                raise ConfigError(f"--set {key}: expected a key of the run, or an option of {', '.join(there)}")

    @property
    def rows(self) -> list[str]:
        """Return the requested methods that this column has."""
        asked = self.table.methods if self.methods is None else self.methods
        return [method for method in asked if self.table.methods[method].is_in(self.column)]

    @cached_property
    def why_not(self) -> dict[str, str]:
        """Return, by method, why it cannot be run: this version lacks it, or its data are not here.

        Raises:
            HyperbloomError: the settings of a method are wrong.
        """
        why = {}
        for method in self.rows:
            try:
                if self.table.methods[method].there:
                    check_run(self.config(method), uses_data_section=True)
                else:
                    why[method] = self.table.methods[method].why_not
            except DataError as error:
                why[method] = str(error)
        return why

    def config(self, method: str) -> RunConfig:
        """Return a method's run."""
        return self.table.config(method, self.column, self.overrides, self.rounds)

    def cells(self, out: Path) -> list[Cell]:
        """Return the cells to run, seed by seed."""
        methods = [method for method in self.rows if method not in self.why_not]
        return [cell for seed in self.seeds for method in methods for cell in self._cells(method, seed, out)]

    def _cells(self, method: str, seed: int, out: Path) -> list[Cell]:
        """Return a method's run, preceded by the run that it starts from, if any."""
        name = f"{slug(method)}-seed{seed}"
        config = self.config(method).model_copy(update={"seed": seed})
        if not self.table.methods[method].after_first:
            return [Cell(method, config, out / name)]
        others = self.table.config(method, self.column, self.overrides, self.rounds, first=True)
        first = Cell(f"{method}, first", others.model_copy(update={"seed": seed}), out / f"{name}-first")
        config = config.model_copy(update={"init_from": str(first.folder.resolve())})
        return [first, Cell(method, config, out / name, after=first)]


def choose_column(table: PaperTable, column: str | None) -> str:
    """Return the column to run.

    Raises:
        ConfigError: there is no such column, or it cannot be run.
    """
    if column not in table.columns:
        found = "none" if column is None else repr(column)
        raise ConfigError(f"--column: expected one of {', '.join(table.columns)}; found {found}")
    if why := table.columns[column].cannot:
        raise ConfigError(f"--column {column}: {_one_line(why)}")
    return column


def describe(tables: Mapping[str, PaperTable], overrides: Mapping[str, Any]) -> str:
    """Return a line for each column of the tables: its title, and whether it can be run here."""
    lines: list[str] = []
    missing: dict[str, str] = {}
    for name, table in tables.items():
        lines += ["", f"{name}: {table.title} ({table.table} of {table.paper})"]
        for key, column in table.columns.items():
            rows = [method for method in table.methods if table.methods[method].is_in(key)]
            there = [method for method in rows if table.methods[method].there]
            state = f"{len(there)} of {len(rows)} methods"
            if column.cannot:
                state = f"cannot be run: {_one_line(column.cannot)}"
            elif column.stand_in:
                state += f"; STAND-IN: {_one_line(column.stand_in)}"
            needed = [spec for method in there for spec in _data_of(table.config(method, key, overrides))]
            for data in dict.fromkeys(spec.data for spec in needed if not column.cannot):
                wanting = [spec for spec in needed if spec.data == data]
                if data not in missing:
                    missing[data] = _data_missing(wanting[0])
                some = "" if len(wanting) == len(there) else f" for {len(wanting)} of them"
                state += f"; no {data}{some}, see below" if missing[data] else ""
            lines.append(f"  {key}: {column.title}; {state}")
    lines += ["", *(f"no {name}: {_one_line(why)}" for name, why in missing.items() if why)]
    return "\n".join(lines[1:]).rstrip()


def _data_of(config: RunConfig) -> list[DataSpec]:
    """Return the data sets that a run reads: its clients', and FedHeNN's reference set if it is a known one."""
    clients, rad = client_settings(config, 0, Path()).data, config.options.get("rad")
    return [clients] + ([DataSpec(rad, clients.root)] if isinstance(rad, str) and rad in DATASETS else [])


def _data_missing(spec: DataSpec) -> str:
    """Return why data cannot be read here, and where they are looked for, or "" if they can be read."""
    try:
        data_source(spec)
    except DataError as error:
        return str(error)
    return ""


def reproduce(wanted: Reproduction, out: Path, engine: str) -> int:
    """Run the missing cells and print the numbers; return the exit code.

    Raises:
        ConfigError: settings are wrong, or no method of the column can be run.
        DataError: the data set is missing; the message says where it is looked for.
    """
    cells = wanted.cells(out)
    if not cells:
        print(_report(wanted, {}, out))
        raise ConfigError(f"--column {wanted.column}: none of its methods can be run here; the reasons are above")
    check_cells(cells, engine)
    data_source(client_settings(cells[0].config, 0, out).data)  # raise now, not after a client has failed
    shared = {"engine": engine, "table": wanted.name, "column": wanted.column}
    with open_comparison(out, shared, cells):
        print(f"{len(cells)} runs in {out}; the same command goes on where this one stops")
        failures = run_cells(cells, engine, Console())
        results = {name: [result for _, result in found] for name, found in read_results(cells).items()}
        text = _report(wanted, results, out)
        write_bytes(out / "reproduction.md", text.encode())
    print(f"\n{text}")
    return failures[0].exit_code if failures else 0


# ---------------------------------------------------------------------- the report


def _report(wanted: Reproduction, results: Mapping[str, Sequence[Course]], out: Path) -> str:
    table, column = wanted.table, wanted.table.columns[wanted.column]
    rows = [row for method in wanted.rows for row in _rows(wanted, method, results.get(method, ()))]
    head = f"{table.title}: {column.title}\n{table.paper}, {table.table}, {table.url}\n"
    body = markdown(("method", "ours", "seeds", "paper", "difference"), rows)
    notes = "".join(f"- {note}\n" for note in _differences(wanted, results))
    return f"{head}\n{body}\n\nWhere our settings differ from the paper's:\n\n{notes}\nRun folders: {out}\n"


def _rows(wanted: Reproduction, method: str, results: Sequence[Course]) -> list[tuple[str, ...]]:
    column = wanted.table.columns[wanted.column]
    rows: list[tuple[str, ...]] = []
    figures: Mapping[str, Figure | None] = wanted.table.methods[method].figures(wanted.column)
    for part, figure in (figures or {WHOLE: None}).items():
        chosen = None if part == WHOLE else column.parts[part]
        ours, difference = "not available" if method in wanted.why_not else "not finished", ""
        if chosen is None and part != WHOLE:
            ours = "not measured"
        elif results:
            means = [mean_of_part(r.accuracy, *chosen) if chosen else r.metrics[wanted.table.metric] for r in results]
            ours = plus_minus(*mean_and_deviation(means))
            # A difference to a stand-in would mean nothing.
            difference = "" if column.stand_in or not figure else f"{fmean(means) - figure.mean:+z.2f}"
        name = method if part == WHOLE else f"{method}, {part}"
        paper = plus_minus(figure.mean, figure.deviation) if figure else ""
        rows.append((name, ours, str(len(results)), paper, difference))
    return rows


def mean_of_part(accuracies: Mapping[str, float], first: int, step: int) -> float:
    """Return the mean accuracy of the evaluated clients among every `step`-th from `first` on."""
    numbered = {int(name.removeprefix("client-")): accuracy for name, accuracy in accuracies.items()}
    return fmean(accuracy for index, accuracy in numbered.items() if index % step == first)


def _differences(wanted: Reproduction, results: Mapping[str, Sequence[Course]]) -> list[str]:
    table, column = wanted.table, wanted.table.columns[wanted.column]
    notes = [f"STAND-IN for the paper's data: {column.stand_in}"] if column.stand_in else []
    notes += [*table.differs, *column.differs]
    for method in wanted.rows:
        if method in wanted.why_not:
            notes.append(f"{method}: not available: {wanted.why_not[method]}")
            continue
        if note := table.methods[method].note:
            notes.append(f"{method}: {note}")
        of_paper, here = table.config(method, wanted.column).rounds, wanted.config(method).rounds
        if here != of_paper:
            notes.append(f"{method}: {here} rounds, not {of_paper}")
        if 0 < len(results.get(method, ())) < len(wanted.seeds):
            notes.append(f"{method}: {len(results[method])} of {len(wanted.seeds)} seeds are finished")
    if table.seeds and len(wanted.seeds) != table.seeds:
        notes.append(f"seeds: {len(wanted.seeds)}, not {table.seeds}")
    there = [method for method in wanted.rows if table.methods[method].there]
    for key, value in wanted.overrides.items():
        takers = [method for method in there if table.takes(method, key)]
        if key not in ("data.root", "rounds"):
            notes.append(f"set here: {key} = {value}" + ("" if takers == there else f" ({', '.join(takers)})"))
    novel = "novel " if table.metric.startswith("novel") else ""
    selects = next((wanted.config(method).select for method in wanted.rows if method not in wanted.why_not), None)
    metric = title_of(selects or "accuracy")
    notes.append(f"{metric} is the mean over {novel}clients, at the round that validation selected")
    return [_one_line(note) for note in notes]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def slug(text: str) -> str:
    """Return a name of a folder for a name of a method."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


@command(
    "python -m figures.reproduce",
    click.Argument(["table"], help="name of a table; see --list", required=False),
    Flag("--list listed", "list tables and columns, and what can be run here", is_flag=True),
    Flag("--column", "column of the table"),
    Flag("--methods", "rows of the table", metavar="A,B", show_default="all that there are"),
    Flag("--seeds", "how many", type=click.IntRange(1), show_default="the paper's, else 3"),
    Flag("--first-seed", "the seeds count from here", type=click.IntRange(0), default=0),
    Flag("--rounds", "at most so many rounds of each method", type=click.IntRange(1), show_default="the paper's"),
    Flag("--root", "folder with the data sets' files", metavar="DIR"),
    set_flag("set a key of every run, such as sizes=[S]"),
    OUT,
    Flag("--engine", "clients as processes over gRPC, or in this process", type=ENGINES, default="inline"),
    example="python -m figures.reproduce pfedhn-table1 --column cifar10-50 --root /data --rounds 500",
    epilog="exit codes: 0 all that can be run is complete, 2 wrong settings or missing data, 4 a method could not be "
    "trained, 130 Ctrl-C",
)
def program(
    table: str | None,
    listed: bool,
    column: str | None,
    methods: str | None,
    seeds: int | None,
    first_seed: int,
    rounds: int | None,
    root: str | None,
    assignments: tuple[str, ...],
    out: Path | None,
    engine: str,
) -> int:
    """Run a table of a paper, and print our numbers beside it.

    --list shows the tables of the papers, their columns, and what can be run; it also says where a column stands
    in for data that cannot be had. Call the command again to go on: what is finished is kept. Full runs take hours to
    days. --rounds, --seeds, --methods and --set make them smaller, and the table names what they change.
    """
    overrides = dict(parse_assignment(text) for text in assignments) | ({"data.root": root} if root else {})
    if root:
        os.environ["HYPERBLOOM_DATA"] = root  # for figures/stand_ins.py
    if not listed and not table:
        raise ConfigError("expected a table such as pfedhn-table1, or --list")
    if listed or not table:
        chosen = [table] if table else table_names()
        print(describe({name: load_table(name) for name in chosen}, overrides))
        return 0
    paper = load_table(table)
    column = choose_column(paper, column)
    rows = None if methods is None else names(methods)
    asked = range(first_seed, first_seed + (seeds or paper.seeds or 3))
    wanted = Reproduction(table, paper, column, rows, asked, rounds, overrides)
    return reproduce(wanted, out or Path("runs") / f"reproduce-{table}-{column}", engine)


if __name__ == "__main__":
    sys.exit(execute(program))
