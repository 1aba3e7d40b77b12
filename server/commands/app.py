"""The subcommand that writes a Flower app."""

from pathlib import Path

import click

from hyperbloom.common.program.commands import FILE, Flag, command, group
from hyperbloom.server.flags import set_flag


@command(
    "new",
    click.Argument(
        ["folder"], type=click.Path(path_type=Path), metavar="DIR", help="a new folder; its name is the app's"
    ),
    Flag("--config", "YAML file with values for the run config", type=FILE),
    set_flag("give a key of the run config this value"),
)
def _new(folder: Path, config: Path | None, assignments: tuple[str, ...]) -> None:
    """Write a Flower app whose run config has every key of a run."""
    from hyperbloom.common.config import load_run_config, parse_assignment
    from hyperbloom.server.flower_project import make_project

    make_project(folder, load_run_config(config, dict(parse_assignment(text) for text in assignments)))
    print(f"wrote {folder}; next: flwr run {folder} --stream --run-config \"strategy='pfedhn' rounds=20\"")


app = group(
    "app",
    """Make a Flower app.

    It runs on a SuperLink and SuperNodes that are already there, and in Flower's simulation.""",
    _new,
    example="flower-server app new ward-models --set strategy=pfedhn-pc",
)
