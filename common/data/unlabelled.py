"""Inputs without labels, for predictions of a trained model and for a newcomer's descriptor."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path

import numpy as np
import torch

from hyperbloom.common.data.files import read_arrays
from hyperbloom.common.data.folder import ENDINGS, LIST, is_image, read_image
from hyperbloom.common.data.own import MEDMNIST, check_inputs
from hyperbloom.common.data.scaling import AnyArray, Scaling
from hyperbloom.common.data.schema import FIRST_ROW, MISSING, Schema, Table, is_number, plain
from hyperbloom.common.data.spec import TABLES
from hyperbloom.common.data.table import read_cells
from hyperbloom.common.errors import DataError

FILES_AT_ONCE = 256
log = logging.getLogger("hyperbloom.client")


@dataclass(frozen=True)
class Inputs:
    """A network's inputs, float32 `(N, *input_shape)`, and names: the file, and the index if there are several."""

    names: tuple[str, ...]
    values: torch.Tensor


def is_unlabelled(path: Path) -> bool:
    """Return whether a path holds inputs without labels: `.npy`, `.txt`, `.npz` without `y`, images or their folder."""
    if path.is_dir():
        entries = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
        listed = any(entry.is_dir() or entry.name == LIST for entry in entries)
        return not listed and any(is_image(entry) for entry in entries)
    if path.suffix.lower() == ".npz" and path.is_file():
        keys = (MEDMNIST.get(key, key) for key in read_arrays(path))
        return not any(key == "y" or key.startswith("y_") for key in keys)
    return path.suffix.lower() in (".npy", ".txt") or is_image(path)


def read_inputs(
    paths: Iterable[Path],
    input_shape: tuple[int, ...],
    scaling: Scaling,
    schema: Schema | None = None,
    tokenizer: str | None = None,
) -> Iterator[Inputs]:
    """Yield the inputs in images, `.npy`, `.npz` (key `x`), tables, `.txt` and folders of images, in batches.

    A line of `.txt` is a text. Images are converted to the size and the channels of the network, divided by 255 and
    normalised. Bytes in arrays are scaled as in training, by `scaling`. Floats in arrays are inputs of the network
    without further scaling. `schema` says what the columns of tables mean (None: the model takes none), and `tokenizer`
    is the folder with that of a model of texts.

    Raises:
        DataError: a file is missing, unreadable or of another shape.
    """
    others = (".npy", ".npz", ".txt", *TABLES)
    for images_only, some in groupby(_files(paths), lambda path: path.suffix.lower() not in others):
        if images_only:
            while images := list(islice(some, FILES_AT_ONCE)):
                stored = np.stack([_image(path, input_shape) for path in images])
                yield Inputs(tuple(map(str, images)), replace(scaling, divisor=255.0).apply(stored))
        else:
            for path in some:
                rows = path.suffix.lower() in (".txt", *TABLES)
                yield _table(path, schema, tokenizer) if rows else _array(path, input_shape, scaling)


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            found = sorted(entry for entry in path.rglob("*") if is_image(entry))
            if not found:
                raise DataError(f"{path}: expected images ({', '.join(ENDINGS)}), found none")
            yield from found
        elif path.is_file():
            yield path
        else:
            raise DataError(f"{path}: expected an image, .npy, .npz, .txt, a table or a folder of images, found none")


def _image(path: Path, input_shape: tuple[int, ...]) -> AnyArray:
    """Return uint8 `(C, H, W)`."""
    if len(input_shape) != 3 or input_shape[0] not in (1, 3):
        raise DataError(f"{path}: the model takes inputs of shape {input_shape}, no images; give it .npy or .npz")
    channels, height, width = input_shape
    return read_image(path, "L" if channels == 1 else "RGB", (width, height))


def _array(path: Path, input_shape: tuple[int, ...], scaling: Scaling) -> Inputs:
    array = _load(path)
    height_first = (*input_shape[1:], input_shape[0])
    if array.shape == input_shape or (array.shape == height_first and array.dtype == np.uint8):
        array = array[None]
    stored = check_inputs(array, str(path))
    if stored.shape[1:] != input_shape:
        raise DataError(f"{path}: expected inputs of shape {input_shape} as the model, found {stored.shape[1:]}")
    values = (scaling.of_bytes if stored.dtype == np.uint8 else Scaling(1.0)).apply(stored)
    names = [str(path)] if len(values) == 1 else [f"{path}[{index}]" for index in range(len(values))]
    return Inputs(tuple(names), values)


def _table(path: Path, schema: Schema | None, tokenizer: str | None) -> Inputs:
    texts, is_text = schema.text_column if schema else None, path.suffix.lower() == ".txt"
    if schema is None or (is_text and texts is None):
        what = "texts" if is_text else "tables"
        raise DataError(f"{path}: the model was not trained on {what}; give it images, .npy or .npz")
    table = {texts.name: _lines(path)} if texts and is_text else _known(read_cells(path), schema, path)
    values, first = torch.from_numpy(schema.inputs(table, str(path), tokenizer)), 1 if is_text else FIRST_ROW
    return Inputs(tuple(f"{path}:{row + first}" for row in range(len(values))), values)


def _known(table: Table, schema: Schema, path: Path) -> Table:
    """Return the cells without words that the model has never seen, or that are no numbers; the log has counts."""
    known = dict(table)
    for column in (one for one in schema.columns if one.kind != "text" and one.name in table):
        cells, words = table[column.name], {*map(plain, (*column.words, *column.missing)), *MISSING}
        odd = {cell for cell in {*cells} - words if column.kind == "category" or not is_number(cell)}
        if strange := [cell for cell in cells if cell in odd]:
            what = "no numbers" if column.kind == "number" else "none of the schema's words"
            found = f"{len(strange)} of {len(cells)} cells, such as {strange[0][:80]!r}, are {what}"
            log.warning("%s: column %r: %s; taken as missing", path, column.name, found)
            known[column.name] = ["" if cell in odd else cell for cell in cells]
    return known


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected a text in UTF-8, found: {error}") from None


def _load(path: Path) -> AnyArray:
    arrays = read_arrays(path)
    if "x" in arrays:
        return arrays["x"]
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    raise DataError(f"{path}: expected an array named x, found {', '.join(sorted(arrays)) or 'none'}")
