"""MNIST and Fashion-MNIST from the published idx files, plain or compressed, in torchvision's layout.

Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE 1998.
H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST", 2017, https://arxiv.org/abs/1708.07747
"""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyperbloom.common.data.draws import IntArray
from hyperbloom.common.data.files import check_labels, download, first_existing, missing, with_validation
from hyperbloom.common.data.pool import ArrayBlock, Block, FileBlock, Pool, Portion
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.errors import DataError

SIDE = 28
IMAGE_HEADER, LABEL_HEADER = 16, 8  # bytes
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
HOW = "Fetch them: flower-client download DATA --root {root}; or put the official files there."


@dataclass(frozen=True)
class _Family:
    """The differences between the two data sets; `folder` is also the name of torchvision's class."""

    folder: str
    scaling: Scaling
    class_names: tuple[str, ...]


FAMILIES = {
    "mnist": _Family("MNIST", Scaling(255.0, (0.1307,), (0.3081,)), tuple(str(digit) for digit in range(10))),
    "fashion-mnist": _Family(
        "FashionMNIST",
        Scaling(255.0, (0.2860,), (0.3530,)),
        ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
}


def read_mnist(spec: DataSpec) -> Pool:
    """Return MNIST or Fashion-MNIST, 1 x 28 x 28 in ten classes."""
    family = FAMILIES[spec.data]
    folder = spec.folder / family.folder / "raw"
    absent = [name for name in FILES if first_existing(_places(folder, name)) is None]
    if absent and spec.download:
        download(family.folder, spec.folder)
    paths = [_find(folder, name, spec) for name in FILES]
    whole = _portion(paths[0], paths[1])
    train, val = with_validation(whole, family.folder)
    return Pool(spec.data, train, val, _portion(paths[2], paths[3]), family.class_names, family.scaling)


def _places(folder: Path, name: str) -> list[Path]:
    return [folder / name, folder / f"{name}.gz"]


def _find(folder: Path, name: str, spec: DataSpec) -> Path:
    places = _places(folder, name)
    found = first_existing(places)
    if found is None:
        raise missing(name, places, spec.folder, HOW.replace("DATA", spec.data))
    return found


def _portion(images: Path, labels: Path) -> Portion:
    block, values = _images(images), _labels(labels)
    if len(block) != len(values):
        raise DataError(f"{labels}: expected {len(block)} labels as {images.name} has images, found {len(values)}")
    check_labels(values, 10, labels)
    return Portion.of(block, values)


def _images(path: Path) -> Block:
    plain = path.suffix != ".gz"
    content = _content(path, IMAGE_HEADER if plain else -1)
    length = path.stat().st_size if plain else len(content)
    count, rows, columns = _sizes(path, content, length, 3)
    if (rows, columns) != (SIDE, SIDE):
        raise DataError(f"{path}: expected images of {SIDE} x {SIDE}, found {rows} x {columns}")
    if plain:
        return FileBlock(path, count, header=IMAGE_HEADER, label=0, shape=(1, SIDE, SIDE))
    return ArrayBlock(np.frombuffer(content, np.uint8, offset=IMAGE_HEADER).reshape(count, 1, SIDE, SIDE))


def _labels(path: Path) -> IntArray:
    content = _content(path)
    _sizes(path, content, len(content), 1)
    return np.frombuffer(content, np.uint8, offset=LABEL_HEADER).astype(np.int64)


def _sizes(path: Path, content: bytes, length: int, axes: int) -> tuple[int, ...]:
    """Read an idx header (two zero bytes, type 8 for bytes, number of axes, then sizes) and check the length."""
    header = 4 + 4 * axes
    if len(content) < header or content[:4] != bytes((0, 0, 8, axes)):
        found = f"{content[:4].hex(' ') or 'nothing'} in {length} bytes"
        raise DataError(f"{path}: expected an idx file that starts with 00 00 08 {axes:02x}, found {found}")
    sizes = tuple(int(size) for size in np.frombuffer(content[:header], ">u4", offset=4))
    expected = header + int(np.prod(sizes, dtype=np.int64))
    if length != expected or sizes[0] == 0:
        hint = "the file is truncated or corrupt; remove it and get it again"
        raise DataError(f"{path}: expected {expected} bytes for sizes {sizes}, found {length} bytes; {hint}")
    return sizes


def _content(path: Path, limit: int = -1) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(limit)
    except (OSError, EOFError, zlib.error) as error:
        size = path.stat().st_size if path.exists() else 0
        raise DataError(
            f"{path}: expected a whole readable file, found {size} bytes that fail with: {error}"
        ) from error
