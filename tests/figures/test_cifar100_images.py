"""CIFAR-100's binary version from images: each pixel, its class and its superclass."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from figures import cifar100_images
from figures.cifar100_images import write
from hyperbloom.common.data import DataSpec, load_client_data
from hyperbloom.common.errors import DataError

CLASSES = [f"class-{number:02}" for number in range(100)]
Images = dict[str, torch.Tensor]


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Images:
    """Write two images of each class for training and one for the test, and return those for training."""
    monkeypatch.setattr(cifar100_images, "COUNTS", {"train": 2, "test": 1})
    made = {}
    for part, count in cifar100_images.COUNTS.items():
        for label, name in enumerate(CLASSES):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            for number in range(count):
                made[f"{part}/{name}/{number}"] = torch.randint(0, 256, (3, 32, 32)).to(torch.uint8)
                made[f"{part}/{name}/{number}"][:, 0, 0] = label
        for name, image in made.items():
            if name.startswith(part):
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / "images" / f"{name}.png")
    return {name: image for name, image in made.items() if name.startswith("train")}


def test_each_pixel_is_kept_and_each_class_has_its_label(images: Images, tmp_path: Path) -> None:
    write(tmp_path / "images", tmp_path)
    data = load_client_data(DataSpec(data="cifar100", root=tmp_path))
    assert data.class_names == tuple(CLASSES)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]))
    kept = set()
    for part in (data.train, data.val):
        for one, label in zip(part.inputs, part.labels, strict=True):
            restored = ((one * std + mean) * 255).round().to(torch.uint8)
            assert int(restored[0, 0, 0]) == int(label)
            kept.add(restored.numpy().tobytes())
    assert kept == {image.numpy().tobytes() for image in images.values()}


def test_the_superclass_stands_before_the_class(images: Images, tmp_path: Path) -> None:
    folder = write(tmp_path / "images", tmp_path)
    head = np.fromfile(folder / "test.bin", np.uint8).reshape(100, -1)[:, :2]
    assert head[:, 1].tolist() == list(range(100))
    # Apples (0) and pears (57) are among fruit and vegetables, beds (5) among furniture: places 4 and 6 of 20.
    assert [int(head[label, 0]) for label in (0, 57, 5)] == [4, 4, 6]
    assert set(np.bincount(head[:, 0])) == {5}


def test_other_images_are_refused_and_nothing_is_written(images: Images, tmp_path: Path) -> None:
    last = tmp_path / "images/test/class-99/0.png"
    Image.new("RGB", (31, 32)).save(last)
    with pytest.raises(DataError, match=r"0\.png: expected an image of \(3, 32, 32\), found \(3, 32, 31\)"):
        write(tmp_path / "images", tmp_path)
    last.unlink()
    with pytest.raises(DataError, match="class-99: expected 1 PNG images, found 0"):
        write(tmp_path / "images", tmp_path)
    last.parent.rmdir()
    with pytest.raises(DataError, match="test: expected a folder for each of 100 classes, found 99"):
        write(tmp_path / "images", tmp_path)
    assert not (tmp_path / "cifar-100-binary").exists()
