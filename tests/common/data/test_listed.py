"""Images whose labels stand in a list: a user's labels.csv, and the published form of NIH's chest X-rays."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hyperbloom.common.data import DataSpec, load_client_data
from hyperbloom.common.data.chest import FINDINGS
from hyperbloom.common.errors import DataError


def draw(path: Path, value: int, size: tuple[int, int] = (6, 5), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, value, value, 255)).save(path)


def write_list(root: Path, header: str, row: str, count: int = 40) -> str:
    """Write images of the grey values 0 to `count` and a list of them; `row` is filled in with `i`."""
    for i in range(count):
        draw(root / "scans" / f"{i}.png", i)
    (root / "labels.csv").write_text("\n".join([header, *(row.format(i=i, h=i % 2, t=i / 7) for i in range(count))]))
    return str(root)


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
        ("file,a,b", "scans/{i}.png,{h},much", r"labels.csv: row 2, column 'b': expected a number, .*, found 'much'"),
    ],
)
def test_lists_that_cannot_be_used_are_named(tmp_path: Path, header: str, row: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_client_data(DataSpec(write_list(tmp_path, header, row)))


HEADER = "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,OriginalImage[Width,Height],"


def write_nih(root: Path, wrong: str = "") -> None:
    """Write 60 X-rays of 20 patients in the published form; the first 45 are for training and validation."""
    lines, names = [HEADER], []
    for i in range(60):
        name = f"{i // 3:08}_{i % 3:03}.png"
        draw(root / f"images_{1 + i % 2:03}" / "images" / name, i, (200, 180), "RGBA" if i == 7 else "L")
        found = wrong or ("No Finding" if i % 3 == 0 else "Hernia" if i % 3 == 1 else "Mass|Pleural_Thickening")
        lines.append(f"{name},{found},0,{i // 3},58,2682,2749,")
        names.append(name)
    (root / "Data_Entry_2017.csv").write_text("\n".join(lines))
    (root / "train_val_list.txt").write_text("\n".join(names[:45]))
    (root / "test_list.txt").write_text("\n".join(names[45:]))


def test_nih_is_read_as_published_and_split_by_patient(tmp_path: Path) -> None:
    write_nih(tmp_path)
    data = load_client_data(DataSpec("chest-xray-14", tmp_path))
    assert (data.kind, data.num_classes, data.input_shape) == ("multilabel", 14, (1, 128, 128))
    parts = [set((part.inputs[:, 0, 0, 0] * 255).round().int().tolist()) for part in (data.train, data.val, data.test)]
    assert parts[2] == set(range(45, 60))
    assert len(parts[0] | parts[1]) == 45
    assert not {number // 3 for number in parts[0]} & {number // 3 for number in parts[1]}
    for number, labels in zip(
        (data.test.inputs[:, 0, 0, 0] * 255).round().int().tolist(), data.test.labels, strict=True
    ):
        expected = [set(), {"Hernia"}, {"Mass", "Pleural_Thickening"}][number % 3]
        assert {FINDINGS[place] for place in np.flatnonzero(labels)} == expected


def test_what_is_missing_or_wrong_of_nih_is_named(tmp_path: Path) -> None:
    spec = DataSpec("chest-xray-14", tmp_path)
    with pytest.raises(DataError, match=r"Data_Entry_2017.csv not found; .* Get it from https"):
        load_client_data(spec)
    write_nih(tmp_path, wrong="Measles")
    with pytest.raises(DataError, match=r"row 2: expected No Finding or Atelectasis, .*, found 'Measles'"):
        load_client_data(spec)
    write_nih(tmp_path)
    with (tmp_path / "test_list.txt").open("a") as file:
        file.write("\n00000000_000.png")
    with pytest.raises(DataError, match="expected each group in one of train, val and test"):
        load_client_data(spec)
    (tmp_path / "test_list.txt").write_text("other.png")
    with pytest.raises(DataError, match=r"test_list.txt: expected names of images in .*, found 'other.png'"):
        load_client_data(spec)
    (tmp_path / "images_001" / "images" / "00000000_000.png").unlink()
    with pytest.raises(DataError, match=r"expected 60 images, found none named 00000000_000.png, and 1 missing"):
        load_client_data(spec)
