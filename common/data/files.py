"""Search, download and checks of the published files of registered data sets."""

import importlib
import os
import shutil
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyperbloom.common.data.draws import IntArray
from hyperbloom.common.data.scaling import AnyArray
from hyperbloom.common.errors import DataError

_UNREADABLE = (
    *(OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error),
    *(NotImplementedError, RuntimeError),  # a zip of an unknown version or method, or with a password
    *(SyntaxError, tokenize.TokenError, MemoryError),  # a damaged header of an array
)


def need(module: str, package: str) -> Any:
    """Import a module that only some data sets need; DataError if it is not installed."""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # torchvision's, if it is built for another torch
        raise DataError(f"this data needs {package}, which is not here ({error}): pip install {package}") from error


def missing(name: str, places: Sequence[Path], root: Path, how: str) -> DataError:
    """Return the error for a missing file; `how` says how to get it, with `{root}` for the folder of the data set."""
    looked = ", ".join(str(place) for place in places)
    return DataError(f"{name} not found; looked at {looked}. {how.format(root=root)}")


def read_arrays(path: Path) -> dict[str, AnyArray]:
    """Read the arrays of an `.npz` file, or of an `.npy` file as `x`; DataError if it is corrupt or holds pickles."""
    try:
        # Open the file here, because numpy does not close it if the content is no archive.
        with path.open("rb") as raw:
            found = np.load(raw, allow_pickle=False)
            return {"x": found} if isinstance(found, np.ndarray) else {key: found[key] for key in found.files}
    except _UNREADABLE as error:
        whole = path.suffix.lower() == ".npy" or zipfile.is_zipfile(path)
        why = error if whole else "no zip archive, or one that was cut off"
        size = path.stat().st_size
        raise DataError(f"{path}: expected a whole {path.suffix} of plain arrays, found {size} bytes: {why}") from error


def download(dataset: str, root: Path) -> None:
    """Fetch a data set with torchvision's downloader, into `root` in torchvision's layout.

    Raises:
        DataError: The publisher cannot be reached, sent something else, or `root` cannot be written.
    """
    datasets = need("torchvision.datasets", "torchvision")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as fresh:
            getattr(datasets, dataset)(fresh, train=True, download=True)
            for folder in Path(fresh).iterdir():
                if folder.is_dir():
                    _adopt(folder, root / folder.name)
    except (OSError, RuntimeError) as error:
        raise DataError(f"{dataset} could not be downloaded into {root}: {error}") from error


def _adopt(fresh: Path, target: Path) -> None:
    # Several clients on one machine may download at once. The last must not disturb files that others read.
    if not target.exists():
        try:
            fresh.rename(target)
            return
        except OSError:
            if not target.exists():
                raise
    shutil.copytree(fresh, target, dirs_exist_ok=True, copy_function=os.replace)


def check_labels(labels: IntArray, num_classes: int, path: Path) -> None:
    """Check the range of labels; DataError if a label is `num_classes` or more, so the file is corrupt."""
    wrong = np.flatnonzero(labels >= num_classes)
    if len(wrong):
        found = f"label {labels[wrong[0]]} at record {wrong[0]}"
        raise DataError(f"{path}: expected labels from 0 to {num_classes - 1}, found {found}; the file is corrupt")
