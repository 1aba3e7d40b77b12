"""Run the programs here that print one ratio, and write one table, from which `docs/benchmarks.md` is made by hand.

python -m benchmarks.run_all [--quick] [--skip memory,round_overhead] [--out FILE]
"""

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks import (
    asynchrony,
    end_to_end,
    local_sgd,
    memory,
    on_demand,
    round_overhead,
    scale,
    server_memory,
    server_step,
    vectorised,
    wire_bytes,
)
from benchmarks.measure import Comparison, Run, machine

PROGRAMS: dict[str, Run] = {
    "round_overhead": round_overhead.run,
    "server_step": server_step.run,
    "server_memory": server_memory.run,
    "local_sgd": local_sgd.run,
    "end_to_end": end_to_end.run,
    "vectorised": vectorised.run,
    "wire_bytes": wire_bytes.run,
    "memory": memory.run,
    "scale": scale.run,
    "asynchrony": asynchrony.run,
    "on_demand": on_demand.run,
}
OUT = Path("runs/benchmarks.md")


def table(rows: Iterable[Comparison]) -> str:
    """Return the comparisons as a Markdown table."""
    lines = ["| what | ours | other | unit | ratio | conditions |", "|---|---:|---:|---|---:|---|"]
    for row in rows:
        figures = f"{row.ours:.4g} | {row.other:.4g} | {row.unit} | **{row.ratio:.3g}**"
        lines.append(f"| {row.name} | {figures} | {row.conditions} |")
    return "\n".join(lines)


def page(rows: Iterable[Comparison], command: str, where: str, minutes: float) -> str:
    """Return the whole document."""
    return f"""\
# Benchmarks

    {command}

Both sides of every row were measured in the same run, in turns; figures are medians. A ratio above 1 is in our
favour. What is compared with what stands at the top of each program in `benchmarks/`.

Machine: {where}. The whole took {minutes:.0f} minutes.

{table(rows)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short settings: to see that it works, not to quote")
    parser.add_argument("--skip", default="", metavar="A,B", help=f"leave out some of {', '.join(PROGRAMS)}")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="where the table goes")
    args = parser.parse_args()
    skipped = {name for name in args.skip.split(",") if name}
    if unknown := skipped - set(PROGRAMS):
        parser.error(f"--skip: expected names of {', '.join(PROGRAMS)}, found {', '.join(sorted(unknown))}")
    where, start = machine(), time.monotonic()
    command = " ".join(["python -m benchmarks.run_all", *sys.argv[1:]])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Comparison] = []
    for name, run in PROGRAMS.items():
        if name not in skipped:
            print(f"== {name}", flush=True)
            rows += run(args.quick)
            # After each program: what was measured is not lost if a later one fails.
            args.out.write_text(page(rows, command, where, (time.monotonic() - start) / 60))
    print(table(rows))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
