"""The published form of NIH's chest X-rays."""

from pathlib import Path

import numpy as np
import pytest

from figures.chest_xray_14 import FINDINGS
from hyperbloom.common.data import DataSpec, load_client_data
from hyperbloom.common.errors import DataError
from tests.common.data.test_listed import draw


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERBLOOM_DATA", str(tmp_path))


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
    data = load_client_data(DataSpec("figures.chest_xray_14:read"))
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
    spec = DataSpec("figures.chest_xray_14:read")
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
