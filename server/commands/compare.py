"""Compare strategies on the same clients, data, seeds and budget: one table, one page, resumable.

Every (strategy, seed) is an ordinary run folder under --out. Called again with the same --out, what is finished is kept
and the rest is run; more strategies and more seeds may be added, any other change is refused. All clients run on this
machine; strategies with clients elsewhere are compared by `flower-server --baselines`.

exit codes: 0 all runs are complete, 2 wrong settings, 4 a strategy could not be trained (the others were), 130 Ctrl-C
"""

import argparse
from datetime import datetime
from pathlib import Path

from hyperbloom.common.config import parse_assignment, read_yaml

EXAMPLE = "compare --strategies pfedhn,fedavg,local --config examples/demo.yaml --seeds 3 --out runs/demo-compared"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--strategies", required=True, metavar="A,B", help="what to compare; see flower-server --list")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file of a run; options_by_strategy holds each one's own options",
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many, from the run's seed on (default: %(default)s)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a key of the run (rounds=20, data.split=iid), or one strategy's option (pfedhn.learning_rate=0.05)",
    )
    add_common_arguments(parser)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that `reproduce` has as well."""
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for all of it, a new one or one to go on with")
    parser.add_argument(
        "--engine",
        choices=["inline", "grpc", "ray"],
        default="inline",
        help="clients in this process, as processes over gRPC, or in Flower's simulation (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Run what is missing, and write the table."""
    values = read_yaml(args.config) if args.config else {}
    overrides = dict(parse_assignment(text) for text in args.set)
    # Torch, Flower and the strategies take seconds to import, which a wrong flag should not cost.
    from rich.console import Console

    from hyperbloom.server.comparison import check_cells, open_comparison, plan, run_cells, shared_by
    from hyperbloom.server.comparison_table import write_table
    from hyperbloom.server.comparison_view import ComparisonView

    out = args.out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-compare"
    strategies = [name.strip() for name in args.strategies.split(",") if name.strip()]
    cells = plan(out, strategies, args.seeds, values, overrides, str(args.config or "the command line"))
    check_cells(cells, args.engine)
    console = Console()
    with open_comparison(out, shared_by(cells[0].config, args.engine), cells):
        print(f"comparison: {out} ({len(cells)} runs; the same command with --out {out} goes on where this one stops)")
        with ComparisonView(console, cells) as view:
            failures = run_cells(cells, args.engine, view)
        print(f"\n{write_table(out, cells)}")
    print(f"everything is in {out}")
    return failures[0].exit_code if failures else 0
