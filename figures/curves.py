"""The tables of `docs/compare.md`: accuracy after so many client steps, from runs that `figures.record` has added.

A client step is a client's local training in one round. Numbers are means over the seeds that were run; `selected` is
that of the round which validation selected, with the deviation over seeds. A row has the runs that count for the cell
of the paper (`figures.cells`), or those of as many rounds as it names.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from figures.cells import Line, by_cell, cells, counted, lines, number
from figures.pages import table_row
from figures.paper_tables import WHOLE, load_table

AVERAGE = "avg"
"""HAFL-GHN's name for the mean over its four clients."""

NEAR = 0.01
"""An evaluation counts for a number of client steps if it is so near, as a share of it."""


@dataclass(frozen=True)
class Row:
    """What a row has runs of: those with so many `rounds`, by default those that count."""

    table: str
    column: str
    method: str
    rounds: int | None = None
    label: str = ""

    def runs(self) -> list[Line]:
        """Return its runs, one for each seed.

        Raises:
            LookupError: there are none.
        """
        found = by_cell(lines()).get((self.table, self.column, self.method), [])
        if self.rounds is None:
            found = counted(load_table(self.table), found)
        else:
            found = [run for run in found if run["rounds"] == self.rounds]
        if not found:
            raise LookupError(f"{self}: no such run")
        return found

    def cells(self, steps: Sequence[int], in_rounds: bool) -> list[str]:
        """Return the cells of the row: label, seeds, accuracy after so many client steps, selected, paper."""
        table, found = load_table(self.table), self.runs()
        config, paper = table.config(self.method, self.column), table.methods[self.method].figures(self.column)
        title = self.label or f"{table.columns[self.column].title}, {self.method}"
        cohort = 1 if in_rounds else config.cohort
        few = found[0]["rounds"] < config.rounds
        of = f" of {found[0]['rounds'] * cohort:,}" if few else ""
        values = [run["ours"] for run in found]
        selected = number(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)
        shown = (_after(found, step, cohort) for step in steps)
        whole = paper.get(WHOLE) or paper.get(AVERAGE)
        figure = number(whole.mean, whole.deviation) if whole else ""
        return [title, str(len(found)), *shown, f"{selected}{of}", figure]


def _after(found: Sequence[Line], step: int, cohort: int) -> str:
    """Return the mean over runs at the evaluation nearest to so many client steps, or nothing if none is near."""
    values = []
    for run in found:
        nearest = min(run["round_val_test"], key=lambda point: abs(point[0] * cohort - step))
        if abs(nearest[0] * cohort - step) > NEAR * step:
            return ""
        values.append(nearest[2])
    return f"{statistics.fmean(values):.1f}"


def curves(steps: Sequence[int], rows: Sequence[Row], in_rounds: bool = False) -> str:
    """Return rows as Markdown; `of` after a selected number says after how many client steps a run was stopped."""
    heads = ["rounds" if in_rounds else "client steps", "seeds", *(f"{step:,}" for step in steps), "selected", "paper"]
    made = (row.cells(steps, in_rounds) for row in rows)
    return "\n".join([table_row(heads), table_row(["---"] * len(heads)), *map(table_row, made)])


def parts(table: str, column: str, method: str, names: Sequence[str]) -> str:
    """Return as Markdown what groups of clients have with a method, and below it what the paper has."""
    title = load_table(table).columns[column].title
    found = {each["cell"]: each for each in cells(by_cell(lines()))}
    groups = [found[", ".join([table, title, method, name])] for name in names]
    rows = [["", *names], ["---"] * (1 + len(names))]
    rows += [[who, *(number(*each[key]) for each in groups)] for who, key in ((method, "ours"), ("paper", "paper"))]
    return "\n".join(map(table_row, rows))


OWN = [
    *(Row("pfedhn-table1", f"cifar10-{n}", method) for method in ("pFedHN", "pFedHN-PC") for n in (10, 50, 100)),
    *(Row("pfedhn-table1", "cifar100-50", method) for method in ("pFedHN", "pFedHN-PC")),
    *(Row("pfedhn-table3", f"mnist-{n}", "pFedHN") for n in (10, 50, 100)),
]
START = [Row("pfedhn-table3", "mnist-50", method) for method in ("pFedHN", "pFedHN scaled start")]
TARGET = [Row("pfedhn-table3", f"mnist-{n}", "pFedHN convolutional target") for n in (50, 100)]
DESCRIPTORS = [
    Row("pfedhn-c5", "cifar10-50", f"pFedHN{which}")
    for which in ("", " with fixed descriptors", " with scaled descriptors")
]
ORDER = [
    *(Row("pfedhn-table1", "cifar10-50", method, label=method) for method in ("LG-FedAvg", "FedPer", "pFedHN-PC")),
    *(Row("pfedhn-table1", "cifar10-50", method, label=method) for method in ("pFedHN", "pFedMe", "Local")),
    Row("pfedhn-table1", "cifar10-50", "Per-FedAvg", 199, "Per-FedAvg"),
    Row("pfedhn-table1", "cifar10-50", "Per-FedAvg", 600, "Per-FedAvg, 100 local steps"),
    Row("pfedhn-table1", "cifar10-50", "FedAvg", label="FedAvg"),
    Row("pfedhn-table1", "cifar10-50", "FedAvg adapted", label="FedAvg, two steps before it is scored"),
]
FEW = [
    Row("pfedhn-table1", "cifar10-10", method, label=method)
    for method in ("LG-FedAvg", "FedPer", "pFedHN-PC", "pFedHN", "Local")
]
MNIST = [
    Row("pfedhn-table3", f"mnist-{n}", method, rounds)
    for n in (10, 50)
    for method, rounds in (("FedAvg", None), ("Per-FedAvg", None), ("pFedMe", 200), ("pFedHN", None))
]
HOMOGENEOUS, HETEROGENEOUS = "FedHeNN homogeneous", "FedHeNN heterogeneous"
FIRST = [
    Row("fedhenn-table2", "cifar10-100-2", "FedAvg", 20),
    *(Row("fedhenn-table3", "cifar10-100-2", method, 20) for method in ("FedRep", HETEROGENEOUS, HOMOGENEOUS)),
]
CONTROLS = [
    Row("fedhenn-table3", "cifar10-100-2", method, 40)
    for method in (HOMOGENEOUS, "homogeneous control (eta 0)", HETEROGENEOUS, "heterogeneous control (local)")
]
XRAYS = [
    Row("hafl-table2", "xray1000-25", method, label=method)
    for method in ("Upper bound", "HAFL-GHN", "Local", "HAFL-distillation")
]
TABLES = {
    "own": partial(curves, (200, 500, 1000, 1500, 2000, 3000, 5000), OWN),
    "start": partial(curves, (100, 200, 300, 500, 1000, 2000, 5000), START),
    "target": partial(curves, (300, 500, 1000, 1500, 2000, 3000, 5000), TARGET),
    "sizes": partial(parts, "pfedhn-table2", "cifar10", "pFedHN", ("S", "M", "L")),
    "descriptors": partial(curves, (200, 500, 1000, 2000, 3000, 5000), DESCRIPTORS),
    "order": partial(curves, (500, 750, 1000, 1500), ORDER),
    "few": partial(curves, (500, 1000, 2000), FEW),
    "mnist": partial(curves, (500, 1000, 2500), MNIST),
    "fedhenn": partial(curves, (10, 20), FIRST, in_rounds=True),
    "controls": partial(curves, (20, 40), CONTROLS, in_rounds=True),
    "xrays": partial(curves, (8,), XRAYS, in_rounds=True),
}
