"""Masks as pictures."""

from pathlib import Path

import numpy as np
from PIL import Image

from hyperbloom.common.files.pictures import write_mask


def test_a_mask_is_a_picture_whose_pixels_are_its_classes(tmp_path: Path) -> None:
    path = write_mask(tmp_path, "scans/a b.npy[3]", [[0, 1, 2], [2, 2, 255]])
    assert path.parent == tmp_path and path.suffix == ".png"
    with Image.open(path) as image:
        assert np.asarray(image).tolist() == [[0, 1, 2], [2, 2, 255]]
        colours = np.asarray(image.convert("RGB"))
    assert colours[0, 0].tolist() == [0, 0, 0] and colours[0, 1].tolist() != colours[0, 2].tolist()


def test_inputs_of_one_file_have_masks_of_their_own(tmp_path: Path) -> None:
    assert write_mask(tmp_path, "a.npy[1]", [[0]]) != write_mask(tmp_path, "a.npy[2]", [[0]])
