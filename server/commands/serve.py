"""Give a model to every newcomer who describes its data: keeps a trained run of odpfl ready.

Newcomers run `flower-client join`; neither labels nor training are asked of them. Ctrl-C stops it.
"""

import argparse
from pathlib import Path

EXAMPLE = "serve runs/20260101-120000-odpfl --insecure"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `serve`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder of strategy odpfl")
    parser.add_argument("--host", default="127.0.0.1", help="address that newcomers connect to (default: %(default)s)")
    parser.add_argument("--port", type=int, default=9092, help="Fleet port; 0 takes a free one (default: %(default)s)")
    parser.add_argument("--insecure", action="store_true", help="speak plain text: for loopback and trials only")
    tls = parser.add_argument_group("TLS (instead of --insecure)")
    tls.add_argument("--tls-certificate", type=Path, metavar="FILE", help="the server's certificate, PEM")
    tls.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key, PEM")
    tls.add_argument("--tls-ca", type=Path, metavar="FILE", help="the CA that signed it, PEM; newcomers need it too")


def run(args: argparse.Namespace) -> None:
    """Serve until Ctrl-C.

    Raises:
        HyperbloomError: the run is of another strategy or cannot be read, or the SuperLink failed.
    """
    from rich.console import Console

    from hyperbloom.server.cli import fleet_for_newcomers
    from hyperbloom.server.on_demand import Counter, Generator, check_on_demand
    from hyperbloom.server.trained import read_trained

    console = Console()

    def tell(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    generator = Generator(read_trained(args.run, check_on_demand))
    with fleet_for_newcomers(args, args.run / "serve", console) as grid:
        Counter(grid, generator, tell).serve()
