"""Give a model to every newcomer who describes its data: keeps a trained run of odpfl ready.

Newcomers run `flower-client join`; neither labels nor training are asked of them. Ctrl-C stops it.
"""

import argparse
from pathlib import Path

from hyperbloom.server.cli import add_machines

EXAMPLE = "serve runs/20260101-120000-odpfl --host 0.0.0.0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `serve`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder of strategy odpfl")
    add_machines(parser)


def run(args: argparse.Namespace) -> None:
    """Serve until Ctrl-C.

    Raises:
        HyperbloomError: the run is of another strategy or cannot be read, or the SuperLink failed.
    """
    from rich.console import Console

    from hyperbloom.server.board import plain_text
    from hyperbloom.server.cli import fleet_for_newcomers
    from hyperbloom.server.on_demand import ModelMaker, OnDemandService, check_on_demand
    from hyperbloom.server.trained import read_trained

    console = Console()

    def tell(text: str) -> None:
        console.print(plain_text(text), markup=False, highlight=False, soft_wrap=True)

    maker = ModelMaker(read_trained(args.run, check_on_demand))
    with fleet_for_newcomers(args, args.run / "serve", console, tell) as grid:
        OnDemandService(grid, maker, tell).serve()
