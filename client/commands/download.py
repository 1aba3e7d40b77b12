"""`flower-client download`."""

from pathlib import Path

import click

from hyperbloom.common.commands import FOLDER, Command
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.proposals import DATASETS as NAMES
from hyperbloom.common.proposals import proposed

_EPILOG = """\
\b
Example:
  flower-client download cifar10 --root /data
"""


@click.command("download", cls=Command, epilog=_EPILOG)
@click.argument("name", shell_complete=proposed(NAMES), help="name of a data set; see flower-server --list")
@click.option(
    "--root", type=FOLDER, metavar="DIR", help="where to", show_default="$HYPERBLOOM_DATA or ~/.cache/hyperbloom"
)
def command(name: str, root: Path | None) -> None:
    """Fetch a named data set.

    For clients, and for `flower-server` with --engine inline, compare and reproduce. What is there is left alone.
    torchvision's downloader fetches CIFAR-10 and -100, MNIST and Fashion-MNIST from their publishers. For others the
    command says what to put where.
    """
    from hyperbloom.common.data import DATASETS, DataSpec, load_client_data

    if name not in DATASETS:
        raise ConfigError(f"expected one of {', '.join(sorted(DATASETS))}; found {name!r}")
    data = load_client_data(DataSpec(data=name, root=root, download=True))
    sizes = ", ".join(f"{len(getattr(data, part))} {part}" for part in ("train", "val", "test"))
    print(f"{name} can be read: {sizes}")
