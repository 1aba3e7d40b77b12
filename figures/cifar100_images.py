"""CIFAR-100's binary version from a copy of the data set as images, for machines that cannot reach the publisher.

    git clone https://github.com/cyizhuo/CIFAR-100-dataset images
    python -m figures.cifar100_images images ROOT

The copy has a folder for each class in `train` and in `test`, and in it PNG images, which keep each pixel. The files
that this program writes hold them by class and by name. The publisher's order is another one, which decides what is
for validation and for which client; so a seed has other parts here than with the publisher's files.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from figures.section_5_3 import SUPERCLASSES
from hyperbloom.common.data.published import PUBLISHED
from hyperbloom.common.data.scaling import AnyArray
from hyperbloom.common.errors import DataError
from hyperbloom.common.files.storage import write_bytes

SOURCE = PUBLISHED["cifar100"]
COUNTS = {"train": 500, "test": 100}
"""Images of a class."""


def records(folder: Path, per_class: int) -> AnyArray:
    """Return the records of a part, uint8 `(100 * per_class, 2 + 3 * 32 * 32)`: superclass, class and the pixels.

    Raises:
        DataError: there are not 100 classes of `per_class` images of 32 x 32 points.
    """
    classes = sorted(path for path in folder.glob("*") if path.is_dir())
    if len(classes) != SOURCE.num_classes:
        raise DataError(f"{folder}: expected a folder for each of {SOURCE.num_classes} classes, found {len(classes)}")
    rows = []
    for label, each in enumerate(classes):
        found = sorted(each.glob("*.png"))
        if len(found) != per_class:
            raise DataError(f"{each}: expected {per_class} PNG images, found {len(found)}")
        head = np.array([int(SUPERCLASSES[label], 20), label], np.uint8)
        rows += [np.concatenate([head, _pixels(path)]) for path in found]
    return np.stack(rows)


def _pixels(path: Path) -> AnyArray:
    image = np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1)
    if image.shape != SOURCE.shape:
        raise DataError(f"{path}: expected an image of {SOURCE.shape}, found {image.shape}")
    return image.reshape(-1)


def write(images: Path, root: Path) -> Path:
    """Write the binary version into a folder of `root`, and return that folder.

    Raises:
        DataError: the images are not those of CIFAR-100 in number, classes or size.
    """
    parts = {part: records(images / part, count) for part, count in COUNTS.items()}
    folder = root / SOURCE.binary
    names = sorted(path.name for path in (images / "train").glob("*") if path.is_dir())
    write_bytes(folder / SOURCE.names_file, "".join(f"{name}\n" for name in names).encode())
    for (part, values), file in zip(parts.items(), (*SOURCE.train_files, SOURCE.test_file), strict=True):
        write_bytes(folder / file, values.tobytes())
        print(f"{part}: {len(values):,} images")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, help="folder with train/CLASS/*.png and test/CLASS/*.png")
    parser.add_argument("root", type=Path, help="folder for the data sets' files")
    given = parser.parse_args()
    print(write(given.images, given.root))
