"""The schema of a table: what its columns mean. All clients of a run share one, so that their inputs mean the same.

A number becomes two inputs: `(value - mean) / std`, or 0 where it is missing, and 1 where it is missing. A category
becomes an input for each word of the schema, 1 at the one that is there, and one that is 1 where it is missing. A text
becomes the numbers of its tokens, for a pretrained network of texts; there are no other inputs beside it.
"""

import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from math import floor, log10
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from hyperbloom.common.config import Positive, Section, check
from hyperbloom.common.data.labels import as_labels
from hyperbloom.common.data.scaling import AnyArray
from hyperbloom.common.data.texts import LENGTH, token_rows
from hyperbloom.common.errors import ConfigError, DataError

Table = Mapping[str, list[str]]
"""A table's cells by column, as text; all columns have the same length."""
LONGEST_SCHEMA = 100_000
"""Most characters of a schema, which travels in one message."""

MISSING = ("", "?", "NA", "N/A", "na", "n/a", "NaN", "nan", "null", "NULL", "None")
MOST_WORDS = 50
FEW_NUMBERS = 10
FIRST_ROW = 2
"""The number of the first row, as spreadsheets count below the names of the columns."""
EQUAL = 1e-12
"""The share of the mean up to which a computed deviation of equal numbers is rounding."""
_MONTHS = "(?i:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DATE = re.compile(rf"\d{{4}}-\d\d-\d\d(?!\d)|\d\d?[./]\d\d?[./]\d\d(\d\d)?(?!\d)|\d\d?[ -]{_MONTHS}[ -]\d\d")
_GROUPED = re.compile(r"-?\d{1,3}([.,' ]\d{3})+([.,]\d+)?")  # thousands, as people write them
FARTHEST = 10.0
"""Most deviations from the mean: a cell that is further away is wrong, and would spoil all training."""


class Column(Section):
    """One column of inputs.

    Attributes:
        mean: subtracted from a number; 0 if only `std` is given.
        std: divides the difference. Without both, a number is scaled by the moments that clients disclose, if any do.
        words: what a category may be.
        missing: what stands for a missing value, beside the usual words and nothing at all.
        length: most tokens of a text.
    """

    name: str
    kind: Literal["number", "category", "text"]
    mean: Annotated[float, Field(allow_inf_nan=False)] | None = None
    std: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    words: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    length: Positive = LENGTH

    @property
    def width(self) -> int:
        """The number of inputs."""
        return self.length if self.kind == "text" else 1 + (len(self.words) if self.kind == "category" else 1)

    def encode(self, cells: list[str], where: str, backbone: str | None = None) -> AnyArray:
        """Return float32 `(N, width)`; the last input is 1 where a number or category is missing.

        Raises:
            DataError: A cell is no finite number, or none of the words; or there is no tokenizer in `backbone`.
        """
        if self.kind == "text":
            return token_rows(cells, self.length, backbone, where)
        none = {*MISSING, *map(plain, self.missing)}
        gone = np.array([cell in none for cell in cells], dtype=np.bool_)
        inputs = np.zeros((len(cells), self.width), np.float32)
        inputs[gone, -1] = 1.0
        place = {plain(word): number for number, word in enumerate(self.words)}
        mean, std = self.mean or 0.0, self.std or 1.0
        for row in np.flatnonzero(~gone).tolist():
            if self.kind == "category":
                if cells[row] not in place:
                    raise _wrong(where, row, self.name, f"one of {', '.join(self.words)}", cells[row])
                inputs[row, place[cells[row]]] = 1.0
            else:
                inputs[row, 0] = (_number(cells[row], where, row, self.name) - mean) / std
        if self.kind == "number" and (mean, std) != (0.0, 1.0):  # scaled
            inputs[:, 0].clip(-FARTHEST, FARTHEST, out=inputs[:, 0])
        return inputs


