"""Users' own images in folders by class, optionally below folders for training, validation and test."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyperbloom.common.data.draws import IntArray
from hyperbloom.common.data.files import need
from hyperbloom.common.data.own import build_pool, split_three, split_train
from hyperbloom.common.data.pool import Pool, Portion
from hyperbloom.common.data.scaling import AnyArray
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.errors import DataError

__all__ = ["read_folder"]

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp")
GREY, COLOUR = ("1", "L", "LA"), ("RGB", "RGBA", "P", "PA", "CMYK", "YCbCr")


@dataclass(frozen=True)
class _Format:
    """The common format of all images: `size` is (width, height) in pixels, `mode` is L or RGB."""

    size: tuple[int, int]
    mode: str


@dataclass(frozen=True)
class _ImageBlock:
    """Image files, decoded on access."""

    paths: tuple[Path, ...]
    format: _Format

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.paths)

    def take(self, rows: IntArray) -> AnyArray:
        """Return uint8 `(len(rows), C, H, W)`.

        Raises:
            DataError: An image cannot be decoded.
        """
        channels, (width, height) = (1 if self.format.mode == "L" else 3), self.format.size
        images = np.empty((len(rows), height, width, channels), np.uint8)
        for place, row in enumerate(rows):
            images[place] = _decode(self.paths[row], self.format.mode).reshape(height, width, channels)
        return images.transpose(0, 3, 1, 2)


def read_folder(spec: DataSpec) -> Pool:
    """Read the folder `spec.data`: `class/*.png` and the like, or the same in `train/`, `test/` and perhaps `val/`.

    Without `train` and `test` the images are split 70 / 15 / 15. Without `val` a fifth of `train` is held out.

    Raises:
        DataError: There are no images, sizes differ, an image cannot be read, or `train` lacks a class.
    """
    root = Path(spec.data).expanduser()
    parts = [name for name in ("train", "val", "test") if any(_folders(root / name))]
    if not parts:
        names = _class_names(root)
        paths, labels = _list(root, names)
        whole = Portion.of(_ImageBlock(paths, _check(paths)), labels)
        return build_pool(str(root), split_three(whole, str(root), spec.seed), names)
    absent = [name for name in ("train", "test") if name not in parts]
    if absent:
        found = ", ".join(f"{name}/" for name in parts)
        raise DataError(
            f"{root}: expected train/ and test/ (val/ may be added) with a folder for each class, found {found}"
        )
    names = _class_names(root / "train")
    return build_pool(str(root), _portions(root, parts, names, spec.seed), names)


def _portions(root: Path, parts: list[str], names: list[str], seed: int) -> list[Portion]:
    lists = {part: _list(root / part, names) for part in parts}
    shared = _check(tuple(path for paths, _ in lists.values() for path in paths))
    found = {part: Portion.of(_ImageBlock(paths, shared), labels) for part, (paths, labels) in lists.items()}
    if "val" in found:
        return [found[part] for part in parts]
    return [*split_train(found["train"], str(root / "train"), seed), found["test"]]


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _class_names(folder: Path) -> list[str]:
    names = [entry.name for entry in _folders(folder)]
    if not names:
        raise DataError(f"{folder}: expected one folder of images for each class, found no folders")
    return names


def _list(folder: Path, names: list[str]) -> tuple[tuple[Path, ...], IntArray]:
    unknown = [entry.name for entry in _folders(folder) if entry.name not in names]
    if unknown:
        raise DataError(f"{folder}: expected the classes of train ({', '.join(names)}), found {', '.join(unknown)}")
    found: list[tuple[Path, int]] = []
    for label, name in enumerate(names):
        entries = sorted((folder / name).iterdir()) if (folder / name).is_dir() else []
        found += [(entry, label) for entry in entries if entry.suffix.lower() in ENDINGS]
    if not found:
        raise DataError(f"{folder}: expected images ({', '.join(ENDINGS)}) in folders by class, found none")
    return tuple(path for path, _ in found), np.array([label for _, label in found], dtype=np.int64)


def _check(paths: tuple[Path, ...]) -> _Format:
    """Read every image's header. The first image sets the size of all, and the choice of grey or colour."""
    size, mode = _header(paths[0])
    for path in paths:
        other, _ = _header(path)
        if other != size:
            wanted, found = f"{size[0]} x {size[1]} as {paths[0]}", f"{other[0]} x {other[1]}"
            raise DataError(f"{path}: expected an image of {wanted}, found {found}; resize all images to one size")
    return _Format(size, "L" if mode in GREY else "RGB")


def _header(path: Path) -> tuple[tuple[int, int], str]:
    images = need("PIL.Image", "Pillow")
    try:
        with images.open(path) as image:
            width, height, mode = int(image.width), int(image.height), str(image.mode)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected an image, found {path.stat().st_size} bytes: {error}") from error
    if mode not in GREY + COLOUR:
        raise DataError(f"{path}: expected an image of 8 bits a channel, found mode {mode}; convert it first")
    return (width, height), mode


def _decode(path: Path, mode: str) -> AnyArray:
    images = need("PIL.Image", "Pillow")
    try:
        with images.open(path) as image:
            return np.asarray(image.convert(mode), dtype=np.uint8)
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path}: expected a whole image, found {path.stat().st_size} bytes: {error}") from error
