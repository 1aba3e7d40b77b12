"""All 112,120 chest X-rays of X. Wang et al., "ChestX-ray8", CVPR 2017, https://arxiv.org/abs/1705.02315, with labels.

`--data figures.chest_xray_14:read` reads them from HYPERBLOOM_DATA in the published form: `Data_Entry_2017.csv` (or its
version of 2020), the images in `images/` or `images_001/images/` and so on, and the official split by patient in the
files `train_val_list.txt` and `test_list.txt`. We have not read the published files, only small ones of the same form.
"""

from pathlib import Path

import numpy as np

from figures.files import find_file
from hyperbloom.common.data.draws import FIXED_SEED, IntArray, generator, hold_out
from hyperbloom.common.data.files import missing
from hyperbloom.common.data.folder import ImageBlock
from hyperbloom.common.data.own import check_groups, with_units
from hyperbloom.common.data.pool import Pool, Portion
from hyperbloom.common.data.scaling import AnyArray, Scaling
from hyperbloom.common.data.schema import FIRST_ROW
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.data.table import read_cells
from hyperbloom.common.errors import DataError

SIDE = 128
FINDINGS = """Atelectasis Cardiomegaly Effusion Infiltration Mass Nodule Pneumonia Pneumothorax Consolidation Edema
Emphysema Fibrosis Pleural_Thickening Hernia""".split()  # noqa: SIM905
ENTRIES = ("Data_Entry_2017_v2020.csv", "Data_Entry_2017.csv")
LISTS = ("train_val_list.txt", "test_list.txt")
COLUMNS = ("Image Index", "Finding Labels", "Patient ID")
HOW_14 = "Get it from https://nihcc.app.box.com/v/ChestXray-NIHCC, and unpack it into {root}."


def read() -> Pool:
    """Return the X-rays, resized to 1 x 128 x 128 on access, with 14 labels; an eighth of train_val validates."""
    root = DataSpec().folder
    entries = next((root / name for name in ENTRIES if (root / name).exists()), None)
    if entries is None:
        raise missing(ENTRIES[-1], [root / ENTRIES[-1]], root, HOW_14)
    lists = [find_file(root, name, HOW_14) for name in LISTS]
    table = read_cells(entries)
    if not set(COLUMNS) <= table.keys():
        raise DataError(f"{entries}: expected the columns {', '.join(COLUMNS)}, found {', '.join(table)}")
    names, findings, patients = (table[column] for column in COLUMNS)
    there = {path.name: path for pattern in ("images*/*.png", "images*/images/*.png") for path in root.glob(pattern)}
    absent = [name for name in names if name not in there]
    if absent:
        raise DataError(
            f"{root}: expected {len(names)} images, found none named {absent[0]}, and {len(absent)} missing"
        )
    whole = Portion.of(
        ImageBlock(tuple(there[name] for name in names), (SIDE, SIDE), "L"), _findings(findings, entries)
    )
    (whole,), _ = with_units([whole], {"groups": [np.array(patients)]}, str(root))
    train_val, test = (whole.choose(_rows(path, names)) for path in lists)
    rng = generator(FIXED_SEED, "chest-xray-14")
    train, val = train_val.split(lambda strata: hold_out(strata, max(1, len(strata) // 8), rng))
    check_groups(str(root), (train, val, test))
    return Pool("chest-xray-14", train, val, test, tuple(FINDINGS), Scaling(255.0))


def _findings(texts: list[str], path: Path) -> AnyArray:
    place = {name: number for number, name in enumerate(FINDINGS)}
    labels = np.zeros((len(texts), len(FINDINGS)), np.float32)
    for row, text in enumerate(texts):
        for name in text.split("|") if text != "No Finding" else ():
            if name not in place:
                raise DataError(
                    f"{path}: row {row + FIRST_ROW}: expected No Finding or {', '.join(FINDINGS)}, found {name!r}"
                )
            labels[row, place[name]] = 1.0
    return labels


def _rows(path: Path, names: list[str]) -> IntArray:
    place = {name: number for number, name in enumerate(names)}
    listed = path.read_text(encoding="utf-8", errors="replace").split()
    unknown = [name for name in listed if name not in place]
    if unknown or not listed:
        raise DataError(f"{path}: expected names of images in {ENTRIES[-1]}, found {(unknown or ['none'])[0][:80]!r}")
    return np.array([place[name] for name in listed], dtype=np.int64)
