"""Omniglot in its packed file, of a few alphabets that the tests draw."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hyperbloom.common.data import DataSpec, load_client_data
from hyperbloom.common.errors import DataError

OMNIGLOT = DataSpec("figures.omniglot:read")


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERBLOOM_DATA", str(tmp_path))


def write(root: Path, **changes: NDArray[np.generic]) -> None:
    """Write three alphabets of 2, 3 and 4 characters with 20 drawings each; character k has ink in k of 15 rows."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for part, alphabets in (("bg", {"Alpha": 2, "Beta": 3}), ("ev", {"Gamma": 4})):
        names = [f"{name}/character{k:02d}" for name, count in alphabets.items() for k in range(1, count + 1)]
        labels = np.repeat(np.arange(len(names)), 20)
        paper = np.ones((len(labels), 105, 105), np.uint8)
        for drawing, label in zip(paper, labels, strict=True):
            drawing[: 15 * int(names[label][-2:])] = 0
        arrays[f"{part}_bits"] = np.packbits(paper.reshape(len(labels), -1), axis=1)
        arrays[f"{part}_label"] = labels.astype(np.int16)
        arrays[f"{part}_names"] = np.array(names)
    np.savez(root / "omniglot.npz", **{**arrays, **changes})  # type: ignore[arg-type]


def test_each_client_has_an_alphabet(tmp_path: Path) -> None:
    write(tmp_path)
    specs = [DataSpec(OMNIGLOT.data, split="owner", partition=i, partitions=3) for i in range(3)]
    clients = [load_client_data(spec) for spec in specs]
    for client, characters, before in zip(clients, (2, 3, 4), (0, 2, 5), strict=True):
        assert client.train.labels.unique().tolist() == list(range(before, before + characters))
        sizes = [len(part) for part in (client.train, client.val, client.test)]
        assert sizes == [14 * characters, 3 * characters, 3 * characters]
        assert (client.input_shape, client.num_classes) == ((1, 28, 28), 9)
        # character k of an alphabet has ink on k sevenths of its area, and none below
        ink = client.train.inputs.mean(dim=(1, 2, 3))
        assert torch.allclose(ink, (client.train.labels - before + 1) / 7, atol=1e-6)
        assert client.train.inputs[:, 0, 0].eq(1).all()
        assert client.train.inputs[:, 0, -1].eq(0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"bg_bits": np.zeros((100, 9), np.uint8)},
            r"bg_bits: expected uint8 rows of 1379 bytes, found uint8 \(100, 9\)",
        ),
        ({"ev_label": np.zeros(3, np.int16)}, r"ev_label: expected 80 integers, found int16 \(3,\)"),
        ({"bg_label": np.full(100, 5)}, "bg_label: expected 0 to 4, an index into .*bg_names, found 5 to 5"),
        ({"ev_names": np.array(["Gamma"] * 4)}, "ev_names: expected strings alphabet/character, found <U5 .'Gamma'"),
    ],
)
def test_unusable_arrays_are_named(tmp_path: Path, changes: dict[str, NDArray[np.generic]], message: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(DataError, match=f"omniglot.npz: {message}"):
        load_client_data(OMNIGLOT)


def test_missing_and_truncated_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"omniglot.npz not found; .* put it into .* with the keys bg_bits, bg_label"):
        load_client_data(OMNIGLOT)
    path = tmp_path / "omniglot.npz"
    np.savez(path, bg_bits=np.zeros(1))
    with pytest.raises(DataError, match=r"omniglot.npz: expected the keys bg_bits, bg_label, .*, found bg_bits"):
        load_client_data(OMNIGLOT)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"omniglot.npz: expected a whole .npz of plain arrays, found 100 bytes"):
        load_client_data(OMNIGLOT)