class Schema(Section):
    """What the columns of a table mean; others are not read.

    Attributes:
        label: the column to predict, or several.
        classes: the words of one label column, in the order of the classes; empty for numbers, and for several columns.
        columns: the inputs.
        owner: the column that says whose a row is, such as the hospital.
        group: the column that says which rows belong together, such as those of a patient.
    """

    label: Annotated[tuple[str, ...], Field(min_length=1)]
    classes: tuple[str, ...] = ()
    columns: Annotated[tuple[Column, ...], Field(min_length=1)]
    owner: str | None = None
    group: str | None = None

    @property
    def text(self) -> str:
        """The schema as JSON, equal for equal schemas."""
        return self.model_dump_json()

    @cached_property
    def width(self) -> int:
        """The number of inputs of a network."""
        return sum(column.width for column in self.columns)

    @cached_property
    def open(self) -> dict[str, int]:
        """The numbers without a scale, and the place of each among the inputs."""
        ends = zip(self.columns, np.cumsum([column.width for column in self.columns]).tolist(), strict=True)
        return {one.name: end - one.width for one, end in ends if one.kind == "number" and one.mean is one.std is None}

    @property
    def scales(self) -> dict[str, tuple[float | None, float | None]]:
        """The mean and the deviation of each column."""
        return {column.name: (column.mean, column.std) for column in self.columns}

    def scaled(self, scales: Mapping[str, tuple[float | None, float | None]]) -> "Schema":
        """Return the schema with the mean and the deviation that `scales` have for its columns in `open`."""
        found = {name: dict(zip(("mean", "std"), scales[name], strict=True)) for name in self.open if name in scales}
        columns = (one.model_copy(update=found.get(one.name, {})) for one in self.columns)
        return self.model_copy(update={"columns": tuple(columns)})

    @property
    def text_column(self) -> Column | None:
        """The column of texts."""
        return self.columns[0] if self.columns[0].kind == "text" else None

    def inputs(self, table: Table, where: str, backbone: str | None = None) -> AnyArray:
        """Return float32 `(N, width)`; DataError if a column is missing, or a cell is not what the schema says."""
        self._refuse_absent(table, [column.name for column in self.columns], where)
        return np.concatenate([column.encode(table[column.name], where, backbone) for column in self.columns], axis=1)

    def labels(self, table: Table, where: str) -> AnyArray:
        """Return labels, as `label_kind` takes them; DataError if a column is missing, or a cell is no label."""
        self._refuse_absent(table, self.label, where)
        return read_labels(table, self.label, self.classes, where)

    def _refuse_absent(self, table: Table, wanted: tuple[str, ...] | list[str], where: str) -> None:
        if absent := [name for name in wanted if name not in table]:
            raise DataError(f"{where}: expected a column {absent[0]!r} as in the schema, found {', '.join(table)[:99]}")


def read_schema(text: str, where: str) -> Schema:
    """Read a schema in JSON from `where`; ConfigError if it is none, or longer than `LONGEST_SCHEMA`."""
    if len(text) > LONGEST_SCHEMA:
        raise ConfigError(f"{where}: expected a schema of at most {LONGEST_SCHEMA} characters, found {len(text)}")
    schema = check(Schema, text, where)
    if len(schema.columns) > 1 and any(column.kind == "text" for column in schema.columns):
        raise ConfigError(f"{where}: expected a column of texts to be the only one, found {len(schema.columns)}")
    named = (*schema.label, *(column.name for column in schema.columns))
    lists = (named, schema.classes, *(column.words for column in schema.columns))
    twice = [each for words in lists if len(set(words)) < len(words) for each, n in Counter(words).items() if n > 1]
    if twice:
        raise ConfigError(f"{where}: expected each column and each word once, found {twice[0]!r} twice")
    return schema


