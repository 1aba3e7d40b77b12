"""The registered data sets, on small files that the tests write in the published formats."""

import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hyperbloom.common.data import DATASETS, ClientData, DataSpec, load_client_data
from hyperbloom.common.data.files import need
from hyperbloom.common.data.load import read_pool
from hyperbloom.common.data.published import FileBlock
from hyperbloom.common.errors import DataError

Bytes = NDArray[np.uint8]
IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def pixels(count: int, *shape: int) -> Bytes:
    """Return random images, the first byte of each its number so that it can be told from the others."""
    images = np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)
    images.reshape(count, -1)[:, 0] = np.arange(count)
    return images


def idx(array: Bytes) -> bytes:
    """Return `array` as the content of an idx file."""
    return bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_idx(root: Path, folder: str = "MNIST") -> Bytes:
    """Write 100 training and 20 test images of labels 0, 1, .. 9, 0, 1 .. and return the training images."""
    raw = root / folder / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    train, labels = pixels(100, 28, 28), np.arange(100, dtype=np.uint8) % 10
    for name, array in zip(IDX, (train, labels, train[:20], labels[:20]), strict=True):
        (raw / name).write_bytes(idx(array))
    return train


def write_cifar10(folder: Path) -> Bytes:
    """Write five batches of 20 and a test batch of 20 images; return the training images `(100, 3, 32, 32)`."""
    folder.mkdir(parents=True, exist_ok=True)
    images = pixels(100, 3, 32, 32)
    labels = (np.arange(100, dtype=np.uint8) % 10)[:, None]
    records = np.concatenate([labels, images.reshape(100, -1)], axis=1)
    for number in range(5):
        (folder / f"data_batch_{number + 1}.bin").write_bytes(records[20 * number : 20 * number + 20].tobytes())
    (folder / "test_batch.bin").write_bytes(records[:20].tobytes())
    return images


