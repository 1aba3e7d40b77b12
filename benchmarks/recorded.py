"""The tables of the pages, made from `figures/benchmarks.jsonl`, which `--record` of each program writes.

Of each row the last line of its program counts.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.measure import Comparison
from figures.pages import TOP, read, table_row

LINES = TOP / "figures" / "benchmarks.jsonl"
HEADS = ("what", "ours", "other", "unit", "ratio", "conditions")
LOAD = re.compile(r", load ([0-9.]+) at the start")
LIMITS = {
    "bf16": "bfloat16 (`torch.autocast`)",
    "bf16 products": "products that oneDNN may round to bfloat16",
    "compiled": "`torch.compile`",
    "fused SGD": "`torch.optim.SGD(fused=True)`",
    "batch 256": "batches of 256, per example",
    "roofline": "as shipped, of the rate of a large product",
}
Row = dict[str, Any]


def latest(lines: Iterable[Row], *programs: str) -> list[Row]:
    """Return the last line of each row of the programs, in their order."""
    found = {(line["program"], line["name"]): line for line in lines}
    return [line for each in programs for (program, _), line in found.items() if program == each]


def comparison(line: Row) -> Comparison:
    """Return what a line says."""
    fields = ("name", "unit", "ours", "other", "conditions", "more_is_better")
    return Comparison(**{field: line[field] for field in fields})


def number(value: float, digits: int = 4) -> str:
    """Return a figure with some digits, from a thousand on without a fraction."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}g}"


def where(lines: Iterable[Row]) -> str:
    """Return on which machines the lines were measured, when, and under which load."""
    places: dict[str, list[Row]] = {}
    for line in (lines := list(lines)):
        places.setdefault(LOAD.sub("", line["machine"]), []).append(line)
    said, programs = [], len({line["program"] for line in lines})
    for place, rows in places.items():
        loads = sorted(float(found.group(1)) for row in rows if (found := LOAD.search(row["machine"])))
        span = " to ".join(dict.fromkeys(f"{load:g}" for load in (loads[:1] + loads[-1:])))
        load = f", load {span} before a program" if loads else ""
        days = sorted({row["day"] for row in rows})
        names = (row["name"] if programs == 1 else row["program"] for row in rows)
        which = f" ({'; '.join(dict.fromkeys(names))})" if len(places) > 1 else ""
        said.append(f"{place}{load}; {' and '.join(days)}{which}.")
    return "Machine: " + " And: ".join(said)


def table(*programs: str) -> str:
    """Return the comparisons of programs in Markdown, and below them the machine."""
    lines = latest(read(LINES), *programs)
    rows = [
        table_row(
            [row.name, number(row.ours), number(row.other), row.unit, f"**{number(row.ratio, 3)}**", row.conditions]
        )
        for row in map(comparison, lines)
    ]
    return "\n".join([table_row(HEADS), "|---|---:|---:|---|---:|---|", *rows, "", where(lines)])


def limits() -> str:
    """Return the ratios of variants of a step, a column for each network."""
    lines = latest(read(LINES), "local_limits")
    found = {tuple(line["name"].split(", ")): line for line in lines}
    networks = list(dict.fromkeys(network for network, _ in found))
    rows = [table_row(["variant", *networks]), "|---|" + "---:|" * len(networks)]
    for variant, told in LIMITS.items():
        cells = [found.get((network, variant)) for network in networks]
        rows.append(table_row([told, *(f"{comparison(cell).ratio:.2f}" if cell else "" for cell in cells)]))
    steps = [f"* {network}, {variant}: {line['conditions']}" for (network, variant), line in found.items()]
    return "\n".join([*rows, "", where(lines), "", *steps])


def only(program: str) -> Comparison:
    """Return the row of a program that has one."""
    (line,) = latest(read(LINES), program)
    return comparison(line)


MADE = {
    "ratios": (
        "round_overhead",
        "server_step",
        "server_memory",
        "local_sgd",
        "end_to_end",
        "backbone_head",
        "alignment",
        "wire_bytes",
        "memory",
        "live_page",
    ),
    "half": ("half_precision",),
    "transports": ("transports",),
    "fleet": ("fleet",),
    "at_once": ("vectorised",),
    "scale": ("scale",),
    "asynchronous": ("asynchrony",),
    "newcomers": ("on_demand",),
    "footprint": ("footprint",),
}
TABLES: dict[str, Callable[[], str]] = {word: lambda names=names: table(*names) for word, names in MADE.items()}
TABLES["limits"] = limits
