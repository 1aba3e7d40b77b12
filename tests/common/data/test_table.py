"""Tables: what their columns mean, what is refused, and the patients of four hospitals."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hyperbloom.common.data import DataSpec, load_client_data
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.data.schema import (
    FARTHEST,
    FEW_NUMBERS,
    LONGEST_SCHEMA,
    Schema,
    difference,
    is_number,
    load_schema,
    propose,
    read_schema,
    why_left_out,
)
from hyperbloom.common.data.table import read_cells
from hyperbloom.common.data.unlabelled import read_inputs
from hyperbloom.common.errors import ConfigError, DataError, HyperbloomError

ROWS = [
    {"age": "50", "dose": "1.5", "colour": "red", "name": "a1", "ward": "north", "patient": "p", "ill": "yes"},
    {"age": "", "dose": "2.5", "colour": "?", "name": "b2", "ward": "south", "patient": "q", "ill": "no"},
    {"age": "70", "dose": "NA", "colour": "blue", "name": "c3", "ward": "north", "patient": "r", "ill": "no"},
]
SCHEMA: dict[str, Any] = {
    "label": ["ill"],
    "classes": ["no", "yes"],
    "columns": [
        {"name": "age", "kind": "number", "mean": 60.0, "std": 10.0},
        {"name": "colour", "kind": "category", "words": ["blue", "red"]},
    ],
}
HEART = Path(__file__).parents[3] / "common" / "data" / "heart_disease.csv"


def write(path: Path, rows: list[dict[str, str]]) -> str:
    """Write a CSV file and return its name."""
    with (path / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path / "table.csv")


def schema_file(path: Path, **changes: Any) -> Path:
    """Write a schema and return its path."""
    (path / "schema.json").write_text(json.dumps(SCHEMA | changes))
    return path / "schema.json"


def test_a_schema_turns_numbers_words_and_gaps_into_inputs(tmp_path: Path) -> None:
    schema = load_schema(schema_file(tmp_path))
    table = read_cells(Path(write(tmp_path, ROWS)))
    expected = [[-1, 0, 0, 1, 0], [0, 1, 0, 0, 1], [1, 0, 1, 0, 0]]  # age, its gap, blue, red, their gap
    assert np.array_equal(schema.inputs(table, "t"), np.array(expected, np.float32))
    assert schema.labels(table, "t").tolist() == [1, 0, 0]


@pytest.mark.parametrize("words", [["0", "1"], ["False", "True"]])
@pytest.mark.parametrize("cells", [["1", "0"], ["True", "False"], ["true", "FALSE"]])
def test_true_and_false_are_one_and_zero_in_every_table(tmp_path: Path, words: list[str], cells: list[str]) -> None:
    column = {"name": "smoker", "kind": "category", "words": words}
    schema = load_schema(schema_file(tmp_path, classes=words, columns=[column]))
    table = read_cells(Path(write(tmp_path, [{"smoker": cell, "ill": cell, "age": "1"} for cell in cells])))
    assert schema.inputs(table, "t")[:, :2].tolist() == [[0, 1], [1, 0]]
    assert schema.labels(table, "t").tolist() == [1, 0]
    several = load_schema(
        schema_file(
            tmp_path,
            label=["ill", "smoker"],
            classes=["ill", "smoker"],
            columns=[{"name": "age", "kind": "number", "mean": 60.0, "std": 10.0}],
        )
    )
    assert several.labels(table, "t").tolist() == [[1, 1], [0, 0]]


def test_one_wrong_cell_does_not_outweigh_all_others(tmp_path: Path) -> None:
    """Without a scale nothing is known of what is far away."""
    ages = {"age": ["60", "1e14", "-5e9", ""]}
    column = {"name": "age", "kind": "number", "mean": 60.0, "std": 10.0}
    schema = load_schema(schema_file(tmp_path, columns=[column]))
    assert schema.inputs(ages, "t").tolist() == [[0, 0], [FARTHEST, 0], [-FARTHEST, 0], [0, 1]]
    for scale in ({}, {"std": 1.0}, {"mean": 0.0, "std": 1.0}):
        bare = load_schema(schema_file(tmp_path, columns=[{"name": "age", "kind": "number", **scale}]))
        assert bare.inputs({"age": ["60"]}, "t").tolist() == [[60, 0]]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_cells_stand_between_commas_semicolons_or_tabs(tmp_path: Path, delimiter: str) -> None:
    (tmp_path / "t.csv").write_text(delimiter.join(["age", "a long name"]) + "\n" + delimiter.join(["60", "x"]) + "\n")
    assert read_cells(tmp_path / "t.csv") == {"age": ["60"], "a long name": ["x"]}


def test_a_table_may_begin_with_the_mark_that_spreadsheets_write(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("age,ill\n60,no\n", encoding="utf-8-sig")
    assert read_cells(tmp_path / "t.csv") == {"age": ["60"], "ill": ["no"]}


def test_empty_lines_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x,y\n\n1,2\n\n\n3,4\n\n")
    assert read_cells(tmp_path / "t.csv") == {"x": ["1", "3"], "y": ["2", "4"]}


def test_a_name_in_quotes_says_nothing_of_what_stands_between_cells(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('"dose; mg; ml",age\n5,60\n')
    assert read_cells(tmp_path / "t.csv") == {"dose; mg; ml": ["5"], "age": ["60"]}


def test_cells_end_where_the_first_line_says_most_often(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("pressure, bar;age;x\n3.5;60;1\n")
    assert read_cells(tmp_path / "t.csv") == {"pressure, bar": ["3.5"], "age": ["60"], "x": ["1"]}
    (tmp_path / "t.csv").write_text("pressure, bar, mean;age\n3.5;60\n")
    with pytest.raises(DataError, match=r"found 1 in line 2 .cells end at ',', which the first line has most often.$"):
        read_cells(tmp_path / "t.csv")


@pytest.mark.parametrize("name", ["T.CSV", "t.tsv", "t.TSV"])
def test_the_ending_of_a_table_in_any_case(tmp_path: Path, name: str) -> None:
    rows = "".join(f"{row / 2}\t{'ab'[row % 2]}\n" for row in range(30))
    (tmp_path / name).write_text(f"x\ty\n{rows}")
    data = load_client_data(DataSpec(str(tmp_path / name), label="y"))
    assert data.schema is not None and data.class_names == ("a", "b")
    (inputs,) = read_inputs([tmp_path / name], (2,), data.scaling, data.schema)
    assert len(inputs.values) == 30


def test_a_whole_number_is_the_same_word_with_and_without_decimals(tmp_path: Path) -> None:
    """Where a cell is missing, pandas writes the others of its column with decimals."""
    (tmp_path / "a.csv").write_text("line,ill\n" + "1.0,0.0\n2.0,1.0\n,1.0\n" * 10)
    (tmp_path / "b.csv").write_text("line,ill\n" + "1,0\n2,1\n2,1\n" * 10)
    with_gap, whole = (propose(read_cells(tmp_path / f"{name}.csv"), ("ill",), "t") for name in ("a", "b"))
    assert with_gap == whole and whole.classes == ("0", "1") and whole.columns[0].words == ("1", "2")
    old_line = whole.columns[0].model_copy(update={"words": ("1.0", "2.0")})
    old = whole.model_copy(update={"classes": ("0.0", "1.0"), "columns": (old_line,)})
    for name in ("a", "b"):
        table = read_cells(tmp_path / f"{name}.csv")
        assert old.inputs(table, "t").tolist() == whole.inputs(table, "t").tolist()
        assert old.labels(table, "t").tolist() == whole.labels(table, "t").tolist() == [0, 1, 1] * 10
    gap = old_line.model_copy(update={"words": ("2.0",), "missing": ("1.0",)})
    assert gap.encode(["1", "2"], "t").tolist() == [[0, 1], [1, 0]]
    (tmp_path / "c.csv").write_text("zip\n01.0\n007\n1.50\n-3.00\n1.\n")
    assert read_cells(tmp_path / "c.csv") == {"zip": ["01", "007", "1.50", "-3", "1."]}


def test_a_proposal_names_what_it_leaves_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.csv").write_text("x;temp;ill\n" + "".join(f"{n / 2};{n},5;{n % 2}\n" for n in range(30)))
    load_client_data(DataSpec(str(tmp_path / "t.csv"), label="ill"))
    assert caplog.messages == [
        f"{tmp_path / 't.csv'}: without a schema, left out: temp (decimals with a comma; write points)"
    ]


def test_a_prediction_takes_words_that_it_does_not_know_for_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schema = load_schema(schema_file(tmp_path))
    (tmp_path / "new.csv").write_text("age,colour\n60,red\n60,green\nold,\n60,mauve\n")
    (inputs,) = read_inputs([tmp_path / "new.csv"], (schema.width,), Scaling(1.0), schema)
    none = [0, 0, 0, 0, 1]
    assert inputs.values.tolist() == [[0, 0, 0, 1, 0], none, [0, 1, *none[2:]], none]
    number, told = caplog.messages
    assert number.endswith("column 'age': 1 of 4 cells, such as 'old', are no numbers; taken as missing")
    assert told.endswith(
        "column 'colour': 2 of 4 cells, such as 'green', are none of the schema's words; taken as missing"
    )


def test_a_quote_that_is_not_closed_takes_no_rows_with_it(tmp_path: Path) -> None:
    rows = ["x,y", *(f'"{row} inch,a' if row in (4, 34) else f"{row},b" for row in range(40))]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    with pytest.raises(
        DataError, match="expected cells between commas, semicolons or tabs in UTF-8, found: ',' expected"
    ):
        read_cells(tmp_path / "t.csv")


def test_names_of_classes_can_be_printed(tmp_path: Path) -> None:
    """Spreadsheets have spaces that do not break, and a model folder with such names would not be read."""
    (tmp_path / "t.csv").write_text("x,y\n" + "".join(f"{row}.5,grade\xa0{'I' * (1 + row % 2)}\n" for row in range(30)))
    assert load_client_data(DataSpec(str(tmp_path / "t.csv"), label="y")).class_names == ("grade I", "grade II")


def test_what_else_is_missing_is_said_by_the_schema(tmp_path: Path) -> None:
    column = {"name": "age", "kind": "number", "mean": 60.0, "std": 10.0, "missing": ["50"]}
    schema = load_schema(schema_file(tmp_path, columns=[column]))
    assert schema.inputs(read_cells(Path(write(tmp_path, ROWS))), "t").tolist() == [[0, 1], [0, 1], [1, 0]]


def test_a_schema_may_begin_with_the_mark_that_some_editors_write(tmp_path: Path) -> None:
    path = schema_file(tmp_path)
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert load_schema(path).label == ("ill",)


def test_a_proposal_tells_numbers_from_words_and_leaves_names_out() -> None:
    table = {
        "x": [str(number / 2) for number in range(100)],
        "kind": ["1", "2"] * 50,
        "name": [f"n{number}" for number in range(100)],
        "empty": [""] * 100,
        "y": ["no", "yes"] * 50,
    }
    proposed = propose(table, ("y",), "t")
    assert [(column.name, column.kind, column.words) for column in proposed.columns] == [
        ("x", "number", ()),
        ("kind", "category", ("1", "2")),
    ]
    assert (proposed.columns[0].mean, proposed.columns[0].std) == pytest.approx(
        (24.75, np.std(np.arange(100) / 2)), 1e-5
    )
    assert (proposed.classes, proposed.width) == (("no", "yes"), 5)
    assert propose(table, ("x",), "t").classes == ()
    assert read_schema(proposed.text, "t") == proposed


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ([f"n{number}" for number in range(60)], "60 words such as 'n0'"),
        ([f"P{number}" for number in range(40)], "another word in each row, as ids have"),
        ([f"2026-01-{day:02}" for day in range(1, 31)], "dates"),
        ([f"2026-01-{day:02}T10:00:00" for day in range(1, 31)], "dates"),
        ([f"{day:02}.05.2026" for day in range(1, 31)], "dates"),
        ([f"3/{day}/26" for day in range(1, 31)], "dates"),
        ([f"{day} Mar 2026" for day in range(1, 31)], "dates"),
        ([f"{number},5" for number in range(60)], "decimals with a comma; write points"),
        ([f"{number},5" for number in range(20)], "decimals with a comma; write points"),
        ([f"{number},051.5" for number in range(1, 20)], "numbers such as '1,051.5'; write 1051.5"),
        ([f"1.{number:03},0" for number in range(60)], "numbers such as '1.000,0'; write 1051.5"),
        ([*map(str, range(58)), "", "inf"], "58 of 59 are numbers, row 61 is 'inf'"),
        ([*map(str, range(20)), "unknown"], "20 of 21 are numbers, row 22 is 'unknown'"),
        ([""] * 60, "empty"),
    ],
)
def test_a_column_that_no_proposal_takes_has_a_reason(cells: list[str], why: str) -> None:
    kept = [str(number / 2) for number in range(len(cells))]
    proposed = propose({"x": kept, "c": cells, "y": kept}, ("y",), "t")
    assert ([column.name for column in proposed.columns], why_left_out(cells)) == (["x"], why)


@pytest.mark.parametrize(
    "cells",
    [["0", "1", "2", "3", "4 or more"], ["1", "2"], [f"{number}" for number in range(10)] + ["A", "B"], ["2.5", "low"]],
)
def test_few_numbers_beside_words_are_words(cells: list[str]) -> None:
    kept = [str(number / 2) for number in range(4 * len(cells))]
    assert set(propose({"x": kept, "c": 4 * cells, "y": 4 * cells}, ("y",), "t").classes) == set(cells)
    if len(cells) <= FEW_NUMBERS:
        assert why_left_out(4 * cells) == ""


@pytest.mark.parametrize(
    "cells",
    [
        [f"ward {number}" for number in range(FEW_NUMBERS)],
        [*map(str, range(20)), *(f"E{number}" for number in range(20))],
    ],
)
def test_words_of_few_rows_and_codes_among_which_some_are_numbers_are_words(cells: list[str]) -> None:
    assert why_left_out(cells if len(cells) <= FEW_NUMBERS else 2 * cells) == ""


@pytest.mark.filterwarnings("error")
def test_what_float32_cannot_hold_is_no_number() -> None:
    cells = ("3.4e38", "-3.4e38", "4e38", "-4e38", "1e999", "nan", "1_0")
    assert [is_number(cell) for cell in cells] == [True, True, False, False, False, False, False]


@pytest.mark.parametrize(("odd", "found"), [("2", "'2'"), ("0.5", "'0.5'")])
def test_an_empty_cell_beside_numbers_to_predict_names_both_places(odd: str, found: str, tmp_path: Path) -> None:
    rows = [{"age": str(number), "a": "01"[number % 2], "b": "10"[number % 2]} for number in range(30)]
    rows[4] |= {"a": ""}
    rows[20] |= {"b": odd}
    why = (
        r"row 22, column 'b': expected 0, 1 or nothing \(row 6, column 'a' is empty; leave out rows that lack a number"
    )
    with pytest.raises(DataError, match=rf"{why}\), found {found}$"):
        load_client_data(DataSpec(write(tmp_path, rows), label="a,b"))


@pytest.mark.parametrize("odd", ["high", "inf", ""])
def test_a_cell_among_many_numbers_to_predict_is_no_class(odd: str, tmp_path: Path) -> None:
    """One such cell made a class of each number."""
    rows = [{"age": str(number), "level": str(number / 2)} for number in range(30)]
    name = write(tmp_path, [*rows, {"age": "30", "level": odd}])
    with pytest.raises(
        DataError, match=rf"row 32, column 'level': expected a (number|label .leave the row out).*, found '{odd}'$"
    ):
        load_client_data(DataSpec(name, label="level"))


def test_a_summary_names_the_columns_that_are_read(tmp_path: Path) -> None:
    """Texts without a tokenizer are left out, and a number for each row is all that stays."""
    rows = [{"id": str(row), "said": f"words {row}", "ill": ("no", "yes")[row % 2]} for row in range(60)]
    assert "; inputs (2,) of id; " in load_client_data(DataSpec(write(tmp_path, rows), label="ill")).summary


def test_it_is_said_why_a_table_has_no_inputs() -> None:
    cells = [f"{number},5" for number in range(20)]
    with pytest.raises(DataError, match=r"a few words, found dose .decimals with a comma; write points.$"):
        propose({"dose": cells, "y": ["a", "b"] * 10}, ("y",), "t")


def test_a_label_column_without_values_is_named() -> None:
    with pytest.raises(DataError, match="t: expected values in the column 'y' to predict, found none"):
        propose({"x": ["1", "2"], "y": ["", "NA"]}, ("y",), "t")


@pytest.mark.parametrize("values", [[-0.13172], [12345678.9], [1.7e9, 1.7e9 + 0.5, 1.7e9 + 1]])
def test_a_proposal_takes_no_rounding_for_a_deviation_nor_for_an_offset(values: list[float]) -> None:
    table = {"x": list(map(repr, values)) * 200, "y": ["no", "yes"] * (100 * len(values))}
    schema, scale = propose(table, ("y",), "t"), np.std(values) or 1.0
    expected = (np.array(values) - np.mean(values)) / scale
    assert schema.inputs(table, "t")[: len(values), 0] == pytest.approx(expected, abs=1e-4)
    assert schema.columns[0].std == pytest.approx(scale, 1e-5)


@pytest.mark.parametrize(
    ("columns", "kind", "outputs"),
    [
        (["class"], "classification", 3),
        (["class", "class"], "classification", 3),  # said twice
        (["dose"], "regression", 1),
        (["a", "b"], "multilabel", 2),
        (["dose", "a"], "regression", 2),
    ],
)
def test_the_label_columns_say_what_the_task_is(tmp_path: Path, columns: list[str], kind: str, outputs: int) -> None:
    rows = [
        {
            "z": str(i / 3),
            "class": "xyz"[i % 3],
            "dose": str(i / 7),
            "a": str(i % 2),
            "b": "" if kind == "multilabel" and i == 5 else "1",
        }
        for i in range(60)
    ]
    data = load_client_data(DataSpec(write(tmp_path, rows), label=",".join(columns)))
    assert (data.kind, data.num_classes) == (kind, outputs)
    assert data.class_names == (("x", "y", "z") if kind == "classification" else tuple(columns))
    assert data.whole.labels.isnan().sum() == (1 if kind == "multilabel" else 0)


def test_groups_and_owners_are_columns(tmp_path: Path) -> None:
    rows = [{"z": str(i / 3), "ward": "ns"[i // 40], "patient": str(i // 2), "ill": str(i % 2)} for i in range(80)]
    spec = {"data": write(tmp_path, rows), "label": "ill", "owner": "ward", "group": "patient", "split": "owner"}
    data = load_client_data(DataSpec(**spec, partition=1, partitions=2))  # type: ignore[arg-type]
    z = [
        part.inputs[:, 0] * np.std(np.arange(80) / 3) + np.mean(np.arange(80) / 3)
        for part in (data.train, data.val, data.test)
    ]
    patients = [{round(float(value) * 3) // 2 for value in part} for part in z]
    assert set().union(*patients) == set(range(20, 40))
    assert sum(map(len, patients)) == 20
    for part, values in zip((data.train, data.val, data.test), z, strict=True):
        kept = part.to("cpu").under(part.task).groups
        named = [round(float(value) * 3) // 2 for value in values]
        assert kept is not None and len(kept) == len(named)
        assert len({*kept.tolist()}) == len({*named}) == len({*zip(kept.tolist(), named, strict=True)}), "one to one"
    assert data.input_shape == (2,)


def test_parquet_is_read_as_the_same_table(tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    table = {
        "age": [50, None, 70],
        "dose": [1.5, 2.0, None],
        "colour": ["red", None, "blue"],
        "ill": [True, False, False],
    }
    parquet.write_table(arrow.table(table), tmp_path / "t.parquet")
    assert read_cells(tmp_path / "t.parquet") == {
        "age": ["50", "", "70"],
        "dose": ["1.5", "2", ""],
        "colour": ["red", "", "blue"],
        "ill": ["1", "0", "0"],
    }
    parquet.write_table(arrow.table({"a": [1, 2], "__index_level_0__": [7, 9]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"found none for column 2 .with pandas, write index=False"):
        read_cells(tmp_path / "t.parquet")  # it may tell the label
    parquet.write_table(arrow.table({"a": [[1], [2]]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t.parquet: expected a Parquet table, found: a list in a cell"):
        read_cells(tmp_path / "t.parquet")
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"t.parquet: expected a Parquet table, found: "):
        read_cells(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected rows below a different name for each column, found 0 rows below no names"),
        (b"a,b\n", "expected rows below .*, found 0 rows below a, b"),
        (b"a,a\n1,2\n", "expected rows below .*, found 1 rows below a, a"),
        (b"a,\n1,2\n", "expected a name for each column, found none for column 2 .with pandas, write index=False"),
        (b"a,b\n\n1,2\n1\n", "expected 2 cells in each line, as there are names, found 1 in line 4"),
        (b"a,b\n\xff\xfe,2\n", "expected cells between commas, semicolons or tabs in UTF-8, found: 'utf-8' codec"),
        (b'a,b\n"' + b"x" * 200_000 + b'",2\n', "expected cells between .* in UTF-8, found: field larger"),
    ],
)
def test_files_that_are_no_tables_are_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError, match=rf"t.csv: {message}") as caught:
        load_client_data(DataSpec(str(tmp_path / "t.csv"), label="b"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "changes", "message"),
    [
        ({}, {}, "expected the column to predict .*--label.* data.label .*, one of age, dose, .*; found none"),
        ({"label": "cause"}, {}, "expected the column to predict .*; found cause"),
        ({"label": "ill", "group": "pat"}, {}, "expected the column .*, or of --owner or --group, .* found pat"),
        ({"schema": {}}, {"age": "old"}, r"table.csv: row 2, column 'age': expected a number, .*, found 'old'"),
        ({"schema": {}}, {"age": "inf"}, r"row 2, column 'age': expected a number, .*, found 'inf'"),
        ({"schema": {}}, {"colour": "green"}, r"row 2, column 'colour': expected one of blue, red, found 'green'"),
        ({"schema": {}}, {"ill": ""}, r"row 2, column 'ill': expected a label .leave the row out, .*, found ''"),
        ({"schema": {"label": ["x"]}}, {}, "expected a column 'x' as in the schema, found age, dose"),
        (
            {"label": "ill", "group": "who"},
            {"who": ""},
            "row 2, column 'who': expected whose the row is, found nothing",
        ),
        ({"schema": {"owner": "x"}}, {}, "expected a column 'x' of owners or groups, found age, dose"),
        ({"schema": {"group": "ward"}, "group": "name"}, {}, "--group: expected ward as in .*schema.json, found name"),
        ({"schema": {}, "label": "ward"}, {}, "--label: expected ill as in .*schema.json, found ward"),
    ],
)
def test_cells_and_columns_that_do_not_fit_are_named(
    tmp_path: Path, spec: dict[str, Any], changes: dict[str, str], message: str
) -> None:
    name = write(tmp_path, [ROWS[0] | changes, *ROWS[1:]])
    named = spec | ({"schema": schema_file(tmp_path, **spec["schema"])} if "schema" in spec else {})
    with pytest.raises(DataError, match=message):
        load_client_data(DataSpec(name, **named))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "s: Invalid JSON: EOF"),
        ("[" * 50_000, "s: Invalid JSON: recursion limit"),
        ("[]", "s: Input should be an object"),
        ("{}", "label: field required, found"),
        (json.dumps(SCHEMA | {"columns": []}), "columns: .* at least 1 item"),
        (
            json.dumps(SCHEMA | {"columns": [{"name": "a", "kind": "number", "sd": 1.0}]}),
            "columns.0.sd: .* Did you mean std",
        ),
        (json.dumps(SCHEMA | {"colour": 1}), "colour: unknown key in s"),
        (
            json.dumps(SCHEMA | {"columns": [{"name": "a", "kind": "number", "std": 0.0}]}),
            "std: expected greater than 0",
        ),
        (json.dumps(SCHEMA | {"label": ["age"]}), "s: expected each column and each word once, found 'age' twice"),
        (json.dumps(SCHEMA | {"classes": ["a", "a"]}), "s: expected each column and each word once, found 'a' twice"),
        (json.dumps(SCHEMA | {"owner": "x" * LONGEST_SCHEMA}), "s: expected a schema of at most"),
    ],
)
def test_unusable_schemas_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_schema(text, "s")


def test_the_difference_of_two_schemas_is_named() -> None:
    ours = Schema.model_validate_json(json.dumps(SCHEMA))
    assert difference(ours, ours) == ""
    assert "label ('ill',), found ('dead',)" in difference(ours, ours.model_copy(update={"label": ("dead",)}))
    other = ours.columns[0].model_copy(update={"std": 11.0})
    assert "std=11.0" in difference(ours, ours.model_copy(update={"columns": (other, ours.columns[1])}))
    assert difference(ours, ours.model_copy(update={"columns": ours.columns[:1]})) == "expected 2 columns, found 1"


def test_only_tables_have_columns() -> None:
    with pytest.raises(
        DataError, match=r"--label: expected --data to be a table \(.csv, .tsv, .parquet\), found 'digits'"
    ):
        load_client_data(DataSpec("digits", label="x"))


def test_each_hospital_of_the_heart_patients_is_a_client() -> None:
    with HEART.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for number, hospital in enumerate(sorted({row["hospital"] for row in rows})):
        here = [row for row in rows if row["hospital"] == hospital]
        data = load_client_data(DataSpec("heart-disease", split="owner", partition=number, partitions=4))
        whole = data.whole
        assert len(whole) == len(here)
        assert int(whole.labels.sum()) == sum(row["num"] != "0" for row in here)
        ages = sorted((whole.inputs[:, 0] * 9.41956 + 53.5109).round().int().tolist())
        assert ages == sorted(int(row["age"]) for row in here)
        chol_gone = load_schema(HEART.with_suffix(".json")).inputs({**_columns(here)}, "t")
        assert whole.inputs.sum(0).numpy() == pytest.approx(chol_gone.sum(0), abs=0.05)
    with pytest.raises(HyperbloomError, match="partitions: expected at most 4, one owner each, found 5"):
        load_client_data(DataSpec("heart-disease", split="owner", partition=0, partitions=5))


def _columns(rows: list[dict[str, str]]) -> dict[str, list[str]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def test_a_linear_model_learns_the_heart_disease_from_the_inputs() -> None:
    from sklearn.linear_model import LogisticRegression

    data = load_client_data(DataSpec("heart-disease"))
    model = LogisticRegression(C=0.1, max_iter=500).fit(data.train.inputs.numpy(), data.train.labels.numpy())
    assert model.score(data.test.inputs.numpy(), data.test.labels.numpy()) > 0.75


def test_diabetes_is_scikit_learns() -> None:
    from sklearn.datasets import load_diabetes

    theirs = load_diabetes(scaled=False)
    data = load_client_data(DataSpec("diabetes"))
    assert (data.kind, data.num_classes, len(data.whole)) == ("regression", 1, 442)
    raw = data.whole.inputs * torch.tensor(data.scaling.std) + torch.tensor(data.scaling.mean)
    ours = {(round(float(row[2]), 1), float(label)) for row, label in zip(raw, data.whole.labels, strict=True)}
    assert ours == {
        (round(float(row[2]), 1), float(label)) for row, label in zip(theirs.data, theirs.target, strict=True)
    }
    assert data.whole.inputs.std(0, correction=0) == pytest.approx(np.ones(10), abs=1e-4)


def test_a_site_keeps_groups_together_that_the_schema_does_not_name(tmp_path: Path) -> None:
    rows = [{"z": str(i / 3), "patient": str(i // 2), "ill": str(i % 2)} for i in range(80)]
    schema = schema_file(tmp_path, label=["ill"], classes=["0", "1"], columns=[{"name": "z", "kind": "number"}])
    data = load_client_data(DataSpec(write(tmp_path, rows), schema=schema, group="patient"))
    parts = [{round(3 * float(z)) // 2 for z in part.inputs[:, 0]} for part in (data.train, data.val, data.test)]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 40
    assert data.schema is not None and data.schema.group is None, "all clients have the same schema"


def test_a_column_of_huge_numbers_is_a_table(tmp_path: Path) -> None:
    """Its spread is beyond what any setting of a run may be."""
    rows = "".join(f"{(-1) ** row * (row + 1)}e34,{'yes' if row % 2 else 'no'}\n" for row in range(40))
    (tmp_path / "t.csv").write_text("size,ill\n" + rows)
    data = load_client_data(DataSpec(str(tmp_path / "t.csv"), label="ill"))
    assert data.train.inputs.isfinite().all() and data.train.inputs.abs().max() < 10
