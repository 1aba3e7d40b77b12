"""Pictures that are written: masks as PNG files, and a page of images with what a model answers for them."""

import io
import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup
from PIL import Image

from hyperbloom.common.data.scaling import AnyArray
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.files.storage import write_bytes

Mask = Sequence[Sequence[int]]
"""A class for each pixel of an image, `(H, W)`."""

PALETTE = bytes(
    channel
    for colour in range(256)
    for channel in ((60 + colour * step % 196 for step in (89, 151, 47)) if colour else (0, 0, 0))
)
"""A colour for each class; the background is black."""

_PAGE = Markup(Path(__file__).with_name("answers.html").read_text(encoding="utf-8"))
_COLOUR = Markup('<i style="background: #{}"></i> {} &nbsp; ')
_FIGURE = Markup('<figure><img alt="" src="data:image/png;base64,{}"><figcaption>{}</figcaption></figure>')


def write_page(
    path: Path, title: str, shown: Iterable[tuple[bytes, Iterable[tuple[str, str]]]], classes: Sequence[str] = ()
) -> None:
    """Write a self-contained page of PNGs, each with named values, and with the colours of `classes` in masks."""
    colours = [PALETTE[3 * place : 3 * place + 3].hex() for place in range(len(classes))]
    legend = Markup().join(_COLOUR.format(*pair) for pair in list(zip(colours, classes, strict=True))[1:])
    figures = [
        _FIGURE.format(b64encode(png).decode(), Markup("<br>").join(f"{name}: {value}" for name, value in told))
        for png, told in shown
    ]
    write_bytes(path, _PAGE.format(title=title, legend=legend, figures=Markup("\n").join(figures)).encode())


def draw(image: AnyArray, mask: Mask | None = None) -> bytes:
    """Return a PNG of an image `(C, H, W)`, from its least value to its greatest, half under the objects of a mask."""
    low, high = image.min(), image.max()
    pixels = (255 * (image - low) / max(high - low, 1e-12)).astype(np.uint8)  # (C, H, W)
    shown = Image.fromarray(np.broadcast_to(pixels, (3, *pixels.shape[1:])).transpose(1, 2, 0).copy())
    if mask is not None:
        both = Image.blend(shown, _coloured(mask).convert("RGB"), 0.5)
        shown.paste(both, mask=Image.fromarray(np.array(mask) > 0))
    return _png(shown)


def write_mask(folder: Path, name: str, mask: Mask) -> Path:
    """Write a mask as a PNG whose pixels are the classes, and return its path; ConfigError if it is there already."""
    whole, suffix = Path(name).name, Path(name).suffix
    stem = re.sub(r"[^\w.-]+", "-", whole if "[" in suffix else whole.removesuffix(suffix)).strip("-") or "mask"
    path = folder / f"{stem}.png"
    if path.exists():
        raise ConfigError(f"--masks: {path} is there, perhaps an image or the mask of another; choose an empty folder")
    write_bytes(path, _png(_coloured(mask)))
    return path


def _coloured(mask: Mask) -> Image.Image:
    image = Image.fromarray(np.array(mask, dtype=np.uint8)).convert("L")
    image.putpalette(PALETTE)
    return image


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()
