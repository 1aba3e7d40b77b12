"""Masks as pictures."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.files.pictures import PALETTE, draw, write_mask, write_page


def test_a_mask_is_a_picture_whose_pixels_are_its_classes(tmp_path: Path) -> None:
    path = write_mask(tmp_path, "scans/a b.npy[3]", [[0, 1, 2], [2, 2, 255]])
    assert path.parent == tmp_path and path.suffix == ".png"
    with Image.open(path) as image:
        assert np.asarray(image).tolist() == [[0, 1, 2], [2, 2, 255]]
        colours = np.asarray(image.convert("RGB"))
    assert colours[0, 0].tolist() == [0, 0, 0] and colours[0, 1].tolist() != colours[0, 2].tolist()


def test_inputs_of_one_file_have_masks_of_their_own(tmp_path: Path) -> None:
    assert write_mask(tmp_path, "a.npy[1]", [[0]]) != write_mask(tmp_path, "a.npy[2]", [[0]])


def test_a_mask_lies_half_over_its_image_where_it_is_not_background(tmp_path: Path) -> None:
    grey = np.array([[[-1.0, 3.0], [3.0, 1.0]]])
    with Image.open(io.BytesIO(draw(grey, [[0, 0], [1, 0]]))) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert pixels[0].tolist() == [[0, 0, 0], [255, 255, 255]] and pixels[1, 1].tolist() == [127, 127, 127]
    assert np.abs(2 * pixels[1, 0] - 255 - np.array(list(PALETTE[3:6]))).max() <= 1
    with Image.open(io.BytesIO(draw(np.zeros((3, 2, 4))))) as image:
        assert image.size == (4, 2) and not np.asarray(image).any()


def test_a_page_is_one_file_that_escapes_names(tmp_path: Path) -> None:
    write_page(tmp_path / "p.html", "<b>", [(draw(np.zeros((1, 2, 2))), [("file", "a<i>")])], ["ground", "cell & wall"])
    page = (tmp_path / "p.html").read_text()
    assert page.count("data:image/png;base64,") == 1 and "file: a&lt;i&gt;" in page and "&lt;b&gt;" in page
    assert "cell &amp; wall" in page and "> ground" not in page and "http-equiv" in page and "<script" not in page
    assert 'name="viewport"' in page, "or a phone shows it tiny"


def test_a_mask_replaces_no_file(tmp_path: Path) -> None:
    (tmp_path / "scan.png").write_bytes(b"an image")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"--masks: .*scan.png is there"):
            write_mask(tmp_path, "scans/scan.png", [[0]])
    assert (tmp_path / "scan.png").read_bytes() == b"an image"
