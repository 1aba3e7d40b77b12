"""Images whose labels stand in a list: a user's labels.csv."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from hyperbloom.common.data import DataSpec, load_client_data
from hyperbloom.common.errors import DataError


def draw(path: Path, value: int, size: tuple[int, int] = (6, 5), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, value, value, 255)).save(path)


def write_list(root: Path, header: str, row: str, count: int = 40) -> str:
    """Write images of the grey values 0 to `count` and a list of them; `row` is filled in with `i`."""
    for i in range(count):
        draw(root / "scans" / f"{i}.png", i)
    (root / "labels.csv").write_text(
        "\n".join([header, *(row.format(i=i, h=i % 2, t=i / 7, g=(0, 2, 3)[i % 3]) for i in range(count))])
    )
    return str(root)


SITES = {"one": "scans/{i}.png,class{h}", "same": "scans/{i}.png,class{h}", "other": "scans/{i}.png,type{h}"}


@pytest.mark.parametrize(
    ("header", "row", "kind", "names"),
    [
        ("file,finding", "scans/{i}.png,class{h}", "classification", ("class0", "class1")),
        ("file,a,b", "scans/{i}.png,{h},", "multilabel", ("a", "b")),
        ("dose,file", "{t},scans/{i}.png", "regression", ("dose",)),
    ],
)
def test_each_column_beside_the_file_is_a_label(
    tmp_path: Path, header: str, row: str, kind: str, names: tuple[str, ...]
) -> None:
    data = load_client_data(DataSpec(write_list(tmp_path, header, row)))
    assert (data.kind, data.class_names, data.input_shape) == (kind, names, (1, 5, 6))
    numbers = (data.whole.inputs[:, 0, 0, 0] * 255).round()
    assert sorted(numbers.tolist()) == list(range(40))
    first = data.whole.labels.reshape(40, -1)[:, 0]
    assert torch.allclose(first.float(), numbers / 7 if kind == "regression" else numbers % 2)


def test_sites_that_lack_a_grade_agree_on_the_others(tmp_path: Path) -> None:
    """Grades are numbers already: a site with 0, 2 and 3 must not call its grade 2 the first class."""
    data = load_client_data(DataSpec(write_list(tmp_path, "file,grade", "scans/{i}.png,{g}")))
    assert (data.num_classes, data.class_names, data.meaning) == (4, ("0", "1", "2", "3"), None)
    assert data.whole.labels.unique().tolist() == [0, 2, 3]


def test_the_names_of_classes_have_a_digest_that_others_can_compare(tmp_path: Path) -> None:
    written = [write_list(tmp_path / name, "file,ill", row) for name, row in SITES.items()]
    first, same, other = (load_client_data(DataSpec(name)).meaning for name in written)
    assert first == same != other


def test_a_list_names_owners_and_groups(tmp_path: Path) -> None:
    name = write_list(tmp_path, "file,ill,owner,group", "scans/{i}.png,{h},ward{h},g{i}")
    data = load_client_data(DataSpec(name, split="owner", partition=1, partitions=2))
    assert (data.whole.inputs[:, 0, 0, 0] * 255).round().remainder(2).unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        ("name,ill", "scans/{i}.png,{h}", "labels.csv: expected a column file and one for each label, found name, ill"),
        ("file,group", "scans/{i}.png,{h}", "labels.csv: expected a column file and one for each label, found file"),
        (
            "file,ill",
            "scans/x{i}.png,{h}",
            "labels.csv: expected the names of images below .*, found .*x0.png, which is",
        ),
        ("file,ill", "scans/1.png,{h}", "labels.csv: expected the names of images .*1.png, which has two rows"),
        ("file,age", 'scans/{i}.png,"5,{i}"', "labels.csv: row 2, column 'age': expected a number, .*, found '5,0'"),
        ("file,ill", "/nowhere/{i}.png,{h}", "labels.csv: expected the names of images below .*, found /nowhere/0.png"),
        ("file,a,b", "scans/{i}.png,{h},much", r"labels.csv: row 2, column 'b': expected a number, .*, found 'much'"),
    ],
)
def test_lists_that_cannot_be_used_are_named(tmp_path: Path, header: str, row: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_client_data(DataSpec(write_list(tmp_path, header, row)))


@pytest.mark.parametrize("column", ["owner", "group"])
def test_an_image_of_nobody_is_refused(tmp_path: Path, column: str) -> None:
    """Else all of them would be one patient, or a client of their own."""
    folder = write_list(tmp_path, f"file,ill,{column}", "scans/{i}.png,ill{h},ward-{h}")
    path = tmp_path / "labels.csv"
    path.write_text(path.read_text().replace("scans/7.png,ill1,ward-1", "scans/7.png,ill1,"))
    with pytest.raises(DataError, match=rf"row 9, column '{column}': expected whose the row is, found nothing"):
        load_client_data(DataSpec(folder))
