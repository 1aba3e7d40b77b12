"""Users' own images: in folders by class, or listed with their labels in a `labels.csv`."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hyperbloom.common.data.draws import IntArray
from hyperbloom.common.data.files import need
from hyperbloom.common.data.own import build_pool
from hyperbloom.common.data.pool import Pool, Portion
from hyperbloom.common.data.scaling import AnyArray
from hyperbloom.common.data.schema import propose_classes, read_labels
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.data.table import read_cells, units_of
from hyperbloom.common.errors import DataError

log = logging.getLogger("hyperbloom.client")

LIST = "labels.csv"

MOST_NUMBERED = 1000

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp")
GREY, COLOUR = ("1", "L", "LA"), ("RGB", "RGBA", "P", "PA", "CMYK", "YCbCr")


@dataclass(frozen=True)
class ImageBlock:
    """Image files, decoded on access and resized to (width, height) `size`; `mode` is L or RGB."""

    paths: tuple[Path, ...]
    size: tuple[int, int]
    mode: str

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, rows: IntArray, /) -> AnyArray:
        """Return uint8 `(len(rows), C, H, W)`; DataError if an image cannot be decoded."""
        channels, (width, height) = (1 if self.mode == "L" else 3), self.size
        images = np.empty((len(rows), channels, height, width), np.uint8)
        for place, row in enumerate(rows):
            images[place] = read_image(self.paths[row], self.mode, self.size)
        return images


def read_folder(spec: DataSpec) -> Pool:
    """Read the folder `spec.data`: `class/*.png` and the like, or the same in `train/`, `test/` and perhaps `val/`.

    What is missing is held out as in `build_pool`. If there is a `labels.csv`, its column `file` names the images,
    `owner` and `group` what they say, and each other is a label.
    """
    root = Path(spec.data).expanduser()
    if (root / LIST).is_file():
        return _read_listed(root, spec)
    there = [entry.name for entry in _folders(root) if any(_folders(entry))]
    parts = [name for name in ("train", "val", "test") if name in there]
    if not parts:
        names = _class_names(root)
        paths, labels = _list(root, names)
        return build_pool(str(root), {str(root): Portion.of(_images(paths), labels)}, spec.seed, names)
    if not {"train", "test"} <= {*parts} or len(there) > len(parts):
        found = ", ".join(f"{name}/" for name in there)
        raise DataError(f"{root}: expected train/, test/ and perhaps val/ with a folder for each class, found {found}")
    names = _class_names(root / "train")
    lists = {str(root / part): _list(root / part, names) for part in parts}
    shared = _images(tuple(path for paths, _ in lists.values() for path in paths))
    portions = {name: Portion.of(replace(shared, paths=paths), labels) for name, (paths, labels) in lists.items()}
    return build_pool(str(root), portions, spec.seed, names)


def _read_listed(root: Path, spec: DataSpec) -> Pool:
    where, table = str(root / LIST), read_cells(root / LIST)
    label = tuple(name for name in table if name not in ("file", "owner", "group"))
    if "file" not in table or not label:
        raise DataError(f"{where}: expected a column file and one for each label, found {', '.join(table)[:200]}")
    paths = tuple(root / name for name in table["file"])
    again = {path for path, rows in Counter(paths).items() if rows > 1}  # training and test could share it
    wrong = next((path for path in paths if path in again or not path.is_file()), None)
    if wrong is not None:
        why = "which has two rows" if wrong in again else "which is no file"
        raise DataError(f"{where}: expected the names of images below {root}, found {wrong}, {why}")
    classes = tuple(_numbered(propose_classes(table, label)))
    whole = Portion.of(_images(paths), read_labels(table, label, classes, where))
    units = units_of(table, {f"{name}s": name for name in ("owner", "group") if name in table}, where)
    return build_pool(str(root), {where: whole}, spec.seed, classes or label, units)


def _folders(folder: Path) -> list[Path]:
    """Return the folders in a folder, without hidden ones and the one that macOS adds to archives."""
    if not folder.is_dir():
        return []
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith((".", "__MACOSX")))


def _class_names(folder: Path) -> list[str]:
    names = [entry.name for entry in _folders(folder)]
    if not names:
        raise DataError(f"{folder}: expected one folder of images for each class, found no folders")
    return _numbered(names)


def _numbered(names: Sequence[str]) -> list[str]:
    """Return the names of classes; small numbers are the classes themselves, so that a site may lack some."""
    numbers = [int(name) for name in names if name.isdecimal() and name == str(int(name)) and int(name) < MOST_NUMBERED]
    return list(map(str, range(1 + max(numbers)))) if numbers and len(numbers) == len(names) else list(names)


def _list(folder: Path, names: list[str]) -> tuple[tuple[Path, ...], IntArray]:
    if unknown := [entry.name for entry in _folders(folder) if entry.name not in names]:
        raise DataError(f"{folder}: expected the classes of train ({', '.join(names)}), found {', '.join(unknown)}")
    found: list[tuple[Path, int]] = []
    for label, name in enumerate(names):
        entries = sorted((folder / name).iterdir()) if (folder / name).is_dir() else []
        found += [(entry, label) for entry in entries if is_image(entry)]
        if odd := [entry for entry in entries if not entry.name.startswith(".") and not is_image(entry)]:
            log.warning("%s and %d more: not read, expected images (%s)", odd[0], len(odd) - 1, ", ".join(ENDINGS))
    if not found:
        raise DataError(f"{folder}: expected images ({', '.join(ENDINGS)}) in folders by class, found none")
    return tuple(path for path, _ in found), np.array([label for _, label in found], dtype=np.int64)


def is_image(path: Path) -> bool:
    """Return whether a file's name is that of an image, and not hidden, as are those that macOS adds to archives."""
    return path.suffix.lower() in ENDINGS and not path.name.startswith(".")


def _images(paths: tuple[Path, ...]) -> ImageBlock:
    """Read every image's header. The first image sets the size. All are grey if most of them are."""
    size, grey = _header(paths[0])[0], 0
    for path in paths:
        other, mode = _header(path)
        grey += mode in GREY
        if other != size:
            wanted, found = f"{size[0]} x {size[1]} as {paths[0]}", f"{other[0]} x {other[1]}"
            raise DataError(f"{path}: expected an image of {wanted}, found {found}; resize all images to one size")
    return ImageBlock(paths, size, "L" if grey > len(paths) / 2 else "RGB")


def _header(path: Path) -> tuple[tuple[int, int], str]:
    with _opened(path) as image:
        return (int(image.width), int(image.height)), str(image.mode)


def read_image(path: Path, mode: str, size: tuple[int, int]) -> AnyArray:
    """Return an image as uint8 `(C, H, W)`, converted to `mode`, L or RGB, and resized to (width, height) `size`.

    Raises:
        DataError: It cannot be decoded, or has more than 8 bits a channel.
    """
    with _opened(path) as image:
        converted = image.convert(mode)
        if converted.size != size:
            converted = converted.resize(size, need("PIL.Image", "Pillow").Resampling.BILINEAR)
        return np.atleast_3d(np.asarray(converted, dtype=np.uint8)).transpose(2, 0, 1)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    images = need("PIL.Image", "Pillow")
    try:
        with images.open(path) as image:
            if image.mode not in GREY + COLOUR:
                raise DataError(f"{path}: expected an image of 8 bits a channel, found mode {image.mode}; convert it")
            yield image
    except (OSError, ValueError, SyntaxError, images.DecompressionBombError) as error:
        found = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
        raise DataError(f"{path}: expected an image, found {found}: {error}") from error
