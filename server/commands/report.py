"""`flower-server report`."""

from pathlib import Path

import click

from hyperbloom.common.commands import FILE, FOLDER, Command

_EPILOG = """\
\b
Example:
  flower-server report runs/20260102-030405-pfedhn --root /data
"""


@click.command("report", cls=Command, epilog=_EPILOG)
@click.argument("run", type=FOLDER, help="the run's folder, or a comparison's")
@click.option("--out", type=FILE, metavar="FILE", help="where to write it", show_default="RUN/report.html")
@click.option("--root", type=FOLDER, metavar="DIR", help="folder with the data set's files, for the matrix")
@click.option("--no-matrix", is_flag=True, help="leave the matrix out, which takes time and the data")
def command(run: Path, out: Path | None, root: Path | None, no_matrix: bool) -> None:
    """Write a run's report, one HTML file with all figures.

    It can be read without a network. RUN may also be a comparison's folder (`flower-server compare`); the report is
    then of the run that was begun first, with the other strategies of its seed. A run writes its report itself when it
    ends, but without the matrix of heads on other clients' feature extractors. The matrix needs the data, from --root
    or from where the run found them. Without the data the report says why there is no matrix.
    """
    from hyperbloom.server.report import write_report

    print(f"the report is {write_report(run, out, not no_matrix, root)}")
