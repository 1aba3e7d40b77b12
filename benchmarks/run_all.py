"""Run the programs here that print ratios, and append what they find to the file from which the pages are made.

python -m benchmarks.run_all --record figures/benchmarks.jsonl [--only memory,round_overhead] [--quick]
python -m figures.pages
"""

import subprocess
import sys

from benchmarks.measure import arguments

PROGRAMS = (
    "round_overhead",
    "server_step",
    "server_memory",
    "local_sgd",
    "alignment",
    "backbone_head",
    "end_to_end",
    "wire_bytes",
    "memory",
    "live_page",
    "transports",
    "local_limits",
    "half_precision",
    "fleet",
    "vectorised",
    "scale",
    "asynchrony",
    "on_demand",
    "footprint",
)


def main() -> int:
    """Run one program after the other, each in a process of its own; return 1 if one of them failed."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default=",".join(PROGRAMS), metavar="A,B", help=f"some of {', '.join(PROGRAMS)}")
    flags = parser.parse_args()
    names = [name for name in flags.only.split(",") if name]
    if unknown := set(names) - set(PROGRAMS):
        parser.error(f"--only: expected names of {', '.join(PROGRAMS)}, found {', '.join(sorted(unknown))}")
    words = [*(["--quick"] if flags.quick else []), *(["--record", str(flags.record)] if flags.record else [])]
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *words], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
