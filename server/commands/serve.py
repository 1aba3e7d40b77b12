"""`flower-server serve`."""

from pathlib import Path
from typing import Any

import click

from hyperbloom.common.commands import FOLDER, Command
from hyperbloom.server.flags import LISTENING

_EPILOG = """\
\b
Example:
  flower-server serve runs/20260101-120000-odpfl --host 0.0.0.0
"""


@click.command("serve", cls=Command, params=[*LISTENING], epilog=_EPILOG)
@click.argument("run", type=FOLDER, help="run folder of strategy odpfl")
def command(run: Path, **listening: Any) -> None:
    """Give a model to every newcomer who describes its data.

    Keeps a trained run of odpfl ready. Newcomers run `flower-client join`; they need neither labels nor training.
    Ctrl-C stops the server.
    """
    from rich.console import Console

    from hyperbloom.common.config import check
    from hyperbloom.server.board import plain_text
    from hyperbloom.server.fleet import Listening, open_for_newcomers
    from hyperbloom.server.on_demand import Counter, Generator, check_on_demand
    from hyperbloom.server.running import sayer
    from hyperbloom.server.trained import read_trained

    say = sayer(Console())

    def tell(text: str) -> None:
        say(plain_text(text))

    generator = Generator(read_trained(run, check_on_demand))
    with open_for_newcomers(check(Listening, listening, "the flags"), run / "serve", say, tell) as grid:
        Counter(grid, generator, tell).serve()
