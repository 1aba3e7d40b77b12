"""Tables in CSV or Parquet: users' own, and the embedded `heart-disease`.

`heart-disease` are 920 patients of four hospitals, 13 attributes with their gaps: A. Janosi, W. Steinbrunn,
M. Pfisterer, R. Detrano, "Heart Disease", UCI Machine Learning Repository, 1989, https://doi.org/10.24432/C52P4X,
CC BY 4.0. We predict whether there is a disease (`num` above 0). A cholesterol, blood pressure or `thal` of 0 is
missing.
"""

import csv
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from hyperbloom.common.data.draws import FIXED_SEED
from hyperbloom.common.data.files import need
from hyperbloom.common.data.own import build_pool
from hyperbloom.common.data.pool import Pool, Portion
from hyperbloom.common.data.scaling import AnyArray
from hyperbloom.common.data.schema import FIRST_ROW, MISSING, Schema, Table, left_out, load_schema, plain, propose
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.data.texts import most_tokens
from hyperbloom.common.errors import DataError

log = logging.getLogger("hyperbloom.client")

_HEART = Path(__file__).with_name("heart_disease.csv")


def read_table(spec: DataSpec) -> Pool:
    """Read the file `spec.data` by the schema `spec.schema`, or by one that is proposed from it."""
    table = read_cells(Path(spec.data))
    schema = schema_of(spec, table)
    units = {f"{kind}s": getattr(schema, kind) or getattr(spec, kind) for kind in ("owner", "group")}
    return _pool(spec.data, table, schema, units, spec.seed, spec.backbone)


def read_heart(spec: DataSpec) -> Pool:
    """Return the patients, split 70 / 15 / 15 in the same way in every run; their owners are the hospitals."""
    table = dict(read_cells(_HEART))
    table["num"] = ["healthy" if cell == "0" else "disease" for cell in table["num"]]
    schema = load_schema(_HEART.with_suffix(".json"))
    return _pool(spec.data, table, schema, {"owners": schema.owner}, FIXED_SEED)


def schema_of(spec: DataSpec, table: Table) -> Schema:
    """Return the schema that `spec` names, or one that is proposed for the table.

    Raises:
        DataError: --label, --owner or --group is not the schema's, or is no column.
        ConfigError: The schema cannot be read.
    """
    label = tuple(dict.fromkeys(name.strip() for name in (spec.label or "").split(",") if name.strip()))
    if spec.schema is None:
        proposed = propose(table, label, spec.data, spec.owner, spec.group, most_tokens(spec.backbone))
        if left := left_out(table, proposed):
            log.warning("%s: without a schema, left out: %s", spec.data, left)
        return proposed
    schema = load_schema(spec.schema)
    theirs = {"label": ",".join(schema.label), "owner": schema.owner, "group": schema.group}
    for kind, own in (("label", ",".join(label)), ("owner", spec.owner), ("group", spec.group)):
        if own and theirs[kind] and own != theirs[kind]:
            raise DataError(f"--{kind}: expected {theirs[kind]} as in {spec.schema}, found {own}")
    return schema


def _pool(
    name: str, table: Table, schema: Schema, units: dict[str, str | None], seed: int, backbone: str | None = None
) -> Pool:
    whole = Portion.of(schema.inputs(table, name, backbone), schema.labels(table, name))
    cells = units_of(table, {kind: column for kind, column in units.items() if column}, name)
    return replace(build_pool(name, {name: whole}, seed, schema.classes or schema.label, cells), schema=schema)


def units_of(table: Table, columns: Mapping[str, str], name: str) -> dict[str, list[AnyArray]]:
    """Return the cells of the columns of owners and groups, by kind; DataError if a column or a cell is missing."""
    if absent := [column for column in columns.values() if column not in table]:
        raise DataError(f"{name}: expected a column {absent[0]!r} of owners or groups, found {', '.join(table)[:200]}")
    for column in columns.values():
        if empty := [row + FIRST_ROW for row, cell in enumerate(table[column]) if cell in MISSING]:
            raise DataError(f"{name}: row {empty[0]}, column {column!r}: expected whose the row is, found nothing")
    return {kind: [np.array(table[column])] for kind, column in columns.items()}


def read_cells(path: Path) -> Table:
    """Read all cells of a CSV or Parquet file as stripped text, by column; DataError if it is no table with rows."""
    path = path.expanduser()
    if not path.is_file():
        raise DataError(f"{path}: expected a table, found none of this name; it is looked for from {Path.cwd()}")
    columns, rows = _parquet(path) if path.suffix.lower() == ".parquet" else _csv(path)
    if columns and not columns[-1] and not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]  # commas at the ends of all lines
    if columns and not all(columns):
        found = f"none for column {1 + columns.index('')}"
        raise DataError(f"{path}: expected a name for each column, found {found} (with pandas, write index=False)")
    if not rows or len(set(columns)) < len(columns):
        found = f"{len(rows)} rows below {', '.join(columns)[:200] or 'no names'}"
        raise DataError(f"{path}: expected rows below a different name for each column, found {found}")
    return {name: [plain(row[place]) for row in rows] for place, name in enumerate(columns)}


def _csv(path: Path) -> tuple[list[str], list[list[str]]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            bare = re.sub('"[^"]*"', "", first)
            delimiter = max(",;\t", key=bare.count)
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            numbered = ((reader.line_num, row) for row in reader if row)
            rows = {line: [cell.strip() for cell in row] for line, row in numbered}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: expected cells between commas, semicolons or tabs in UTF-8, found: {error}") from None
    columns, *cells = list(rows.values()) or [[]]
    odd = next((line for line, row in rows.items() if len(row) != len(columns)), None)
    if odd is not None:
        found = f"{len(rows[odd])} in line {odd} (cells end at {delimiter!r}, which the first line has most often)"
        raise DataError(f"{path}: expected {len(columns)} cells in each line, as there are names, found {found}")
    return columns, cells


def _parquet(path: Path) -> tuple[list[str], list[list[str]]]:
    parquet = need("pyarrow.parquet", "pyarrow")
    try:
        table = parquet.read_table(path)
        columns = [[_text(value) for value in column.to_pylist()] for column in table.columns]
        names = [re.sub("^__index_level_.*", "", str(name).strip()) for name in table.column_names]  # pandas' index
    except (OSError, ValueError, TypeError, KeyError, NotImplementedError, OverflowError, MemoryError) as error:
        raise DataError(f"{path}: expected a Parquet table, found: {' '.join(str(error).split())[:200]}") from None
    return names, [list(row) for row in zip(*columns, strict=True)]


def _text(value: object) -> str:
    """Return a cell as it would stand in a CSV file, so that one schema fits both."""
    if value is None:
        return ""
    if isinstance(value, bool | int | float):
        return str(int(value)) if float(value).is_integer() else repr(value)
    if isinstance(value, list | dict | bytes):
        raise TypeError(f"a {type(value).__name__} in a cell")
    return str(value).strip()
