"""Data sets of the hub from disk, and Flower's partitioners: equal to what flwr-datasets itself deals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr_datasets", reason="extra datasets")
from datasets import Array2D, ClassLabel, Dataset, DatasetDict, Features, Image, Value
from flwr_datasets import FederatedDataset, partitioner

from hyperbloom.common.data import DataSpec, load_client_data
from hyperbloom.common.data.files import need
from hyperbloom.common.errors import DataError

# Their shards are sorted with a call of pyarrow that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")

CLIENTS = 4
SIZES = {"train": 240, "validation": 60, "test": 60}


def table(size: int, start: int) -> Dataset:
    """Return examples whose only feature numbers them, in three named classes."""
    numbers = np.arange(start, start + size, dtype=np.float32)
    labels = ClassLabel(names=["well", "ill", "unclear"])
    features = Features({"x": Array2D((1, 1), "float32"), "label": labels})
    return Dataset.from_dict({"x": numbers[:, None, None], "label": (numbers % 3).astype(int)}, features=features)


@pytest.fixture
def parts() -> DatasetDict:
    starts = dict(zip(SIZES, (0, 1000, 2000), strict=True))
    return DatasetDict({name: table(size, starts[name]) for name, size in SIZES.items()})


@pytest.fixture
def files(parts: DatasetDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a data set as files, which load as one of the hub does."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "files").mkdir()
    for name, part in parts.items():
        part.to_parquet(tmp_path / "files" / f"{name}.parquet")
    return tmp_path / "files"


def numbers(inputs: Any) -> list[int]:
    return [int(number) for number in np.asarray(inputs).reshape(-1)]


@pytest.mark.parametrize(
    ("split", "make"),
    [
        ("flwr-iid", lambda: partitioner.IidPartitioner(CLIENTS)),
        ("flwr-dirichlet", lambda: partitioner.DirichletPartitioner(CLIENTS, "label", 0.7, seed=5)),
        ("flwr-pathological", lambda: partitioner.PathologicalPartitioner(CLIENTS, "label", 2, seed=5)),
        (
            "flwr-shard",
            lambda: partitioner.ShardPartitioner(CLIENTS, "label", num_shards_per_partition=2, seed=5),
        ),
    ],
)
def test_a_client_has_the_partition_that_flower_gives(files: Path, split: str, make: Callable[[], Any]) -> None:
    source = FederatedDataset(dataset=str(files), partitioners={"train": make()}, seed=5)
    dealt = []
    for client in range(CLIENTS):
        spec = DataSpec(f"hf:{files}", split=split, alpha=0.7, partition=client, partitions=CLIENTS, seed=5)
        data = load_client_data(spec)
        theirs = numbers(source.load_partition(client)["x"])
        ours = numbers(data.train.inputs)
        assert sorted(ours) == sorted(theirs) and ours
        assert data.train.labels.tolist() == [number % 3 for number in ours]
        assert data.class_names == ("well", "ill", "unclear")
        assert set(data.test.labels.tolist()) <= set(data.train.labels.tolist())
        dealt += numbers(data.test.inputs)
    assert len(dealt) == len(set(dealt)) and set(dealt) <= set(range(2000, 2060))


def test_a_saved_folder_holds_the_same_and_missing_parts_are_held_out(
    parts: DatasetDict, files: Path, tmp_path: Path
) -> None:
    parts.save_to_disk(str(tmp_path / "saved"))
    data, other = (load_client_data(DataSpec(f"hf:{folder}")) for folder in (tmp_path / "saved", files))
    assert numbers(data.train.inputs) == numbers(other.train.inputs) and len(data.train) == 240
    for gone, sizes in (("validation", (192, 48, 60)), ("test", (168, 36, 36))):
        del parts[gone]
        parts.save_to_disk(str(tmp_path / gone))
        data = load_client_data(DataSpec(f"hf:{tmp_path / gone}"))
        assert tuple(len(part) for part in (data.train, data.val, data.test)) == sizes


def test_images_are_bytes_and_columns_can_be_named(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (30, 6, 5, 3), dtype=np.uint8)
    features = Features({"img": Image(), "fine_label": ClassLabel(num_classes=3), "coarse_label": Value("int64")})
    columns = {"img": list(images), "fine_label": [0, 1, 2] * 10, "coarse_label": [0] * 30}
    DatasetDict({"train": Dataset.from_dict(columns, features=features)}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"expected one column for the input, found img, coarse_label among"):
        load_client_data(DataSpec(f"hf:{tmp_path}/saved"))
    data = load_client_data(DataSpec(f"hf:{tmp_path}/saved?input=img&label=fine_label"))
    assert data.input_shape == (3, 6, 5)
    found = {tuple(numbers(255 * image + 0.5)) for image in data.train.inputs}
    assert found <= {tuple(numbers(image.transpose(2, 0, 1))) for image in images}
    for query, message in (("input=image", "expected a column image"), ("inputs=img&input=img", "found inputs")):
        with pytest.raises(DataError, match=message):
            load_client_data(DataSpec(f"hf:{tmp_path}/saved?{query}&label=fine_label"))


def test_what_cannot_be_loaded_or_dealt_is_one_line(files: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^hf:.*/nowhere: cannot be loaded: "):
        load_client_data(DataSpec(f"hf:{tmp_path}/nowhere"))
    with pytest.raises(DataError, match=r"^split 'flwr-pathological': "):
        load_client_data(
            DataSpec(f"hf:{files}", split="flwr-pathological", classes_per_client=9, partition=0, partitions=2)
        )
    with pytest.raises(DataError, match=r"pip install 'hyperbloom\[datasets\]'$"):
        need("flwr_datasets_of_nobody", "'hyperbloom[datasets]'")
