"""Watch a run from its folder: one that runs, until it ends, or one that is over.

Reads files alone, so it can be called from anywhere that sees the folder, as often as you like. Baselines are shown one
after the other; on a terminal as the run itself shows them, elsewhere as lines.
"""

import argparse
from pathlib import Path

EXAMPLE = "watch runs/20260102-030405-pfedhn"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")


def run(args: argparse.Namespace) -> None:
    """Show the run until it ends."""
    from rich.console import Console

    from hyperbloom.server.watching import watch

    watch(args.run, Console())
