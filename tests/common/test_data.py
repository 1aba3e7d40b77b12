"""What `load_client_data` promises whatever the data: types, shapes, determinism, refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hyperbloom.common.data import (
    DATASETS,
    PARTITIONERS,
    ClientData,
    DataSpec,
    Examples,
    data_source,
    load,
    load_client_data,
)
from hyperbloom.common.data.load import read_pool
from hyperbloom.common.errors import DataError

FINGERPRINT = """
import hashlib, json, sys
from hyperbloom.common.data import DataSpec, load_client_data
found = {}
for split in ("shares", "shards", "dirichlet", "iid", "concepts"):
    data = load_client_data(DataSpec(split=split, partition=3, partitions=5, seed=3, max_train=60))
    parts = (data.train, data.val, data.test)
    content = b"".join(part.inputs.numpy().tobytes() + part.labels.numpy().tobytes() for part in parts)
    found[split] = hashlib.sha256(content).hexdigest()
assert "sklearn" not in sys.modules, "its import takes a client a second"
print(json.dumps(found))
"""


def examples(count: int, classes: int = 2) -> Examples:
    """Return `count` examples of three features, example i with the value i and the label i % classes."""
    values = torch.arange(count, dtype=torch.float32)
    return Examples(values[:, None].expand(-1, 3).clone(), torch.arange(count) % classes)


def test_examples_to_moves_both_tensors() -> None:
    moved = examples(2).to("meta")
    assert (moved.inputs.device.type, moved.labels.device.type) == ("meta", "meta")


@pytest.mark.parametrize("channels", [1, 3])
def test_convolutions_compute_channels_last_on_images_of_any_number_of_channels(channels: int) -> None:
    images = torch.rand(6, channels, 8, 8)
    batch = Examples(images, torch.zeros(6, dtype=torch.int64)).to("cpu").inputs[torch.tensor([4, 0, 2])]
    assert torch.equal(batch, images[[4, 0, 2]])
    assert torch.nn.Conv2d(channels, 4, 3)(batch).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (
            torch.zeros(2, 3, dtype=torch.float64),
            torch.zeros(2, dtype=torch.int64),
            r"expected float32 .* found torch\.float64",
        ),
        (
            torch.zeros(2, 3, 4),
            torch.zeros(2, dtype=torch.int64),
            r"expected float32 .* found torch.float32 \(2, 3, 4\)",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(2, 2, 2),
            r"labels: expected int64 \(N,\) or .*, found torch.float32 \(2, 2, 2\)",
        ),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.float64), r"labels: .*, found torch.float64 \(2,\)"),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), "one label for each of 2 inputs, found 3"),
    ],
)
def test_examples_refuse_unfit_tensors(inputs: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Examples(inputs, labels)


def test_client_data_reports_shape_and_class_shares() -> None:
    data = ClientData(examples(4), examples(2), examples(2), 3, ("a", "b", "c"))
    assert data.input_shape == (3,)
    assert data.class_shares.tolist() == [0.5, 0.5, 0.0]
    assert data.summary.endswith("inputs (3,); classification, a: 4, b: 4, c: 0")


def test_a_summary_names_what_often_goes_wrong() -> None:
    rare = Examples(torch.zeros(20, 3), torch.tensor([0] * 19 + [1]))
    assert "Accuracy says little where 95% are alike" in ClientData(rare, rare, rare, 2, ("a", "b")).summary
    floats = Examples(torch.zeros(4, 3), torch.tensor([0.0, 1, 1, 0]))
    told = ClientData(floats, floats, floats, 1, ("y",), kind="regression").summary
    assert told.endswith("Store integers (in a table or list: words) if these few numbers are classes")
    numbers = Examples(torch.zeros(30, 3), torch.arange(440, 470))
    told = ClientData(numbers, numbers, numbers, 470, tuple(map(str, range(470)))).summary
    assert "classification, 440: 3, 441: 3," in told and told.endswith("459: 3. Store floats if these are numbers")
    for factor, told in (
        (1.0, ""),
        (100.0, ". Input 1 has a deviation of 50: standardise inputs alike at all clients"),
    ):
        wide = Examples(torch.tensor([[0.0, 0.0], [0.1, factor]] * 10), torch.tensor([0, 1] * 10))
        assert ClientData(wide, wide, wide, 2, ("a", "b")).summary.endswith(f"a: 30, b: 30{told}")
    pixels = Examples(torch.tensor([[[[0.0, 255.0]]], [[[255.0, 0.0]]]] * 10), torch.tensor([0, 1] * 10))
    assert "Input 0 has a deviation of 128" in ClientData(pixels, pixels, pixels, 2, ("a", "b")).summary


def test_client_data_refuses_parts_that_do_not_belong_together() -> None:
    wide = Examples(torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(DataError, match=r"val: expected inputs of shape \(3,\) as in train, found \(5,\)"):
        ClientData(examples(2), wide, examples(2), 2, ("a", "b"))
    with pytest.raises(DataError, match="test: expected labels from 0 to 1, found 0 to 4"):
        ClientData(examples(2), examples(2), examples(5, classes=5), 2, ("a", "b"))
    with pytest.raises(DataError, match="expected 3 class names, found 1"):
        ClientData(examples(2), examples(2), examples(2), 3, ("a",))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"partitions": 0}, "partitions: expected at least 1, found 0"),
        ({"classes_per_client": 0}, "classes_per_client: expected at least 1, found 0"),
        ({"max_train": 0}, "max_train: expected at least 1 or nothing at all, found 0"),
        ({"alpha": 0.0}, "alpha: expected a number above 0, found 0.0"),
        ({"alpha": float("nan")}, "alpha: expected a number above 0, found nan"),
        ({"partition": 3, "partitions": 3}, r"partition: expected 0 to 2 \(partitions - 1\), found 3"),
        ({"partition": -1}, "partition: expected 0 to 0 .*, found -1"),
    ],
)
def test_spec_refuses_numbers_out_of_range(values: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataSpec(**values)  # type: ignore[arg-type]


def test_root_is_the_argument_then_the_environment_then_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HYPERBLOOM_DATA", str(tmp_path / "environment"))
    assert DataSpec(root=tmp_path / "argument").folder == tmp_path / "argument"
    assert DataSpec().folder == tmp_path / "environment"
    monkeypatch.delenv("HYPERBLOOM_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert DataSpec().folder == tmp_path / ".cache" / "hyperbloom"


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(
        DataError,
        match=f"one of {', '.join(DATASETS)}; a path to .npz, .csv, .tsv or .parquet; .* found 'cifar-10'",
    ):
        load_client_data(DataSpec(data="cifar-10"))
    with pytest.raises(DataError, match=f"split: expected one of {', '.join(PARTITIONERS)}, found 'random'"):
        load_client_data(DataSpec(split="random"))


def test_registries_are_keyed_by_name_and_described() -> None:
    for info in DATASETS.values():
        assert info.description
    for partitioner in PARTITIONERS.values():
        assert partitioner.description
        assert "\n" not in partitioner.description


def test_all_of_the_data_belong_to_the_client_without_a_partition() -> None:
    data = load_client_data(DataSpec())
    assert [len(part) for part in (data.train, data.val, data.test)] == [1079, 359, 359]
    assert (data.input_shape, data.num_classes) == ((1, 8, 8), 10)
    assert data.class_shares.sum().item() == pytest.approx(1.0)


def test_registered_test_data_do_not_depend_on_the_seed() -> None:
    one, other = (load_client_data(DataSpec(seed=seed)) for seed in (0, 1))
    assert torch.equal(one.test.inputs, other.test.inputs)
    assert torch.equal(one.train.inputs, other.train.inputs)


def test_max_train_draws_nested_subsets_and_leaves_the_test_data() -> None:
    spec = {"partition": 1, "partitions": 4, "split": "iid", "seed": 5}
    few, more, all_of_it = (
        load_client_data(DataSpec(**spec, max_train=count))  # type: ignore[arg-type]
        for count in (10, 30, None)
    )
    assert [len(data.train) for data in (few, more, all_of_it)] == [10, 30, 270]
    assert rows(few.train) < rows(more.train) < rows(all_of_it.train)
    assert torch.equal(few.test.inputs, all_of_it.test.inputs)


def test_a_source_that_is_held_is_opened_and_dealt_once_and_one_that_is_not_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    specs = [DataSpec(partition=index, partitions=5, max_train=20) for index in range(5)]
    alone = [load_client_data(spec) for spec in specs]
    opened: list[DataSpec] = []
    monkeypatch.setattr(load, "read_pool", lambda spec: opened.append(spec) or read_pool(spec))
    held = data_source(specs[3])
    for spec, expected in zip(specs, alone, strict=True):
        data = load_client_data(spec)
        for part in ("train", "val", "test"):
            assert torch.equal(getattr(data, part).inputs, getattr(expected, part).inputs)
            assert torch.equal(getattr(data, part).labels, getattr(expected, part).labels)
    assert len(opened) == 1
    load_client_data(DataSpec(seed=1, partition=0, partitions=5, max_train=20))
    assert len(opened) == 2  # dealt otherwise: another source
    del held
    load_client_data(specs[0])
    load_client_data(specs[0])
    assert len(opened) == 4


def rows(part: Examples) -> set[bytes]:
    """Return the inputs as a set; the few drawings of the digits that are alike do not matter here."""
    return {image.numpy().tobytes() for image in part.inputs}


def test_processes_with_other_hash_seeds_get_the_same_bytes() -> None:
    running = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", FINGERPRINT]
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    found = [process.communicate()[0] for process in running]
    assert found[0] == found[1]
    assert len(set(json.loads(found[0]).values())) == 5


@pytest.mark.realdata
def test_real_cifar10_is_cut_as_in_the_paper() -> None:
    root = os.environ.get("HYPERBLOOM_DATA")
    if root is None:
        pytest.skip("HYPERBLOOM_DATA does not name a folder with the official CIFAR-10 files")
    data = load_client_data(DataSpec(data="cifar10", root=Path(root), partition=0, partitions=10))
    total = len(data.train) + len(data.val) + len(data.test)
    assert 0.8 * 6000 <= total <= 1.2 * 6000
    assert (data.train.labels.unique().tolist()) == data.test.labels.unique().tolist()
    assert data.class_shares.count_nonzero().item() == 2
