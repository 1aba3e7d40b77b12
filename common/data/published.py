"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 from the published files, which torchvision fetches and reads.

Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE 1998.
H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST", 2017, https://arxiv.org/abs/1708.07747
A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009,
https://www.cs.toronto.edu/~kriz/cifar.html
"""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyperbloom.common.config import Section
from hyperbloom.common.data.draws import FIXED_SEED, IntArray, generator, hold_out
from hyperbloom.common.data.files import check_labels, download, missing, need
from hyperbloom.common.data.own import check_pair
from hyperbloom.common.data.pool import Pool, Portion
from hyperbloom.common.data.scaling import AnyArray, Scaling
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.errors import DataError, describe

HELD_OUT = 10_000  # of the 50,000 or 60,000 training images, as the pFedHN paper's code does
HOW = "Fetch them: flower-client download DATA --root {root}; or put the official files there, unpacked"


class _Source(Section):
    """What `published.toml` says of a data set."""

    description: str
    torchvision: str
    folder: str
    shape: tuple[int, int, int]
    num_classes: int
    scaling: Scaling
    class_names: tuple[str, ...] = ()
    binary: str = ""
    train_files: tuple[str, ...] = ()
    test_file: str = ""
    names_file: str = ""
    label_bytes: int = 0


_TOLD = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))
PUBLISHED = {name: _Source.model_validate_json(json.dumps(told)) for name, told in _TOLD.items()}


@dataclass(frozen=True)
class FileBlock:
    """Images in a file of records of one length, CIFAR's binary version, read on access.

    Args:
        path: The file; its size has been checked.
        label: Bytes of each record before its pixels.
        shape: `(C, H, W)` of one image.
    """

    path: Path
    count: int
    label: int
    shape: tuple[int, int, int]

    def __len__(self) -> int:
        return self.count

    def _records(self) -> AnyArray:
        # Open a new mapping for each use, because an open one keeps every page that it has touched in memory.
        return np.memmap(self.path, np.uint8, "r", 0, (self.count, self.label + int(np.prod(self.shape))))

    def labels(self) -> IntArray:
        """Return the last byte before the pixels of every record, int64 `(count,)`."""
        return np.array(self._records()[:, self.label - 1], dtype=np.int64)

    def __getitem__(self, rows: IntArray, /) -> AnyArray:
        """Return the images at `rows`, uint8 `(len(rows), C, H, W)`."""
        return np.asarray(self._records()[rows])[:, self.label :].reshape(len(rows), *self.shape)


def read_published(spec: DataSpec) -> Pool:
    """Return the data set `spec.data`, with 10,000 training images, or a fifth of fewer than 50,000, for validation."""
    source, root = PUBLISHED[spec.data], spec.folder
    how = HOW.replace("DATA", spec.data)
    try:
        whole, test, names = _read(source, spec.data, root, how)
    except DataError:
        if not spec.download:
            raise
        download(source.torchvision, root)
        whole, test, names = _read(source, spec.data, root, how)
    count, rng = min(HELD_OUT, len(whole) // 5), generator(FIXED_SEED, source.torchvision, "validation")
    train, val = whole.split(lambda strata: hold_out(strata, count, rng))
    return Pool(spec.data, train, val, test, names, source.scaling)


def _read(source: _Source, name: str, root: Path, how: str) -> tuple[Portion, Portion, tuple[str, ...]]:
    marks = [folder / first for first in source.train_files[:1] for folder in (root / source.binary, root)]
    if mark := next((mark for mark in marks if mark.exists()), None):
        return _from_records(source, mark.parent, how)
    if not (root / source.folder).exists():
        raise missing(name, [*marks, root / source.folder], root, how)
    return _through_torchvision(source, root, how)


def _through_torchvision(source: _Source, root: Path, how: str) -> tuple[Portion, Portion, tuple[str, ...]]:
    # CIFAR's Python version is a pickle. torchvision compares its MD5 with the publisher's before it unpickles it.
    kind, folder = getattr(need("torchvision.datasets", "torchvision"), source.torchvision), root / source.folder
    try:
        parts = [kind(str(root), train=train) for train in (True, False)]
    except Exception as error:  # torchvision passes on whatever its parsers raise
        found = f"{describe(error)}. {how.format(root=root)}"
        raise DataError(f"{folder}: expected the files of {source.torchvision}, whole, found {found}") from error
    if wrong := [tuple(p.data.shape[1:3]) for p in parts if p.data.shape[1:3] != source.shape[1:]]:
        raise DataError(f"{folder}: expected images of {source.shape[1:]}, found {wrong[0]}")
    pairs = ((np.asarray(part.data), np.asarray(part.targets)) for part in parts)
    train, test = (check_pair(*pair, f"{folder} images", f"{folder} labels") for pair in pairs)
    for portion in (train, test):
        check_labels(portion.labels, source.num_classes, folder)
    return train, test, source.class_names or tuple(parts[0].classes)


def _from_records(source: _Source, folder: Path, how: str) -> tuple[Portion, Portion, tuple[str, ...]]:
    train = _records(source, [folder / name for name in source.train_files], how)
    test = _records(source, [folder / source.test_file], how)
    path = folder / source.names_file
    lines = path.read_text(encoding="utf-8", errors="replace").split() if path.is_file() else []
    return train, test, tuple(lines if len(lines) == source.num_classes else map(str, range(source.num_classes)))


def _records(source: _Source, paths: Sequence[Path], how: str) -> Portion:
    blocks = tuple(_block(path, source, how) for path in paths)
    labels = [block.labels() for block in blocks]
    for path, values in zip(paths, labels, strict=True):
        check_labels(values, source.num_classes, path)
    joined = np.concatenate(labels)
    return Portion(blocks, np.arange(len(joined), dtype=np.int64), joined)


def _block(path: Path, source: _Source, how: str) -> FileBlock:
    if not path.is_file():
        raise missing(path.name, [path], path.parent, how)
    record, size = source.label_bytes + int(np.prod(source.shape)), path.stat().st_size
    if size == 0 or size % record:
        expected = f"expected records of {record} bytes, so {max(1, size // record) * record} bytes or another multiple"
        raise DataError(f"{path}: {expected}, found {size} bytes; the file is truncated or corrupt, get it again")
    return FileBlock(path, size // record, source.label_bytes, source.shape)
