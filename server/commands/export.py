"""Write clients' personal models from a run folder, to use them anywhere.

Each becomes a folder with the weights (safetensors), a torch program, ONNX (with the extra `export`), model.json and a
model card.
"""

import argparse
from pathlib import Path

EXAMPLE = "export runs/20260101-120000-pfedhn --all --out models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `export`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--client", metavar="NAME", help="the model of this client")
    which.add_argument("--all", action="store_true", help="the models of all clients, a folder each")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the folders go (default: RUN/models)")
    parser.add_argument("--class-names", metavar="A,B,...", help="what the classes are called, in order of the labels")


def run(args: argparse.Namespace) -> None:
    """Write the models.

    Raises:
        HyperbloomError: the run cannot be read, or the models are not on the server.
    """
    from hyperbloom.common.errors import ConfigError
    from hyperbloom.common.export import write_model
    from hyperbloom.server.export import Export

    export = Export(args.run)
    clients = export.clients(args.client)
    out = args.out or args.run / "models"
    taken = [out / client.client_id for client in clients if (out / client.client_id).exists()]
    if taken:
        raise ConfigError(f"--out: expected nothing there yet, found {taken[0]}")
    given = tuple(name.strip() for name in args.class_names.split(",")) if args.class_names else ()
    for personal in export.models(clients):
        classes = personal.spec.num_classes
        if given and len(given) != classes:
            raise ConfigError(f"--class-names: expected {classes} names, found {len(given)}")
        names = given or tuple(str(label) for label in range(classes))
        folder = out / personal.client.client_id
        files = write_model(folder, personal.module, personal.spec, names, personal.scaling, personal.card)
        print(f"{folder}: {', '.join(files)}", flush=True)
    if "model.onnx" not in files:
        print("no ONNX: pip install 'hyperbloom[export]' brings what it takes")
