"""CIFAR-10 and CIFAR-100 from the official binary version, or from the Python version through torchvision.

A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009,
https://www.cs.toronto.edu/~kriz/cifar.html
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyperbloom.common.data.files import check_labels, download, first_existing, missing, need, with_validation
from hyperbloom.common.data.pool import ArrayBlock, FileBlock, Pool, Portion
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.errors import DataError

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
HOW = "Fetch them: flower-client download DATA --root {root}; or put the official binary version's files there."


@dataclass(frozen=True)
class _Family:
    """The differences between the two data sets."""

    torchvision: str  # the class's name there
    binary: str  # the folder of the binary version
    python: str  # the folder of the Python version
    train_files: tuple[str, ...]
    test_file: str
    names_file: str
    label_bytes: int  # per record; the last one is the label, the first of two a coarse class
    num_classes: int
    scaling: Scaling


FAMILIES = {
    "cifar10": _Family(
        "CIFAR10",
        "cifar-10-batches-bin",
        "cifar-10-batches-py",
        tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        "test_batch.bin",
        "batches.meta.txt",
        1,
        10,
        Scaling(255.0, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    ),
    "cifar100": _Family(
        "CIFAR100",
        "cifar-100-binary",
        "cifar-100-python",
        ("train.bin",),
        "test.bin",
        "fine_label_names.txt",
        2,
        100,
        Scaling(255.0, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    ),
}


def read_cifar(spec: DataSpec) -> Pool:
    """Return CIFAR-10 or CIFAR-100, 3 x 32 x 32 in ten or 100 classes."""
    family, root = FAMILIES[spec.data], spec.folder
    python = root / family.python
    marks = [folder / family.train_files[0] for folder in (root / family.binary, root)]
    mark = first_existing(marks)
    if mark is None and not python.exists() and spec.download:
        download(family.torchvision, root)
    if mark is None and not python.exists():
        raise missing(family.train_files[0], [*marks, python], root, HOW.replace("DATA", spec.data))
    whole, test, names = _python(family, root) if mark is None else _binary(family, mark.parent)
    train, val = with_validation(whole, family.torchvision)
    return Pool(spec.data, train, val, test, names, family.scaling)


def _binary(family: _Family, folder: Path) -> tuple[Portion, Portion, tuple[str, ...]]:
    train = _records(family, [folder / name for name in family.train_files])
    test = _records(family, [folder / family.test_file])
    return train, test, _names(folder / family.names_file, family.num_classes)


def _records(family: _Family, paths: Sequence[Path]) -> Portion:
    blocks = tuple(_block(path, family.label_bytes) for path in paths)
    labels = [block.labels(family.label_bytes - 1) for block in blocks]
    for path, values in zip(paths, labels, strict=True):
        check_labels(values, family.num_classes, path)
    joined = np.concatenate(labels)
    return Portion(blocks, np.arange(len(joined), dtype=np.int64), joined)


def _block(path: Path, label_bytes: int) -> FileBlock:
    if not path.is_file():
        raise missing(path.name, [path], path.parent, HOW)
    record, size = label_bytes + PIXELS, path.stat().st_size
    if size == 0 or size % record:
        expected = f"expected records of {record} bytes, so {max(1, size // record) * record} bytes or another multiple"
        raise DataError(f"{path}: {expected}, found {size} bytes; the file is truncated or corrupt, get it again")
    return FileBlock(path, size // record, header=0, label=label_bytes, shape=SHAPE)


def _names(path: Path, num_classes: int) -> tuple[str, ...]:
    lines = path.read_text(encoding="utf-8", errors="replace").split() if path.is_file() else []
    return tuple(lines) if len(lines) == num_classes else tuple(str(number) for number in range(num_classes))


def _python(family: _Family, root: Path) -> tuple[Portion, Portion, tuple[str, ...]]:
    # The Python version is a pickle. torchvision compares its MD5 with the publisher's before it unpickles it.
    source = getattr(need("torchvision.datasets", "torchvision"), family.torchvision)
    try:
        parts = [source(str(root), train=train) for train in (True, False)]
    except (OSError, RuntimeError) as error:
        what = f"{root / family.python}: expected torchvision's verified copy of {family.torchvision}"
        raise DataError(f"{what}, found: {error}. Remove it and run flower-client download") from error
    train, test = (
        Portion.of(ArrayBlock(part.data.transpose(0, 3, 1, 2)), np.asarray(part.targets, np.int64)) for part in parts
    )
    return train, test, tuple(parts[0].classes)
