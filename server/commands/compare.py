"""`flower-server compare`."""

from datetime import datetime
from pathlib import Path

import click

from hyperbloom.common.commands import FILE, Command, Flag, names
from hyperbloom.server.flags import OUT, set_flag

_EPILOG = """\
\b
Example:
  flower-server compare --strategies pfedhn,fedavg,local --seeds 3 \\
      --config examples/demo.yaml --out runs/demo-compared

exit codes: 0 all runs are complete, 2 wrong settings, 4 a strategy could not be trained (the others were), 130 Ctrl-C
"""
_SET = set_flag(
    "set a key of the run (rounds=20, data.split=iid), or one strategy's option (pfedhn.learning_rate=0.05)"
)
_FLAGS: list[click.Parameter] = [
    Flag("--strategies", required=True, metavar="A,B", help="what to compare; see flower-server --list"),
    Flag(
        "--config",
        type=FILE,
        metavar="FILE",
        help="YAML file of a run; options_by_strategy holds each strategy's own options",
    ),
    Flag("--seeds", type=int, default=3, help="how many, from the run's seed on"),
    _SET,
    *OUT,
    Flag("--no-picture", is_flag=True, help="write no picture, which takes matplotlib"),
]


@click.command("compare", cls=Command, params=[*_FLAGS], epilog=_EPILOG)
def command(
    strategies: str,
    config: Path | None,
    seeds: int,
    assignments: tuple[str, ...],
    out: Path | None,
    engine: str,
    no_picture: bool,
) -> int:
    """Compare strategies on the same clients, data and seeds.

    Writes one table and one picture. Every strategy and seed is an ordinary run folder under --out. Call the command
    again with the same --out to go on: finished runs are kept, and the others are run. You may add strategies and
    seeds; any other change is refused. All clients run on this machine. To compare strategies with clients elsewhere,
    use `flower-server --baselines`.
    """
    from hyperbloom.common.config import parse_assignment, read_yaml

    values = read_yaml(config) if config else {}
    overrides = dict(parse_assignment(text) for text in assignments)
    # Torch, Flower and the strategies take seconds to import, which a wrong flag should not cost.
    from rich.console import Console

    from hyperbloom.server.comparison import check_cells, open_comparison, plan, run_cells, shared_by
    from hyperbloom.server.comparison_table import check_matplotlib, write_table
    from hyperbloom.server.comparison_view import ComparisonView

    if not no_picture:
        check_matplotlib()
    out = out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-compare"
    cells = plan(out, names(strategies), seeds, values, overrides, str(config or "the command line"))
    check_cells(cells, engine)
    with open_comparison(out, shared_by(cells[0].config, engine), cells):
        print(f"comparison: {out} ({len(cells)} runs; the same command with --out {out} goes on where this one stops)")
        with ComparisonView(Console(), cells) as view:
            failures = run_cells(cells, engine, view)
        print(f"\n{write_table(out, cells, not no_picture)}")
    print(f"everything is in {out}")
    return failures[0].exit_code if failures else 0
