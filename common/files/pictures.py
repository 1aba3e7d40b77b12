"""Pictures that are written: masks as PNG files."""

import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hyperbloom.common.files.storage import write_bytes

PALETTE = bytes(
    channel
    for colour in range(256)
    for channel in (
        (0, 0, 0) if colour == 0 else (60 + colour * 89 % 196, 60 + colour * 151 % 196, 60 + colour * 47 % 196)
    )
)
"""A colour for each class; the background is black."""


def write_mask(folder: Path, name: str, mask: Sequence[Sequence[int]]) -> Path:
    """Write a mask `(H, W)` of classes as a PNG whose pixels are the classes, and return its path."""
    from PIL import Image

    whole, suffix = Path(name).name, Path(name).suffix
    stem = re.sub(r"[^\w.-]+", "-", whole if "[" in suffix else whole.removesuffix(suffix)).strip("-") or "mask"
    image = Image.fromarray(np.array(mask, dtype=np.uint8)).convert("L")
    image.putpalette(PALETTE)
    file = io.BytesIO()
    image.save(file, format="PNG")
    path = folder / f"{stem}.png"
    write_bytes(path, file.getvalue())
    return path
