"""`flower-client predict`."""

import json
import sys
from pathlib import Path

import click

from hyperbloom.common.commands import FILE, FOLDER, Command

_EPILOG = """\
\b
Example:
  flower-client predict --model models/ward-7 scan-1.png scan-2.png
"""


@click.command("predict", cls=Command, epilog=_EPILOG)
@click.argument("files", nargs=-1, required=True, type=FILE, help="image, .npy, .npz or folder of images")
@click.option("--model", required=True, type=FOLDER, metavar="DIR", help="model folder, from export or join")
@click.option("--json", "as_json", is_flag=True, help="a JSON object per input, with all probabilities")
def command(files: tuple[Path, ...], model: Path, as_json: bool) -> None:
    """Classify images or arrays with an exported model.

    FILES are images (converted to the model's size and channels), .npy or .npz (key x), and folders of images. Prints a
    table, or tab-separated lines when piped: file, class, probability.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from hyperbloom.common.data.unlabelled import read_inputs
    from hyperbloom.common.export import read_model

    described, logits = read_model(model)
    names = described.class_names
    table = Table("file", "class", "probability", box=None, pad_edge=False)
    in_table = sys.stdout.isatty() and not as_json
    for inputs in read_inputs(files, described.input_shape, described.scaling):
        for chunk, some in zip(inputs.values.split(256), _split(inputs.names, 256), strict=True):
            for file, row in zip(some, logits(chunk).double().softmax(1).tolist(), strict=True):
                best = max(range(len(row)), key=row.__getitem__)
                if as_json:
                    line = {"file": file, "class": names[best], "probability": row[best], "probabilities": row}
                    print(json.dumps(line))
                elif in_table:
                    table.add_row(escape(file), escape(names[best]), f"{row[best]:.4f}")
                else:
                    print(file, names[best], f"{row[best]:.6f}", sep="\t")
    if in_table:
        Console().print(table)


def _split(names: tuple[str, ...], size: int) -> list[tuple[str, ...]]:
    return [names[start : start + size] for start in range(0, len(names), size)]