def load_schema(path: Path) -> Schema:
    """Read a schema file; ConfigError if it cannot be read."""
    try:
        return read_schema(path.read_text(encoding="utf-8-sig"), str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read the schema, looked for from {Path.cwd()}: {error}") from None


def difference(ours: Schema, theirs: Schema) -> str:
    """Return in words where two schemas first differ; empty if they are equal."""
    for name in ("label", "classes", "owner", "group"):
        if getattr(ours, name) != getattr(theirs, name):
            return f"expected {name} {getattr(ours, name)}, found {getattr(theirs, name)}"
    for one, other in zip(ours.columns, theirs.columns, strict=False):
        if one != other:
            return f"expected the column {one!r}, found {other!r}"
    if len(ours.columns) != len(theirs.columns):
        return f"expected {len(ours.columns)} columns, found {len(theirs.columns)}"
    return ""


def propose(
    table: Table,
    label: tuple[str, ...],
    where: str,
    owner: str | None = None,
    group: str | None = None,
    tokens: int = 0,
) -> Schema:
    """Propose what columns mean, from their values. Columns of many words, such as names, are left out.

    If the network takes texts of at most so many `tokens`, the column with the most letters is the only one.

    Raises:
        DataError: There is no such column, or nothing to learn from.
    """
    absent = [name for name in (*label, owner, group) if name is not None and name not in table]
    if bare := [name for name in label if name in table and not set(table[name]) - {*MISSING}]:
        raise DataError(f"{where}: expected values in the column {bare[0]!r} to predict, found none")
    if absent or not label:
        raise DataError(
            f"{where}: expected the column to predict (--label of a client, data.label of a run), or of --owner or "
            f"--group, one of {', '.join(table)[:200]}; found {', '.join(absent) or 'none'}"
        )
    others = {name: cells for name, cells in table.items() if name not in (*label, owner, group)}
    if tokens and others:
        columns = [Column(name=max(others, key=lambda name: sum(map(len, others[name]))), kind="text", length=tokens)]
    else:
        columns = [column for name, cells in others.items() if (column := _propose(name, cells))]
    if not columns:
        why = ", ".join(f"{name} ({why_left_out(cells)})" for name, cells in others.items())[:300] or "none"
        raise DataError(f"{where}: expected columns beside the label with numbers or a few words, found {why}")
    return Schema(label=label, classes=propose_classes(table, label), columns=tuple(columns), owner=owner, group=group)


def propose_classes(table: Table, label: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of one label column, unless it holds many numbers; empty for several columns."""
    words = sorted({cell for cell in table[label[0]] if cell not in MISSING}, key=_order)
    numbers = [float(point) for word in words if is_number(point := word.replace(",", ".", 1))]
    many, broken = len(numbers) > FEW_NUMBERS, not all(number.is_integer() for number in numbers)
    pure = len(numbers) == len(words)  # else a cell among many numbers may be wrong, and `read_labels` says which
    return () if len(label) > 1 or (many and broken) or (pure and (many or broken)) else tuple(words)


def read_labels(table: Table, label: tuple[str, ...], classes: tuple[str, ...], where: str) -> AnyArray:
    """Return the labels in columns as `label_kind` takes them, classes or numbers; DataError if a cell is no label."""
    place = {plain(word): number for number, word in enumerate(classes)}
    for row, cell in enumerate(table[label[0]] if len(label) == 1 else ()):
        if cell not in place and (classes or cell in MISSING):
            more = ", list the word in the schema's classes, or write another in a labels.csv" if classes else ""
            what = f"a label (leave the row out{more})" if cell in MISSING else f"one of {', '.join(classes)}"
            raise _wrong(where, row, label[0], what, cell)
    if classes and len(label) == 1:
        return np.array([place[cell] for cell in table[label[0]]], dtype=np.int64)
    values = [
        [np.nan if cell in MISSING else _number(cell, where, row, name) for row, cell in enumerate(table[name])]
        for name in label
    ]
    numbers = np.array(values, dtype=np.float64).T  # (N, T)
    gaps, odd = np.argwhere(np.isnan(numbers)), np.argwhere(~np.isnan(numbers) & (numbers != 0) & (numbers != 1))
    if len(gaps) and len(odd):
        (row, column), gap = odd[0], f"row {gaps[0][0] + FIRST_ROW}, column {label[gaps[0][1]]!r} is empty"
        what = f"0, 1 or nothing ({gap}; leave out rows that lack a number)"
        raise _wrong(where, row, label[column], what, table[label[column]][row])
    return as_labels(numbers[:, 0] if len(label) == 1 else numbers, f"{where}: {', '.join(label)}")


def why_left_out(cells: list[str]) -> str:
    """Return in words why `propose` takes no column of these cells; nothing if it takes one."""
    there = [cell for cell in cells if cell not in MISSING]
    words = set(there)
    odd = [(row, cell) for row, cell in enumerate(cells, FIRST_ROW) if cell not in MISSING and not is_number(cell)]
    if there and all(map(_DATE.match, there)):
        return "dates"  # days that others have are other words
    if odd and all(is_number(cell.replace(",", ".", 1)) for cell in there):
        return "decimals with a comma; write points"
    if odd and all(_GROUPED.fullmatch(cell) for _, cell in odd):
        return f"numbers such as {odd[0][1]!r}; write 1051.5"
    if odd and 2 * len(odd) < len(there) and sum(map(is_number, words)) > FEW_NUMBERS:
        return f"{len(there) - len(odd)} of {len(there)} are numbers, row {odd[0][0]} is {odd[0][1][:80]!r}"
    if len(words) <= MOST_WORDS and odd and len(words) == len(there) > FEW_NUMBERS:
        return "another word in each row, as ids have"
    many = f"{len(words)} words such as {there[0][:20]!r}" if len(words) > MOST_WORDS else ""
    return many if there else "empty"


def left_out(table: Table, schema: Schema) -> str:
    """Return the columns that a proposed schema does not use, each with the reason; empty if there are none."""
    used = {column.name for column in schema.columns} | {*schema.label, schema.owner, schema.group}
    return ", ".join(f"{name} ({why_left_out(table[name]) or 'beside texts'})" for name in table if name not in used)


def _propose(name: str, cells: list[str]) -> Column | None:
    there = [cell for cell in cells if cell not in MISSING]
    words = sorted(set(there), key=_order)
    whole = all(is_number(word) and float(word).is_integer() for word in words)
    if all(map(is_number, words)) and not (whole and len(words) <= FEW_NUMBERS):
        numbers = np.array(there, dtype=np.float64)
        mean, std = float(numbers.mean()), divisor_of(float(numbers.mean()), float(numbers.std()))
        return Column(name=name, kind="number", mean=round(mean, 6 - floor(log10(std))), std=float(f"{std:.6g}"))
    return None if why_left_out(cells) else Column(name=name, kind="category", words=tuple(words))


def divisor_of(mean: float, std: float) -> float:
    """Return the deviation by which numbers are scaled; 1 if it is no more than rounding, because all are equal."""
    return std if std > EQUAL * abs(mean) else 1.0


def _order(word: str) -> tuple[float, str]:
    return (float(word), word) if is_number(word) else (np.inf, word)


def is_number(cell: str) -> bool:
    """Return whether a cell is a finite number."""
    try:
        return "_" not in cell and abs(float(cell)) <= 3.4028235e38  # what float32 holds
    except ValueError:
        return False


def plain(cell: str) -> str:
    """Return 1 for 1.0, which stands in a column with gaps, and 1 and 0 for true and false; other cells as they are."""
    cell = {"true": "1", "false": "0"}.get(cell.lower(), cell)  # as Parquet's
    whole, _, rest = cell.partition(".")
    return whole if rest and not rest.strip("0") and whole.removeprefix("-").isdigit() else cell


def _number(cell: str, where: str, row: int, name: str) -> float:
    if not is_number(cell):
        raise _wrong(where, row, name, "a number, or nothing if it is missing", cell)
    return float(cell)


def _wrong(where: str, row: int, name: str, expected: str, cell: str) -> DataError:
    return DataError(f"{where}: row {row + FIRST_ROW}, column {name!r}: expected {expected[:200]}, found {cell[:80]!r}")
