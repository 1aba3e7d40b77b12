"""Examples are scaled as at training, and their labels play no part."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hyperbloom.common.data import DataSpec
from hyperbloom.common.wire.newcomers import Description

from .offers import expected, newcomer, offer

pytestmark = pytest.mark.usefixtures("without_onnx")


def test_examples_without_labels_are_scaled_as_at_training(tmp_path: Path) -> None:
    stored = np.random.default_rng(0).integers(0, 17, (20, 1, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", x=stored)
    (tmp_path / "images").mkdir()
    for index, image in enumerate(stored):
        Image.fromarray(np.round(image[0] * (255 / 16)).astype(np.uint8)).save(tmp_path / "images" / f"{index:02}.png")
    made = offer()
    wanted = expected(made, (torch.from_numpy(stored).float() / 16 - 0.3053) / 0.3760)
    for path, tolerance in ((tmp_path / "x.npz", 1e-5), (tmp_path / "images", 1e-2)):
        description = newcomer(tmp_path, DataSpec(str(path))).describe(made)
        assert isinstance(description, Description)
        torch.testing.assert_close(description.weights.values, wanted, rtol=0, atol=tolerance)


def labelled(path: Path, x: np.ndarray, y: np.ndarray) -> DataSpec:
    np.savez(path, x=x, y=y)
    return DataSpec(str(path))


def test_labels_play_no_part(tmp_path: Path) -> None:
    """They decide which example is in which part, and all parts are described."""
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 256, (40, 1, 8, 8), dtype=np.uint8)
    for x in (stored, rng.normal(size=stored.shape).astype(np.float32)):
        np.savez(tmp_path / "none.npz", x=x)
        described = [newcomer(tmp_path, DataSpec(str(tmp_path / "none.npz"))).describe(offer())]
        for y in (np.arange(40) % 10, rng.permutation(np.arange(40) % 10), np.arange(40) % 3):
            described.append(newcomer(tmp_path, labelled(tmp_path / "some.npz", x, y)).describe(offer()))
        values = [one.weights.values for one in described if isinstance(one, Description)]
        assert len(values) == 4
        for other in values[1:]:
            torch.testing.assert_close(other, values[0], rtol=0, atol=1e-6)


def test_floats_that_may_be_prepared_otherwise_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = np.random.default_rng(0).normal(size=(40, 1, 8, 8)).astype(np.float32)
    assert isinstance(
        newcomer(tmp_path, labelled(tmp_path / "floats.npz", x, np.arange(40) % 10)).describe(offer()), Description
    )
    assert "took stored numbers divided by 16, less [0.3053], divided by [0.376], these data are taken as they are" in (
        caplog.text
    )
