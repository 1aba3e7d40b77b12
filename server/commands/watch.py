"""`flower-server watch`."""

from pathlib import Path

import click

from hyperbloom.common.commands import FOLDER, Command

_EPILOG = """\
\b
Example:
  flower-server watch runs/20260102-030405-pfedhn
"""


@click.command("watch", cls=Command, epilog=_EPILOG)
@click.argument("run", type=FOLDER, help="the run's folder")
def command(run: Path) -> None:
    """Watch a run from its folder.

    The run may still go on, or be over. The command only reads files, so you can call it on any machine that sees the
    folder, as often as you like. It shows baselines one after the other: on a terminal as the run itself does,
    elsewhere as lines.
    """
    from rich.console import Console

    from hyperbloom.server.watching import watch

    watch(run, Console())