def write_cifar100(folder: Path) -> Bytes:
    """Write 200 training and 200 test images, two of each fine class; return the training images."""
    folder.mkdir(parents=True, exist_ok=True)
    images, fine = pixels(200, 3, 32, 32), np.arange(200) % 100
    columns = ((fine // 5)[:, None].astype(np.uint8), fine[:, None].astype(np.uint8), images.reshape(200, -1))
    content = np.concatenate(columns, axis=1).tobytes()
    (folder / "train.bin").write_bytes(content)
    (folder / "test.bin").write_bytes(content)
    return images


def check_pixels(data: ClientData, images: Bytes, mean: list[float], std: list[float]) -> None:
    """Check that every input of the training and validation sets is the stored image of its number."""
    spread, centre = torch.tensor(std).view(-1, 1, 1), torch.tensor(mean).view(-1, 1, 1)
    numbers = []
    for part in (data.train, data.val):
        for image, label in zip(part.inputs, part.labels, strict=True):
            restored = ((image * spread + centre) * 255).round().to(torch.uint8).numpy()
            number = int(restored.flat[0])
            assert np.array_equal(restored, images[number].reshape(restored.shape))
            assert int(label) == number % data.num_classes
            numbers.append(number)
    assert sorted(numbers) == list(range(len(images)))


def test_digits_are_normalised_and_stratified() -> None:
    data = load_client_data(DataSpec(data="digits"))
    everything = torch.cat([part.inputs for part in (data.train, data.val, data.test)])
    assert everything.mean().item() == pytest.approx(0.0, abs=1e-3)
    assert everything.std().item() == pytest.approx(1.0, abs=1e-3)
    assert data.train.labels.bincount().sub(data.train.labels.bincount().float().mean()).abs().max() < 5


@pytest.mark.parametrize(
    ("name", "folder", "mean", "std"),
    [("mnist", "MNIST", 0.1307, 0.3081), ("fashion-mnist", "FashionMNIST", 0.286, 0.353)],
)
def test_idx_files_are_read_to_the_pixel(
    tmp_path: Path, name: str, folder: str, mean: float, std: float, torchvision: Any
) -> None:
    images = write_idx(tmp_path, folder)
    data = load_client_data(DataSpec(data=name, root=tmp_path))
    assert [len(part) for part in (data.train, data.val, data.test)] == [80, 20, 20]
    assert (data.input_shape, data.num_classes) == (DATASETS[name].input_shape, 10)
    check_pixels(data, images, [mean], [std])


@pytest.mark.parametrize("folder", ["cifar-10-batches-bin", "."])
def test_cifar10_is_read_to_the_pixel(tmp_path: Path, folder: str) -> None:
    images = write_cifar10(tmp_path / folder)
    data = load_client_data(DataSpec(data="cifar10", root=tmp_path))
    assert [len(part) for part in (data.train, data.val, data.test)] == [80, 20, 20]
    assert data.class_names == tuple("0123456789")
    check_pixels(data, images, [0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010])


def test_cifar10_takes_its_class_names_from_the_file_beside_it(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    (tmp_path / "batches.meta.txt").write_text("\n".join(names) + "\n\n")
    assert load_client_data(DataSpec(data="cifar10", root=tmp_path)).class_names == tuple(names)


def test_cifar100_is_read_to_the_pixel(tmp_path: Path) -> None:
    images = write_cifar100(tmp_path / "cifar-100-binary")
    data = load_client_data(DataSpec(data="cifar100", root=tmp_path))
    check_pixels(data, images, [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762])
    assert data.num_classes == 100


def test_a_client_reads_its_own_records_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path)
    read: list[int] = []
    take = FileBlock.__getitem__

    def counting(block: FileBlock, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        read.append(len(rows))
        return take(block, rows)

    monkeypatch.setattr(FileBlock, "__getitem__", counting)
    data = load_client_data(DataSpec(data="cifar10", root=tmp_path, split="iid", partition=0, partitions=10))
    assert sum(read) == len(data.train) + len(data.val) + len(data.test) == 12


def test_portions_keep_the_order_that_was_asked_for(tmp_path: Path) -> None:
    images = write_cifar10(tmp_path)
    train = read_pool(DataSpec(data="cifar10", root=tmp_path)).train
    wanted = np.array([70, 3, 41, 3])
    assert np.array_equal(train.choose(wanted).stored(), images[train.rows[wanted]])


def test_missing_files_are_named_with_every_place_and_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError) as found:
        load_client_data(DataSpec(data="cifar10", root=tmp_path))
    for part in (
        "cifar10 not found; looked at",
        "data_batch_1.bin",
        "cifar-10-batches-bin",
        "cifar-10-batches-py",
        f"Fetch them: flower-client download cifar10 --root {tmp_path}",
    ):
        assert part in str(found.value)
    with pytest.raises(DataError, match=f"mnist not found; looked at {tmp_path}/MNIST/raw. Fetch .* download mnist"):
        load_client_data(DataSpec(data="mnist", root=tmp_path))
    write_cifar10(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_3.bin not found; .* download cifar10"):
        load_client_data(DataSpec(data="cifar10", root=tmp_path))


def test_corrupt_cifar_files_are_named_with_their_bytes(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    path = tmp_path / "data_batch_2.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    with pytest.raises(DataError, match=r"data_batch_2.bin: expected records of 3073 bytes, .* found 61455 bytes"):
        load_client_data(DataSpec(data="cifar10", root=tmp_path))
    path.write_bytes(content[: 3073 * 3] + b"\x0b" + content[3073 * 3 + 1 :])
    with pytest.raises(DataError, match=r"data_batch_2.bin: expected labels from 0 to 9, found label 11 at record 3"):
        load_client_data(DataSpec(data="cifar10", root=tmp_path))


@pytest.mark.parametrize(
    ("number", "content", "message"),
    [
        (0, idx(pixels(100, 28, 28))[:-1], "expected the files of MNIST, whole, found "),
        (0, b"", "expected the files of MNIST, whole, found "),
        (0, b"<html>not found</html>" * 2, "expected the files of MNIST, whole, found "),
        (0, bytes((0, 0, 10, 3)) + bytes(12), "expected the files of MNIST, whole, found "),
        (0, idx(pixels(100, 28)), "expected the files of MNIST, whole, found "),
        (0, idx(pixels(100, 5, 5)), r"expected images of \(28, 28\), found \(5, 5\)"),
        (1, idx(np.zeros(100, np.uint8))[:-3], "expected the files of MNIST, whole, found "),
        (1, idx(np.zeros(99, np.uint8)), "labels: expected 100 labels, as .* images, found 99"),
        (1, idx(np.full(100, 10, np.uint8)), "expected labels from 0 to 9, found label 10 at record 0"),
    ],
)
def test_corrupt_idx_files_are_told_in_one_line(
    tmp_path: Path, number: int, content: bytes, message: str, torchvision: Any
) -> None:
    write_idx(tmp_path)
    folder = tmp_path / "MNIST" / "raw"
    (folder / IDX[number]).write_bytes(content)
    with pytest.raises(DataError, match=f"^{folder}:? {message}") as found:
        load_client_data(DataSpec(data="mnist", root=tmp_path))
    assert "\n" not in str(found.value)


def test_idx_files_that_are_absent_or_packed_are_told_with_a_way_out(tmp_path: Path, torchvision: Any) -> None:
    write_idx(tmp_path)
    (tmp_path / "MNIST" / "raw" / IDX[3]).rename(tmp_path / "MNIST" / "raw" / f"{IDX[3]}.gz")
    with pytest.raises(
        DataError,
        match=f"whole, found .* download mnist --root {tmp_path}; or put the official files there, unpacked$",
    ):
        load_client_data(DataSpec(data="mnist", root=tmp_path))


def test_download_happens_when_asked_and_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torchvision: Any
) -> None:
    calls: list[str] = []

    def fetch(dataset: Any) -> None:
        calls.append(dataset.root)
        write_idx(Path(dataset.root))

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", fetch)
    spec = DataSpec(data="mnist", root=tmp_path / "new", download=True)
    (tmp_path / "new" / "MNIST" / "raw").mkdir(parents=True)  # what an interrupted download may leave
    assert len(load_client_data(spec).train) == 80
    load_client_data(spec)
    assert len(calls) == 1
    (tmp_path / "new" / "MNIST" / "raw" / IDX[0]).write_bytes(b"cut short")
    assert len(load_client_data(spec).train) == 80
    assert len(calls) == 2
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["MNIST"]


def test_failed_downloads_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torchvision: Any
) -> None:
    def fetch(dataset: Any) -> None:
        raise RuntimeError("Error downloading train-images")

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", fetch)
    with pytest.raises(DataError, match=f"MNIST could not be downloaded into {tmp_path}: Error downloading"):
        load_client_data(DataSpec(data="mnist", root=tmp_path, download=True))


def write_python_version(root: Path, monkeypatch: pytest.MonkeyPatch, torchvision: Any) -> Bytes:
    """Write CIFAR-100's Python version of 100 images and make torchvision expect these files' checksums."""
    images = pixels(100, 3, 32, 32)
    table = {"data": images.reshape(100, -1), "fine_labels": list(range(100))}
    names = {"fine_label_names": [f"class{number}" for number in range(100)]}
    folder = root / "cifar-100-python"
    folder.mkdir()
    sums = {}
    for name, value in (("train", table), ("test", table), ("meta", names)):
        (folder / name).write_bytes(pickle.dumps(value))
        sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    source = torchvision.datasets.CIFAR100
    monkeypatch.setattr(source, "train_list", [["train", sums["train"]]])
    monkeypatch.setattr(source, "test_list", [["test", sums["test"]]])
    monkeypatch.setattr(source, "meta", {"filename": "meta", "key": "fine_label_names", "md5": sums["meta"]})
    return images


def test_the_python_version_is_read_through_torchvision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torchvision: Any
) -> None:
    images = write_python_version(tmp_path, monkeypatch, torchvision)
    data = load_client_data(DataSpec(data="cifar100", root=tmp_path))
    check_pixels(data, images, [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762])
    assert data.class_names[7] == "class7"


def test_a_python_version_of_another_checksum_is_never_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torchvision: Any
) -> None:
    write_python_version(tmp_path, monkeypatch, torchvision)
    path = tmp_path / "cifar-100-python" / "train"
    path.write_bytes(path.read_bytes() + b" ")
    monkeypatch.setattr(pickle, "load", lambda *_, **__: pytest.fail("unpickled an unverified file"))
    with pytest.raises(
        DataError, match=r"cifar-100-python: expected the files of CIFAR100, whole, found RuntimeError: .*corrupted"
    ):
        load_client_data(DataSpec(data="cifar100", root=tmp_path))


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(DataError, match=r"this data needs some-package, .*: pip install some-package"):
        need("hyperbloom_lacks_this", "some-package")


def test_a_torchvision_for_another_torch_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unfit.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"needs torchvision, .*nms does not exist\): pip install torchvision$"):
        need("unfit", "torchvision")
