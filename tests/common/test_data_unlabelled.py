"""Inputs without labels: the same numbers as training makes of the same images."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hyperbloom.common.data import DataSpec, data_source
from hyperbloom.common.data.folder import read_image
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.data.unlabelled import Inputs, _lines, is_unlabelled, read_inputs
from hyperbloom.common.errors import DataError

SHAPE = (3, 4, 6)
SCALING = Scaling(255.0, (0.5, 0.4, 0.3), (0.2, 0.25, 0.5))


def pixels(count: int = 1) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(1).integers(0, 256, (count, 4, 6, 3), dtype=np.uint8)


def read(*paths: Path, shape: tuple[int, ...] = SHAPE, scaling: Scaling = SCALING) -> Inputs:
    """Return everything in one piece."""
    parts = list(read_inputs(paths, shape, scaling))
    return Inputs(tuple(n for part in parts for n in part.names), torch.cat([part.values for part in parts]))


def test_every_way_to_bring_an_image_gives_the_same_inputs(tmp_path: Path) -> None:
    images = pixels(2)
    expected = SCALING.apply(images.transpose(0, 3, 1, 2))
    for index, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{index}.png")
    np.save(tmp_path / "a.npy", images)
    np.savez(tmp_path / "b.npz", x=images.transpose(0, 3, 1, 2))
    np.save(tmp_path / "one.npy", images[0])
    np.save(tmp_path / "floats.npy", expected.numpy())
    for paths in ([tmp_path / "0.png", tmp_path / "1.png"], [tmp_path / "a.npy"], [tmp_path / "b.npz"]):
        torch.testing.assert_close(read(*paths).values, expected, rtol=0, atol=0)
    torch.testing.assert_close(read(tmp_path / "floats.npy").values, expected, rtol=0, atol=0)
    torch.testing.assert_close(read(tmp_path / "one.npy").values, expected[:1], rtol=0, atol=0)
    assert read(tmp_path / "1.png").names == (str(tmp_path / "1.png"),)
    assert read(tmp_path / "a.npy").names == (f"{tmp_path / 'a.npy'}[0]", f"{tmp_path / 'a.npy'}[1]")


def test_a_folder_has_its_images_also_in_folders_by_class(tmp_path: Path) -> None:
    for name in ("b/1.png", "a/2.png", "c.png", "a/.hidden.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(pixels()[0]).save(tmp_path / name)
    assert read(tmp_path).names == tuple(str(tmp_path / name) for name in ("a/2.png", "b/1.png", "c.png"))


def test_order_is_kept_between_images_and_arrays(tmp_path: Path) -> None:
    for name in ("a", "c"):
        Image.fromarray(pixels()[0]).save(tmp_path / f"{name}.png")
    np.save(tmp_path / "b.npy", pixels())
    names = read(*(tmp_path / name for name in ("c.png", "b.npy", "a.png"))).names
    assert [Path(name).name for name in names] == ["c.png", "b.npy", "a.png"]


def test_images_get_the_size_and_the_channels_of_the_model(tmp_path: Path) -> None:
    Image.new("RGBA", (12, 8), (255, 0, 0, 255)).save(tmp_path / "red.png")
    values = read(tmp_path / "red.png", scaling=Scaling(1.0)).values
    assert values.shape == (1, *SHAPE)
    assert values[0, 0].eq(1).all() and values[0, 1:].eq(0).all()
    grey = read(tmp_path / "red.png", shape=(1, 4, 6), scaling=Scaling(1.0)).values
    torch.testing.assert_close(grey, torch.full((1, 1, 4, 6), 76 / 255))


def test_digits_as_image_files_are_what_training_sees(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    stored = load_digits().images[:1].astype(np.uint8)  # 0 .. 16
    np.save(tmp_path / "digit.npy", stored[:, None])
    expected = (torch.from_numpy(stored[:, None]).float() / 16 - 0.3053) / 0.3760
    found = read(tmp_path / "digit.npy", shape=(1, 8, 8), scaling=data_source(DataSpec("digits")).scaling).values
    torch.testing.assert_close(found, expected)
    Image.fromarray(np.round(stored[0] * (255 / 16)).astype(np.uint8)).save(tmp_path / "digit.png")
    found = read(tmp_path / "digit.png", shape=(1, 8, 8), scaling=data_source(DataSpec("digits")).scaling).values
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01)


@pytest.mark.parametrize(
    ("content", "shape", "error"),
    [
        (np.zeros((2, 5)), SHAPE, r"expected inputs of shape \(3, 4, 6\)"),
        (np.array([["a"]]), (1,), "expected numbers"),
        (np.full((1, 3), np.nan), (3,), "expected finite"),
        (np.array([{}], dtype=object), (1,), r"expected a whole \.npy of plain arrays"),
    ],
)
def test_wrong_arrays_are_told(tmp_path: Path, content: object, shape: tuple[int, ...], error: str) -> None:
    np.save(tmp_path / "x.npy", content)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=error):
        read(tmp_path / "x.npy", shape=shape)


def test_wrong_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="folder of images, found none"):
        read(tmp_path / "absent.png")
    with pytest.raises(DataError, match=r"absent.png: expected an image, found no file"):
        read_image(tmp_path / "absent.png", "RGB", (4, 4))
    with pytest.raises(DataError, match="found none"):
        read(tmp_path)
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(DataError, match="expected an image"):
        read(tmp_path / "text.png")
    with pytest.raises(DataError, match="no images; give it"):
        read(tmp_path / "text.png", shape=(12,))
    np.savez(tmp_path / "two.npz", a=np.zeros(1), b=np.zeros(1))
    with pytest.raises(DataError, match="expected an array named x, found a, b"):
        read(tmp_path / "two.npz")
    header = struct.pack("<6sBBH", b"\x93NUMPY", 1, 0, 70)
    claim = "{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000, 4)}"
    (tmp_path / "huge.npy").write_bytes(header + claim.ljust(70).encode())
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY\x01\x00\x0a\x00{'descr': (\n")
    for name in ("huge.npy", "broken.npy"):
        with pytest.raises(DataError, match=rf"{name}: expected a whole \.npy of plain arrays, found"):
            read(tmp_path / name)
    large = io.BytesIO()
    Image.new("1", (16, 16)).save(large, format="PNG")
    header = struct.pack(">4sIIBBBBB", b"IHDR", 20_000, 20_000, 1, 0, 0, 0, 0)
    content = large.getvalue()
    (tmp_path / "large.png").write_bytes(content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:])
    with pytest.raises(DataError, match=r"large.png: expected an image, found .* bytes: Image size"):
        read(tmp_path / "large.png")
    Image.new("I;16", (4, 4)).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match="8 bits a channel"):
        read(tmp_path / "deep.png")


def test_a_text_is_what_stands_in_a_line(tmp_path: Path) -> None:
    """Notepad's byte order mark is no part of it, and only ends of lines end it."""
    (tmp_path / "a.txt").write_bytes("\ufeffgood film\r\n\r\na\u2028b\x0cc\n".encode())
    assert _lines(tmp_path / "a.txt") == ["good film", "", "a\u2028b\x0cc"]


def test_what_has_labels_is_told_from_what_has_none(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 3)))
    np.savez(tmp_path / "xy.npz", x=np.zeros((2, 3)), y=np.zeros(2, np.int64))
    (tmp_path / "flat").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "flat" / "a.png")
    (tmp_path / "classes" / "cat").mkdir(parents=True)
    np.savez(tmp_path / "med.npz", train_images=np.zeros((2, 4, 4)), train_labels=np.zeros(2, np.int64))
    (tmp_path / "listed").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "listed" / "a.png")
    (tmp_path / "listed" / "labels.csv").write_text("file,ill\na.png,1\n")
    paths = ("x.npz", "flat", "absent.npy", "xy.npz", "classes", "digits", "med.npz", "listed")
    assert [is_unlabelled(tmp_path / path) for path in paths] == 3 * [True] + 5 * [False]
