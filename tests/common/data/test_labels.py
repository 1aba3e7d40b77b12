"""Labels of every kind, from a file to the clients; groups and owners."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.client import Client
from hyperbloom.common.data import ClientData, DataSpec, Examples, load_client_data
from hyperbloom.common.data.labels import strata_of
from hyperbloom.common.errors import DataError, RefusedError

RNG = np.random.default_rng(0)
X = np.arange(120, dtype=np.float32)[:, None] * np.ones(3, np.float32)


def save(path: Path, **arrays: Any) -> str:
    """Write an .npz file and return what to write for `data`."""
    np.savez(path / "own.npz", **arrays)
    return str(path / "own.npz")


def all_labels(data: ClientData) -> torch.Tensor:
    """Return the labels in the order of the file; the first feature is the number of the example."""
    whole = data.whole
    return whole.labels[whole.inputs.flatten(1)[:, 0].argsort()]


SEVERAL = RNG.integers(0, 2, (120, 4))
WITH_GAPS = np.where(RNG.random((120, 4)) < 0.2, np.nan, SEVERAL)
MASKS = RNG.integers(0, 3, (120, 5, 6))


@pytest.mark.parametrize(
    ("y", "kind", "outputs", "expected"),
    [
        (np.arange(120) % 3, "classification", 3, torch.arange(120) % 3),
        ((np.arange(120) % 3)[:, None].astype(np.uint8), "classification", 3, torch.arange(120) % 3),
        (np.arange(120) % 2 == 1, "classification", 2, torch.arange(120) % 2),
        (SEVERAL.astype(np.uint8), "multilabel", 4, torch.tensor(SEVERAL).float()),
        (WITH_GAPS, "multilabel", 4, torch.tensor(WITH_GAPS).float()),
        (WITH_GAPS[:, :1], "multilabel", 1, torch.tensor(WITH_GAPS[:, :1]).float()),
        (SEVERAL[:, 0].astype(float), "regression", 1, torch.tensor(SEVERAL[:, 0]).float()),
        (np.arange(120) / 7, "regression", 1, (torch.arange(120).double() / 7).float()),
        (X[:, :2] / 7, "regression", 2, torch.tensor(X[:, :2] / 7)),
        (MASKS.astype(np.uint8), "segmentation", 3, torch.tensor(MASKS)),
    ],
)
@pytest.mark.parametrize("split", ["auto", "dirichlet", "shards", "iid"])
def test_labels_stay_what_they_are_and_reach_the_clients(
    tmp_path: Path, y: Any, kind: str, outputs: int, expected: torch.Tensor, split: str
) -> None:
    images = np.broadcast_to(X[:, :1, None, None], (120, 1, 5, 6))  # masks need images of their size
    name = save(tmp_path, x=images if kind == "segmentation" else X, y=y)
    data = load_client_data(DataSpec(name))
    assert (data.kind, data.num_classes) == (kind, outputs)
    assert all_labels(data).dtype == expected.dtype
    assert torch.equal(all_labels(data).nan_to_num(-1), expected.nan_to_num(-1))
    clients = [load_client_data(DataSpec(name, split=split, partition=i, partitions=2, alpha=9.0)) for i in range(2)]
    assert {client.kind for client in clients} == {kind}
    seen = torch.cat([client.whole.inputs.flatten(1)[:, 0] for client in clients])
    assert sorted(seen.tolist()) == list(range(120))


def test_strata_are_classes_rarest_labels_tenths_and_largest_objects() -> None:
    several = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, np.nan, 1], [1, 0, 1]], np.float32)
    assert strata_of(several, "multilabel").tolist() == [1, 0, 3, 2, 2]
    numbers = np.arange(100, 0, -1, dtype=np.float32)
    assert strata_of(numbers, "regression").tolist() == [9 - i // 10 for i in range(100)]
    masks = np.array([[[0, 0], [0, 0]], [[0, 0], [0, 2]], [[1, 1], [2, 0]]])
    assert strata_of(masks, "segmentation").tolist() == [0, 2, 1]


def test_shares_of_numbers_are_few_tenths_for_each_client(tmp_path: Path) -> None:
    name = save(tmp_path, x=X, y=np.arange(120) / 1.0)
    client = load_client_data(DataSpec(name, split="shares", partition=0, partitions=5))
    assert len({int(label) // 12 for label in client.whole.labels}) <= 4  # two tenths, whose edges fall between


def test_no_conflicting_numbers_for_the_same_inputs(tmp_path: Path) -> None:
    name = save(tmp_path, x=X, y=X[:, 0] / 3)
    with pytest.raises(DataError, match=r"split 'concepts': expected classes, found .* with labels for regression"):
        load_client_data(DataSpec(name, split="concepts", partition=0, partitions=2))


@pytest.mark.parametrize("kind", ["shares", "shards", "dirichlet", "iid", "concepts"])
def test_no_split_cuts_a_group(tmp_path: Path, kind: str) -> None:
    group = np.arange(120) // 2
    name = save(tmp_path, x=X, y=group % 2, group=np.array([f"patient {number}" for number in group]))
    places: dict[int, set[tuple[int, str]]] = {}
    for client in range(3):
        data = load_client_data(DataSpec(name, split=kind, partition=client, partitions=3, alpha=9.0))
        for part in ("train", "val", "test"):
            for number in getattr(data, part).inputs[:, 0].int().tolist():
                places.setdefault(number // 2, set()).add((client, part))
    assert len(places) == 60
    assert {len(where) for where in places.values()} == {1}


def test_each_owner_is_a_client_in_the_order_of_names(tmp_path: Path) -> None:
    owner = np.array(["north", "east", "south"])[np.arange(120) % 3]
    name = save(tmp_path, x=X, y=np.arange(120) % 2, owner=owner)

    def of(client: int, clients: int) -> set[str]:
        data = load_client_data(DataSpec(name, split="owner", partition=client, partitions=clients))
        return {str(owner[int(number)]) for number in data.whole.inputs[:, 0]}

    assert [of(client, 3) for client in range(3)] == [{"east"}, {"north"}, {"south"}]
    assert sorted(len(of(client, 2)) for client in range(2)) == [1, 2]
    assert of(0, 2) | of(1, 2) == set(owner)
    with pytest.raises(DataError, match="partitions: expected at most 3, one owner each, found 4"):
        of(0, 4)
    with pytest.raises(DataError, match="split 'owner': expected data that name their owners, found digits without"):
        load_client_data(DataSpec("digits", split="owner", partition=0, partitions=2))


def write_medmnist(path: Path, labels: int, shape: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    """Write a file as MedMNIST publishes them: uint8 images and uint8 labels `(N, 1)` or `(N, L)`."""
    arrays: dict[str, Any] = {}
    for part, count in (("train", 50), ("val", 10), ("test", 20)):
        arrays[f"{part}_images"] = RNG.integers(0, 256, (count, *shape), np.uint8)
        arrays[f"{part}_labels"] = RNG.integers(0, 2, (count, labels), np.uint8)
    return save(path, **arrays), arrays


@pytest.mark.parametrize(
    ("labels", "shape", "kind", "inputs"),
    [(1, (28, 28), "classification", (1, 28, 28)), (14, (28, 28, 3), "multilabel", (3, 28, 28))],
)
def test_medmnist_is_read_as_it_is(
    tmp_path: Path, labels: int, shape: tuple[int, ...], kind: str, inputs: tuple[int, ...]
) -> None:
    name, arrays = write_medmnist(tmp_path, labels, shape)
    data = load_client_data(DataSpec(name))
    assert (data.kind, data.input_shape) == (kind, inputs)
    for part in ("train", "val", "test"):
        found = getattr(data, part)
        images = arrays[f"{part}_images"].reshape(len(found), 28, 28, -1).transpose(0, 3, 1, 2) / 255
        assert torch.allclose(found.inputs, torch.tensor(images).float())
        assert torch.equal(found.labels.reshape(len(found), -1).byte(), torch.tensor(arrays[f"{part}_labels"]))


def test_three_dimensional_medmnist_is_refused_in_one_line(tmp_path: Path) -> None:
    name, _ = write_medmnist(tmp_path, 1, (28, 28, 28))
    with pytest.raises(DataError, match=r"key 'x_train': expected uint8 images as \(N, H, W, C\)"):
        load_client_data(DataSpec(name))


def test_client_data_check_the_kind_of_labels() -> None:
    part = Examples(torch.zeros(4, 2), torch.zeros(4, 3))
    assert ClientData(part, part, part, 3, ("a", "b", "c"), kind="regression").class_shares.numel() == 0
    with pytest.raises(DataError, match=r"train: labels: expected floats \(N, L\) of 0, 1, .* \(4, 3\)"):
        ClientData(part, part, part, 2, ("a", "b"), kind="multilabel")
    with pytest.raises(DataError, match=r"train: labels: expected integers \(N,\), .*float32"):
        ClientData(part, part, part, 3, ("a", "b", "c"))


def test_a_client_knows_what_its_labels_are_for(tmp_path: Path) -> None:
    name = save(tmp_path, x=X, y=X[:, 0] / 3)
    client = Client(ClientSettings("a", DataSpec(name), state_dir=tmp_path))
    assert client.task_for(None).spec.name == "regression"
    with pytest.raises(RefusedError, match=r"not for the task of this run: labels: expected integers"):
        client.task_for("classification")


def test_masks_are_as_large_as_their_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected masks as large as the images, found \(5, 6\)"):
        load_client_data(DataSpec(save(tmp_path, x=np.zeros((120, 1, 6, 5), np.float32), y=MASKS)))
