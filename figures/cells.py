"""Every number of the papers' tables beside ours: which were reached, which were not, and which were not run.

A cell is one number of a paper. Ours is the mean over seeds at the round that validation selected (the last of equal
ones), of the runs without settings of their own. Of such runs with three seeds, or else of those with the most rounds,
validation selects. Rounds of ODPFL-HN with one client each count as 1/9, because the paper's train a tenth of 90
clients. The verdict compares the two means: `above`
or `below` if they differ by more than the paper's deviation, or by two points where it gives none, else `within`. Where
the paper gives the standard error of its mean (`spread: error`), the limit is one standard error of the difference,
`sqrt(paper^2 + ours^2)`: ours is over seeds or, with one seed, over clients. The difference in these units stands by
the verdict. A cell is `reached` if it is within or above with three seeds and the paper's rounds. Where all runs have
settings of their own (fewer steps, smaller networks, other data), or our standard error is not known, it is `not
comparable`.

    python -m figures.cells           # writes figures/cells.json
    python -m figures.cells --check   # exit code 1 if it is not what the results say
"""

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from figures.odpfl import ROWS, standard_error
from figures.pages import TOP, read, table_row
from figures.paper_tables import WHOLE, PaperTable, load_table, table_names
from hyperbloom.common.files.storage import write_bytes

CELLS = Path(__file__).with_name("cells.json")
README = {
    "CIFAR-10, 50 clients of two classes": ("pfedhn-table1", "cifar10-50", ("pFedHN", "pFedHN-PC"), "Local", "FedAvg"),
    "MNIST, 50 clients of two classes": ("pfedhn-table3", "mnist-50", ("pFedHN",), "Local", "FedAvg"),
    "CIFAR-10, 10 newcomers of two shards, **no labels**": (
        "odpfl-table1",
        "cifar10-pathological",
        ("ODPFL-HN",),
        "",
        "FedAvg",
    ),
    "chest X-rays (AUROC), 4 clients with an architecture each; one architecture in the last column": (
        "hafl-table2",
        "xray1000-25",
        ("HAFL-GHN",),
        "Local",
        "Upper bound",
    ),
}
"""The README's rows: table, column, our methods, the one of each client alone, and the one with one model for all."""
NAMES = {"pFedHN": "`pfedhn`", "pFedHN-PC": "`pfedhn-pc`", "ODPFL-HN": "`odpfl`", "HAFL-GHN": "`ghn`"}
SYSTEMS = {"pFedHN": "pfedhn", "ODPFL-HN": "odpfl", "HAFL-GHN": "hafl", "FedHeNN": "fedhenn"}
TOLERANCE = 2.0
SEEDS = 3
VERDICTS = ("reached", "above", "within", "below", "not comparable", "not run")
Line = dict[str, Any]
Runs = dict[tuple[str, str, str], list[Line]]


