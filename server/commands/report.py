"""Write a run's report: one HTML file with all figures, readable without a network.

RUN may also be a comparison's folder (`flower-server compare`): the run that was begun first, with the other strategies
of its seed. A run writes its report itself when it ends, but for the matrix of heads on other clients' feature
extractors: that needs the data, here with --root or where the run found them. It is left out, with the reason, where it
cannot be had.
"""

import argparse
from pathlib import Path

EXAMPLE = "report runs/20260102-030405-pfedhn --root /data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, or a comparison's")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it (default: RUN/report.html)")
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder with the data set's files, for the matrix")
    parser.add_argument("--no-matrix", action="store_true", help="leave the matrix out, which takes time and the data")


def run(args: argparse.Namespace) -> None:
    """Write it."""
    from hyperbloom.server.report import write_report

    print(f"the report is {write_report(args.run, args.out, not args.no_matrix, args.root)}")
