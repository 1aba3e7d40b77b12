"""`flower-server export`."""

from pathlib import Path

import click

from hyperbloom.common.commands import FOLDER, Command, names
from hyperbloom.common.errors import ConfigError

_EPILOG = """\
\b
Example:
  flower-server export runs/20260101-120000-pfedhn --all --out models
"""


@click.command("export", cls=Command, epilog=_EPILOG)
@click.argument("run", type=FOLDER, help="run folder")
@click.option("--client", metavar="NAME", help="the model of this client")
@click.option("--all", "every", is_flag=True, help="the models of all clients, a folder each")
@click.option("--out", type=FOLDER, metavar="DIR", help="where the folders go", show_default="RUN/models")
@click.option("--class-names", metavar="A,B,...", help="what the classes are called, in order of the labels")
def command(run: Path, client: str | None, every: bool, out: Path | None, class_names: str | None) -> None:
    """Write clients' personal models from a run folder.

    Each becomes a folder with the weights (safetensors), a torch program, ONNX (with the extra `export`), model.json
    and a model card.
    """
    if (client is None) != every:
        raise ConfigError("expected one of --client NAME and --all")
    from hyperbloom.common.export import write_model
    from hyperbloom.server.export import Export

    export = Export(run)
    clients = export.clients(client)
    out = out or run / "models"
    taken = [out / each.client_id for each in clients if (out / each.client_id).exists()]
    if taken:
        raise ConfigError(f"--out: expected nothing there yet, found {taken[0]}")
    given = tuple(names(class_names))
    for personal in export.models(clients):
        classes = personal.spec.num_classes
        if given and len(given) != classes:
            raise ConfigError(f"--class-names: expected {classes} names, found {len(given)}")
        called = given or tuple(str(label) for label in range(classes))
        folder = out / personal.client.client_id
        files = write_model(folder, personal.module, personal.spec, called, personal.scaling, personal.card)
        print(f"{folder}: {', '.join(files)}", flush=True)
    if "model.onnx" not in files:
        print("no ONNX: pip install 'hyperbloom[export]' brings what it takes")
