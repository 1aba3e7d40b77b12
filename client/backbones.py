"""`flower-client backbone`: pretrained networks on this machine. Only `get` uses a network, and only if told to."""

import os
from pathlib import Path
from typing import Any

import click

from hyperbloom.common.errors import ConnectionFailed, ModelError, describe
from hyperbloom.common.handout import PATTERNS
from hyperbloom.common.program.commands import FOLDER, Flag, command, group

_FOLDER = "$HYPERBLOOM_BACKBONES or ~/.cache/hyperbloom/backbones"
_ROOT = Flag("--root", "where networks are", type=FOLDER, show_default=_FOLDER)
_SHAPE = Flag("--input-shape", "of the data, such as 3,32,32", show_default="the network's own", metavar="C,H,W")


@command(
    "get",
    click.Argument(["name"], help="name on the Hugging Face hub, such as google/vit-base-patch16-224"),
    Flag("--revision", "commit or tag, so that all machines get the same", show_default="the newest"),
    _ROOT,
    example="flower-client backbone get google/vit-base-patch16-224 --revision 3f49326",
)
def _get(name: str, revision: str | None, root: Path | None) -> None:
    """Fetch a network from the Hugging Face hub.

    It is checked, and its folder named. A fetch that was cut off goes on where it stopped.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise ModelError("backbone get: needs huggingface_hub: pip install 'hyperbloom[backbone]'") from None
    root = root or Path(os.environ.get("HYPERBLOOM_BACKBONES") or "~/.cache/hyperbloom/backbones").expanduser()
    folder = root / name.replace("/", "--")
    try:
        huggingface_hub.snapshot_download(name, revision=revision, local_dir=folder, allow_patterns=list(PATTERNS))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise ConnectionFailed(f"cannot fetch {name}: {describe(error)[:300]}") from None
    print(f"{folder}: {_told(folder, None)}")


@command(
    "check",
    click.Argument(["where"], help="folders, or package.module:function", nargs=-1, required=True),
    _SHAPE,
    example="flower-client backbone check vit-tiny",
)
def _check(where: tuple[str, ...], input_shape: str | None) -> None:
    """Load networks, and print the digests that servers compare."""
    for each in where:
        print(f"{each}: {_told(each, input_shape)}", flush=True)


def _told(where: Any, input_shape: str | None) -> str:
    """Return a network's digest and size in words; ModelError if it cannot be loaded."""
    from hyperbloom.common.models import BACKBONE, ModelSpec, backbone_digest, build
    from hyperbloom.common.models.pretrained import usual_shape

    try:
        shape = tuple(map(int, input_shape.split(","))) if input_shape else usual_shape(str(where))
        if min(shape) < 1:
            raise ValueError
    except ValueError:
        raise ModelError(f"--input-shape: expected numbers such as 3,32,32, found {input_shape}") from None
    spec = ModelSpec(BACKBONE, "M", shape, 2, "head", str(where))
    tensors = build(spec).state_dict().values()
    return f"{backbone_digest(spec)}, {sum(each.numel() for each in tensors):,} numbers, inputs {shape}"


backbone = group(
    "backbone",
    """Fetch and check pretrained networks (--backbone).

    Nothing is fetched while a client runs.""",
    *(_get, _check),
    example="flower-client backbone check vit-tiny",
)