def lines() -> Iterator[Line]:
    """Yield each run of a cell: table, column, method, seed, rounds, our number, and its own settings."""
    for line in read(TOP / "figures" / "reproduced.jsonl"):
        _, val, test = max(line["round_val_test"], key=lambda point: (point[1], -point[0]))  # the first of equal ones
        own = [f"{key}={line[key]}" for key in ("pixels", "size") if key in line]
        yield {**line, "ours": test, "val": val, "set": [*line.get("set", []), *own]}
    for line in read(TOP / "figures" / "odpfl.jsonl"):
        if line["method"] in ROWS and line["clients"] == 100 and not line.get("search"):
            column = f"{line['data']}-{line['split'].removeprefix('dirichlet-')}"
            about = {"table": "odpfl-table1", "column": column, "method": ROWS[line["method"]]}
            about |= {"rounds": line["rounds"] // 9} if "cohort=1" in line["set"] else {}
            about |= {"set": [*line["set"], "options.start=common"]} if line["method"] == "odpfl-common" else {}
            ours = {"ours": line["novel_test_mean"], "error": standard_error(line, "novel_test")}
            yield {**line, **about, **ours, "val": line.get("val_mean", 0.0)}


def by_cell(found: Iterable[Line]) -> Runs:
    """Return the runs of each table, column and method."""
    runs: Runs = {}
    for line in found:
        runs.setdefault((line["table"], line["column"], line["method"]), []).append(line)
    return runs


def cells(runs: Runs) -> list[Line]:
    """Return all cells that can be run, in the order of the tables."""
    return [
        cell(table, name, column, method, part, [*_of_part(runs.get((name, column, method), []), part)])
        for name, table in (
            (name, load_table(name)) for name in table_names() if name.startswith(tuple(SYSTEMS.values()))
        )
        for column, about in table.columns.items()
        if not about.cannot
        for method, row in table.methods.items()
        if row.there
        for part in row.figures(column)
    ]


def _of_part(runs: Iterable[Line], part: str) -> Iterator[Line]:
    for run in runs:
        if part == WHOLE:
            yield run
        elif part in run.get("parts", ()):
            yield {**run, "ours": run["parts"][part]}


def cell(table: PaperTable, name: str, column: str, method: str, part: str, runs: Sequence[Line]) -> Line:
    """Return a cell with its runs."""
    row, stand_in = table.methods[method], table.columns[column].stand_in
    paper, runs = row.figures(column)[part], counted(table, runs)
    ours = [run["ours"] for run in runs]
    settings = {"rounds": runs[0]["rounds"], "set": runs[0]["set"]} if runs else {}
    result = {
        "cell": ", ".join(filter(None, [name, table.columns[column].title, method, part])),
        "own": method.startswith(next(own for own, tables in SYSTEMS.items() if name.startswith(tables))),
        "paper": [paper.mean, paper.deviation],
        "ours": [round(statistics.fmean(ours), 2), _deviation(ours)] if ours else None,
        "seeds": sorted(run["seed"] for run in runs),
        "settings": settings | {"rounds of the paper": table.config(method, column).rounds},
    }
    limit, other = paper.deviation, bool(stand_in or _own(table, settings.get("set", ())))
    if table.spread == "error" and runs and limit is not None:
        error = _error(runs)
        other, limit = other or error is None, math.hypot(limit, error or 0.0)
        if error is not None:
            result["standard errors"] = round((statistics.fmean(ours) - paper.mean) / limit, 1) + 0.0  # no -0.0
    return result | {"verdict": _verdict(result, limit, other), "why": row.reason(column, part)}


def counted(table: PaperTable, runs: Sequence[Line]) -> list[Line]:
    """Return the runs that count: with the paper's settings and three seeds if there are any, best by validation."""
    alike: dict[str, list[Line]] = {}
    for run in [run for run in runs if not _own(table, run["set"])] or runs:
        alike.setdefault(f"{run['rounds']} {run['set']}", []).append(run)

    def rank(some: Sequence[Line]) -> tuple[bool, int, float]:
        whole = len(some) >= SEEDS
        return whole, 0 if whole else some[0]["rounds"], statistics.fmean(run["val"] for run in some)

    return max(alike.values(), key=rank, default=[])


def _own(table: PaperTable, settings: Sequence[str]) -> list[str]:
    return [text for text in settings if text.partition("=")[0] not in table.searched]


def _deviation(values: Sequence[float]) -> float | None:
    return round(statistics.stdev(values), 2) if len(values) > 1 else None


def _error(runs: Sequence[Line]) -> float | None:
    """Return the standard error of our mean: over seeds, or of one seed over its clients where that is recorded."""
    values = [run["ours"] for run in runs]
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else runs[0].get("error")


def _verdict(cell: Line, limit: float | None, other: bool) -> str:
    settings = cell["settings"]
    if cell["ours"] is None:
        return "not run"
    if other:
        return "not comparable"
    (paper, _), (ours, _) = cell["paper"], cell["ours"]
    word = "above" if ours > paper else "below"
    if abs(ours - paper) <= (TOLERANCE if limit is None else limit):
        word = "within"
    whole = len(cell["seeds"]) >= SEEDS and settings["rounds"] >= settings["rounds of the paper"]
    return "reached" if whole and word == "within" else word


# ---------------------------------------------------------------------- pages


def page(some: Sequence[Line]) -> str:
    """Return the tables as Markdown: how many cells of each paper have which verdict, then those that were run."""
    parts = [table_row(["paper", "cells", *VERDICTS]), table_row(["---"] * (2 + len(VERDICTS)))]
    for paper, prefix in SYSTEMS.items():
        for who, own in ((paper, True), (f"{paper}'s baselines", False)):
            verdicts = Counter(x["verdict"] for x in some if x["cell"].startswith(prefix) and x["own"] == own)
            parts.append(table_row([who, str(verdicts.total()), *(str(verdicts[each] or "") for each in VERDICTS)]))
    parts += ["", table_row(["cell", "paper", "ours", "seeds", "rounds", "verdict"]), table_row(["---"] * 6)]
    parts += [table_row(_shown(each)) for each in some if each["ours"]]
    whys = [f"* *{each['cell']}*: {each['why']}" for each in some if each["why"]]
    return "\n".join([*parts, "", *whys]).rstrip()


def _shown(cell: Line) -> list[str]:
    settings = cell["settings"]
    rounds = f"{settings['rounds']:,} of {settings['rounds of the paper']:,}"
    if settings["set"]:
        rounds += f" ({', '.join(settings['set'])})"
    numbers = [number(*cell["paper"]), number(*cell["ours"])]
    away = f" ({cell['standard errors']:+z.1f} standard errors)" if "standard errors" in cell else ""
    return [cell["cell"], *numbers, str(len(cell["seeds"])), rounds, cell["verdict"] + away]


def number(mean: float, deviation: float | None, digits: int = 2) -> str:
    return f"{mean:.{digits}f}" + (f" +- {deviation:.{digits}f}" if deviation is not None else "")


def rows(runs: Runs) -> str:
    """Return the README's table: methods of ours, each client alone, and one model for all."""
    parts = [table_row(["data, clients", "Hyperbloom", "each client alone", "one model for all"])]
    parts.append("|---|---:|---:|---:|")
    for what, (name, column, mine, alone, one) in README.items():
        table = load_table(name)
        ours = {
            each: _mean(counted(table, runs[name, column, each]), table.config(each, column).rounds)
            for each in (*mine, alone, one)
            if each
        }
        methods = ", ".join(f"{ours[each]} {NAMES[each]}" for each in mine)
        parts.append(table_row([what, methods, ours.get(alone, "not possible"), ours[one]]))
    return "\n".join(
        [
            *parts,
            "",
            f"Means of {SEEDS} seeds with their deviation and the paper's rounds, unless a cell says otherwise.",
        ]
    )


def _mean(runs: Sequence[Line], of_paper: int) -> str:
    values, rounds = [run["ours"] for run in runs], runs[0]["rounds"]
    remarks = [f"{len(values)} seed{'s' if len(values) > 1 else ''}"] if len(values) != SEEDS else []
    remarks += [f"{rounds:,} of {of_paper:,} rounds"] if rounds < of_paper else []
    few = f" ({', '.join(remarks)})" if remarks else ""
    return number(statistics.fmean(values), _deviation(values), 1) + few


def sentence(some: Sequence[Line]) -> str:
    """Return what the README says."""
    own = Counter(each["verdict"] for each in some if each["own"])
    run = own.total() - own["not run"] - own["not comparable"]
    close = own["within"] + own["above"]
    more = f"{close} more {'is' if close == 1 else 'are'} within or above with fewer seeds or rounds, " if close else ""
    return (
        f"Of {own.total()} figures that the papers have for their own methods, in columns that can be set up here,\n"
        f"{run} were run at a scale that can be compared: {own['reached']} are reached with three seeds,\n"
        f"{more}and {own['below']} are below "
        "([every cell, and what these words mean](docs/cells.md))."
    )


def main(words: Sequence[str] | None = None) -> int:
    """Write the file, or compare it with the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args, some = parser.parse_args(words), cells(by_cell(lines()))
    new = "[\n" + ",\n".join(json.dumps(each) for each in some) + "\n]\n"
    stale = new != (CELLS.read_text(encoding="utf-8") if CELLS.exists() else "")
    if stale and not args.check:
        write_bytes(CELLS, new.encode())
    if stale:
        print(f"{CELLS.relative_to(TOP)}: {'stale' if args.check else 'written'}")
    return int(args.check and stale)


TABLES = {
    "all": lambda: page(cells(by_cell(lines()))),
    "rows": lambda: rows(by_cell(lines())),
    "sentence": lambda: sentence(cells(by_cell(lines()))),
}

if __name__ == "__main__":
    sys.exit(main())
