"""`flower-client export`."""

from pathlib import Path
from typing import Any

import click

from hyperbloom.client.flags import data_flags, data_spec
from hyperbloom.common.commands import FOLDER, Command

_EPILOG = """\
\b
Example:
  flower-client export --client-id ward-7 --data scans.npz --out model
"""


@click.command("export", cls=Command, params=data_flags(), epilog=_EPILOG)
@click.option("--out", required=True, type=FOLDER, metavar="DIR", help="folder for the model")
@click.option("--client-id", required=True, metavar="NAME", help="this client's name, as it joined")
@click.option("--state-dir", type=FOLDER, metavar="DIR", help="its state folder, if it joined with one")
@click.option("--run", metavar="RUN", help="which run, if the state folder holds several")
def command(out: Path, client_id: str, state_dir: Path | None, run: str | None, **data: Any) -> None:
    """Write this client's own model from its state folder.

    This is for runs in which no one else has the whole model. It is the one with which the client was last scored, as
    in runs of pfedhn-pc, fedrep, ghn or local. In runs of pfedhn and fedavg the server writes the models:
    flower-server export. Give the data as the client joined with them.
    """
    from hyperbloom.client.own_model import write_own_model
    from hyperbloom.client.settings import ClientSettings

    settings = ClientSettings(client_id, data_spec(data), state_dir=state_dir)
    print(f"{out}: {', '.join(write_own_model(settings, run, out))}")
