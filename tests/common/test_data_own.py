"""Users' own data: `.npz` files, folders of images, functions; and every way in which they can be wrong."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hyperbloom.common.data import ClientData, DataSpec, load_client_data
from hyperbloom.common.errors import DataError

SPLIT = {
    "x_train": np.zeros((10, 3)),
    "y_train": np.arange(10) % 2,
    "x_test": np.ones((4, 3)),
    "y_test": np.arange(4) % 2,
}


def save(path: Path, **arrays: Any) -> str:
    """Write an .npz file and return what to write for `data`."""
    np.savez(path / "own.npz", **arrays)
    return str(path / "own.npz")


def load(data: str, **values: Any) -> ClientData:
    """Load `data` with a few settings."""
    return load_client_data(DataSpec(data=data, **values))


def sizes(data: ClientData) -> list[int]:
    """Return the numbers of training, validation and test examples."""
    return [len(data.train), len(data.val), len(data.test)]


def test_npz_of_x_and_y_is_split_in_proportion_and_by_seed(tmp_path: Path) -> None:
    x = np.arange(200, dtype=np.float64)[:, None] * np.ones(3)
    name = save(tmp_path, x=x, y=np.arange(200) % 4, class_names=np.array(["a", "b", "c", "d"]))
    data, again, other = load(name), load(name), load(name, seed=1)
    assert sizes(data) == [140, 30, 30]
    assert data.class_names == ("a", "b", "c", "d")
    assert (data.train.labels.bincount() - 35).abs().max() <= 1
    assert (data.test.labels.bincount() - 7.5).abs().max() <= 0.5
    numbers = torch.cat([part.inputs[:, 0] for part in (data.train, data.val, data.test)])
    assert sorted(numbers.tolist()) == list(range(200))
    assert torch.equal(data.test.inputs, again.test.inputs)
    assert not torch.equal(data.test.inputs, other.test.inputs)


def test_npz_with_a_test_set_keeps_it_whole(tmp_path: Path) -> None:
    data = load(save(tmp_path, **SPLIT))
    assert sizes(data) == [8, 2, 4]
    assert data.test.inputs.eq(1).all()
    data = load(save(tmp_path, **SPLIT, x_val=np.full((3, 3), 5.0), y_val=np.array([0, 1, 2])))
    assert sizes(data) == [10, 3, 4]
    assert (data.val.inputs.eq(5).all(), data.num_classes) == (torch.tensor(True), 3)


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((20, 5), np.uint8, (5,)),
        ((20, 6, 7), np.uint8, (1, 6, 7)),
        ((20, 6, 7, 3), np.uint8, (3, 6, 7)),
        ((20, 3, 6, 7), np.uint8, (3, 6, 7)),
        ((20, 6, 7), np.float64, (1, 6, 7)),
        ((20, 12, 6, 7), np.float32, (12, 6, 7)),
    ],
)
def test_npz_inputs_of_every_layout(
    tmp_path: Path, shape: tuple[int, ...], dtype: type, expected: tuple[int, ...]
) -> None:
    x: np.ndarray[Any, Any] = np.full(shape, 51, dtype)
    data = load(save(tmp_path, x=x, y=np.arange(20) % 2))
    assert data.input_shape == expected
    assert data.train.inputs.unique().item() == pytest.approx(0.2 if dtype is np.uint8 else 51.0)
    assert data.train.inputs.is_contiguous()


def test_npz_channels_go_where_they_belong(tmp_path: Path) -> None:
    x = np.zeros((20, 6, 7, 3), np.uint8)
    x[:, 4, 5, 2] = 255
    inputs = load(save(tmp_path, x=x, y=np.zeros(20, int))).train.inputs
    assert inputs[:, 2, 4, 5].eq(1).all()
    assert inputs.sum().item() == len(inputs)


@pytest.mark.parametrize("split", ["shares", "dirichlet", "iid"])
def test_own_data_can_be_dealt_to_clients(tmp_path: Path, split: str) -> None:
    name = save(tmp_path, x=np.arange(400.0)[:, None], y=np.arange(400) % 4)
    clients = [load(name, split=split, partition=i, partitions=4, alpha=5.0) for i in range(4)]
    assert sum(len(client.train) for client in clients) == 280
    seen = torch.cat([client.train.inputs[:, 0] for client in clients])
    assert len(seen.unique()) == 280


def test_small_owners_have_a_share_of_each_part(tmp_path: Path) -> None:
    """By class alone some of fifty would have no example for validation or test."""
    owners = np.repeat(np.arange(50), 20)
    name = save(tmp_path, x=np.arange(1000.0)[:, None], y=np.arange(1000) % 3, owner=owners)
    for seed in range(3):
        parts = [load(name, split="owner", partition=i, partitions=50, seed=seed) for i in range(50)]
        assert {tuple(sizes(part)) for part in parts} <= {(14, 3, 3)}
    together = load(name, split="owner", partition=0, partitions=5)  # the parts are those of all examples
    assert sum(sizes(together)) == 200


@pytest.mark.parametrize("small", [["ward"], ["lab", "ward"]])
def test_owners_that_are_too_small_are_named(small: list[str], tmp_path: Path) -> None:
    """Two owners may be one client; then both are named."""
    owners = np.array((["clinic"] * 96 if len(small) == 1 else ["clinic"] * 48 + ["home"] * 48) + (small * 4)[:4])
    name = save(tmp_path, x=np.arange(100.0)[:, None], y=np.arange(100) % 2, owner=owners)
    with pytest.raises(DataError, match=rf"leave small owners out, here {', '.join(small)}, or take fewer clients"):
        for seed in range(40):
            load(name, split="owner", partition=1, partitions=2, seed=seed)


def test_arrays_that_are_not_used_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A misspelt group would let a patient be in training and in test."""
    x, y = np.zeros((20, 3), np.float32), np.arange(20) % 2
    load(save(tmp_path, x=x, y=y, group=np.arange(20) // 2))
    assert not caplog.records
    load(save(tmp_path, x=x, y=y, groups=y, words=y))
    load(save(tmp_path, x_train=x, y_train=y, x_test=x, y_test=y, group=y))
    assert ["not used: groups, words;" in caplog.text, "not used: group;" in caplog.text] == [True, True]


def unusable() -> Iterator[tuple[dict[str, Any], str]]:
    """Yield arrays that cannot be used, and what is to be said of them."""
    x, y = np.zeros((10, 3)), np.arange(10) % 2
    yield {"x": x}, "expected the keys x and y; or x_train, .*; found x$"
    yield {"images": x, "labels": y}, "expected the keys .*; found images, labels"
    yield {key: SPLIT[key] for key in ("x_train", "y_train")}, "expected the keys .*; found x_train, y_train"
    yield {**SPLIT, "x_val": x}, "expected the keys .*; found x_test, x_train, x_val, y_test, y_train"
    yield {"x": x, "y": y[:9]}, "key 'y': expected 10 labels, as .* key 'x', found 9"
    yield {"x": x * np.nan, "y": y}, "key 'x': expected finite float32 numbers, found 30 of 30 that are not, .*at .0"
    yield {"x": x + 1e300, "y": y}, "key 'x': expected finite float32 numbers, found 30"
    yield {"x": x.astype(str), "y": y}, "key 'x': expected numbers, found dtype <U"
    yield {"x": x[0], "y": y}, r"key 'x': expected shape \(N, F\), .*, found \(3,\)"
    yield {"x": x[:, :0], "y": y}, r"key 'x': expected shape .*, found \(10, 0\)"
    yield {"x": np.zeros((10, 8, 8, 3)), "y": y}, r"key 'x': expected floats as \(N, C, H, W\), found \(10, 8, 8, 3\)"
    yield {"x": np.zeros((10, 5, 8, 3)), "y": y}, r"key 'x': expected floats as \(N, C, H, W\), found \(10, 5, 8, 3\)"
    yield {**SPLIT, "x": x, "y": y}, "expected the keys .*; found x, x_test, x_train, y, y_test, y_train"
    yield {"x": np.zeros((10, 8, 8, 7), np.uint8), "y": y}, r"key 'x': expected uint8 images as \(N, H, W, C\)"
    yield {"x": x, "y": y.astype(str)}, "key 'y': expected integers .*, found dtype <U"
    yield {"x": x, "y": y[:, None, None].astype(float)}, r"key 'y': expected .*, found float64 \(10, 1, 1\)"
    yield (
        {"x": x, "y": y / np.where(y, 1, np.nan)},
        "key 'y': expected finite numbers, or labels .*, found 5 not finite, the first at .0.$",
    )
    yield (
        {"x": x, "y": y[:, None] * [1, 2]},
        r"key 'y': expected labels \(N, L\) of 0 and 1, found int64 .* from 0 to 2",
    )
    yield (
        {"x": x, "y": y[:, None, None] * 255},
        "key 'y': expected floats, or classes .* without gaps, found 255 among 10 labels",
    )
    yield {"x": x, "y": np.zeros((10, 0))}, r"key 'y': expected .*, found float64 \(10, 0\)"
    yield (
        {"x": x, "y": y[:, None] * [1, 0], "class_names": np.array(["a"])},
        "expected a name for each of 2 .*, found 1",
    )
    yield {"x": x, "y": y, "owner": y[:9]}, "expected 10 owners, strings or integers, found int64"
    yield {"x": x, "y": y, "group": np.zeros(10)}, "expected 10 groups, strings or integers, found float64"
    yield {"x": x, "y": y, "group": np.zeros(10, int)}, "key 'x': expected at least 3 groups to split, found 1"
    yield (
        {"x": x, "y": y, "group": np.arange(10) // 3, "owner": np.arange(10)},
        "expected each group in one of .* and with one owner",
    )
    yield {**SPLIT, "group_train": np.arange(10)}, "expected group for each of _train, _test, found group_train"
    yield {**SPLIT, "group_train": np.arange(10), "group_test": np.arange(9, 13)}, "expected each group in one of train"
    yield {**SPLIT, "y_test": np.zeros((4, 2))}, r"key 'x_test': expected labels of int64 \(\) .*, found float32 \(2,\)"
    yield {"x": x, "y": y - 1}, "key 'y': expected floats, or classes counted from 0, found -1"
    yield (
        {"x": x, "y": y + 100_000},
        "key 'y': expected floats, or classes .* without gaps, found 100001 among 10 labels",
    )
    yield {"x": x, "y": y, "class_names": np.array(["a"])}, "expected a name for each of 2 classes, found 1"
    yield {"x": x, "y": y, "class_names": np.array(["a", "a"])}, "expected each class name once, found a, a"
    yield {"x": x, "y": y, "class_names": np.arange(2)}, r"key 'class_names': expected strings \(K,\), found int64"
    yield {"x": x[:2], "y": y[:2]}, "key 'x': expected at least 3 examples to split, found 2"
    yield {**SPLIT, "x_train": x[:1], "y_train": y[:1]}, "key 'x_train': expected at least 2 examples to split, found 1"
    yield {**SPLIT, "x_test": np.ones((4, 5))}, r"key 'x_test': expected float32 inputs of shape \(3,\) .* \(5,\)"
    yield {**SPLIT, "x_test": np.ones((4, 3), np.uint8)}, r"key 'x_test': expected float32 .*, found uint8 \(3,\)"
    yield {**SPLIT, "x_test": np.ones((0, 3)), "y_test": y[:0]}, "expected examples in test, found none; add some"
    yield {"x": np.array([{}], object), "y": y[:1]}, "expected a whole .npz of plain arrays, found .* bytes: Object"


@pytest.mark.parametrize(("arrays", "message"), list(unusable()))
def test_unusable_npz_files_are_named(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    name = save(tmp_path, **arrays)
    with pytest.raises(DataError, match=rf"own.npz: {message}"):
        load(name)


def test_missing_and_truncated_npz_files_are_named(tmp_path: Path) -> None:
    name = save(tmp_path, **SPLIT)
    Path(name).write_bytes(Path(name).read_bytes()[:50])
    with pytest.raises(DataError, match=r"own.npz: expected a whole .npz of plain arrays, found 50 bytes"):
        load(name)
    Path(name).write_text("hello")
    with pytest.raises(DataError, match=r"found 5 bytes: no zip archive, or one that was cut off$"):
        load(name)
    with pytest.raises(DataError, match=r"other.npz: expected an .npz file, found none of this name"):
        load(str(tmp_path / "other.npz"))


def draw(path: Path, value: int, size: tuple[int, int] = (5, 4), mode: str = "RGB") -> None:
    """Write an image of one colour, `size` is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colour: Any = {"L": value, "RGB": (value, 0, 0), "RGBA": (value, 0, 0, 255), "I;16": value}[mode]
    Image.new(mode, size, colour).save(path)


def draw_classes(root: Path, count: int, mode: str = "RGB") -> None:
    """Write `count` images of each of two classes: cats of value 100, dogs of 200."""
    for name, value in (("cat", 100), ("dog", 200)):
        for number in range(count):
            draw(root / name / f"{number}.png", value, mode=mode)


def test_folder_of_classes_is_split_in_proportion(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    draw_classes(tmp_path, 20)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "cat" / "._1.png").write_text("what macOS adds to an archive")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "__MACOSX" / "cat").mkdir(parents=True)
    data = load(str(tmp_path))
    assert sizes(data) == [28, 6, 6]
    assert (data.input_shape, data.class_names) == ((3, 4, 5), ("cat", "dog"))
    expected = torch.where(data.train.labels == 0, 100 / 255, 200 / 255)
    assert torch.equal(data.train.inputs[:, 0, 2, 3], expected)
    assert data.train.inputs[:, 1:].eq(0).all()
    (told,) = caplog.messages
    assert told.startswith(f"{tmp_path / 'cat' / 'notes.txt'} and 0 more: not read, expected images (.png, ")


def test_folder_with_train_and_test_keeps_them(tmp_path: Path) -> None:
    draw_classes(tmp_path / "train", 10, mode="L")
    draw(tmp_path / "test" / "dog" / "a.bmp", 255, mode="RGB")
    data = load(str(tmp_path))
    assert sizes(data) == [16, 4, 1]
    assert (data.input_shape, data.test.labels.tolist()) == ((1, 4, 5), [1])
    assert data.test.inputs.unique().item() == pytest.approx(76 / 255)  # red as grey
    draw(tmp_path / "val" / "cat" / "a.JPG", 50)
    assert sizes(load(str(tmp_path))) == [20, 1, 1]


@pytest.mark.parametrize("odd", ["cat/-1.png", "dog/9.png"])
def test_folder_is_grey_or_colour_as_most_of_its_images_are(tmp_path: Path, odd: str) -> None:
    draw_classes(tmp_path, 5, mode="RGBA")
    draw(tmp_path / odd, 200, mode="L")
    data = load(str(tmp_path))
    grey = torch.cat([part.inputs for part in (data.train, data.val, data.test)])[:, 1].amax(dim=(1, 2))
    assert data.input_shape == (3, 4, 5)
    assert grey.gt(0).sum().item() == 1


def test_a_class_called_train_is_a_class(tmp_path: Path) -> None:
    draw_classes(tmp_path, 5)
    for number in range(5):
        draw(tmp_path / "train" / f"{number}.png", 7)
    assert load(str(tmp_path)).class_names == ("cat", "dog", "train")


def test_unusable_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected one folder of images for each class, found no folders"):
        load(str(tmp_path))
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match=r"expected images \(.png, .jpg, .jpeg, .bmp\) in folders by class, found none"):
        load(str(tmp_path))
    draw_classes(tmp_path / "train", 3)
    with pytest.raises(DataError, match=r"expected train/, test/ .*, found train/$"):
        load(str(tmp_path))
    draw_classes(tmp_path / "test", 1)
    draw_classes(tmp_path / "validation", 1)
    with pytest.raises(DataError, match=r"expected train/, test/ .*, found test/, train/, validation/$"):
        load(str(tmp_path))
    shutil.rmtree(tmp_path / "validation")
    draw(tmp_path / "test" / "cow" / "1.png", 1)
    with pytest.raises(DataError, match=r"test: expected the classes of train \(cat, dog\), found cow"):
        load(str(tmp_path))


def test_unusable_images_are_named(tmp_path: Path) -> None:
    draw_classes(tmp_path, 5)
    odd = tmp_path / "dog" / "3.png"
    draw(odd, 1, size=(9, 4))
    with pytest.raises(DataError, match=r"3.png: expected an image of 5 x 4 as .*0.png, found 9 x 4; resize"):
        load(str(tmp_path))
    odd.write_bytes(b"none")
    with pytest.raises(DataError, match=r"3.png: expected an image, found 4 bytes"):
        load(str(tmp_path))
    draw(odd, 1)
    odd.write_bytes(odd.read_bytes()[:45])
    with pytest.raises(DataError, match=r"3.png: expected an image, found 45 bytes: .*truncated"):
        load(str(tmp_path))
    draw(odd, 1, mode="I;16")
    with pytest.raises(DataError, match=r"3.png: expected an image of 8 bits a channel, found mode I;16"):
        load(str(tmp_path))


FUNCTIONS = """
import numpy as np
import torch
from hyperbloom.common.data import ClientData, Examples

def arrays():
    part = (np.full((6, 4, 5, 3), 255, np.uint8), np.arange(6) % 3)
    return part, part, part

def tensors():
    part = (torch.ones(6, 2, dtype=torch.bfloat16, requires_grad=True), torch.arange(6))
    return [part, part, part]

def client_data():
    part = Examples(torch.ones(6, 2), torch.arange(6) % 2)
    return ClientData(part, part, part, 3, ("a", "b", "c"))

def patients():
    train = Examples(torch.arange(80.0).view(80, 1), torch.arange(80) % 2, groups=np.arange(80) // 4)
    part = Examples(torch.ones(6, 1), torch.arange(6) % 2)
    return ClientData(train, part, part, 2, ("a", "b"))

INPUTS, LABELS = torch.ones(6, 2), torch.arange(6)

def shared():
    return ((INPUTS, LABELS),) * 3

class Holder:
    method = staticmethod(arrays)

def nothing(): return None
def two(): return 1, 2
def no_pair(): return (arrays()[0], 3, arrays()[0])
def lists(): return (([[1.0]], [0]),) * 3
def fails(): raise KeyError("the file")
def negative(): return ((np.zeros((2, 2)), np.array([0, -1])),) * 3
def shapes(): return [(np.zeros((2, width)), np.arange(2)) for width in (2, 3, 2)]
number = 3
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make a module importable from the current directory alone and return its name."""
    (tmp_path / "own_functions.py").write_text(FUNCTIONS)
    (tmp_path / "own_broken.py").write_text("import hyperbloom_lacks_this")
    monkeypatch.chdir(tmp_path)
    yield "own_functions"
    sys.modules.pop("own_functions", None)


def test_functions_return_arrays_tensors_or_client_data(functions: str) -> None:
    path = list(sys.path)
    data = load(f"{functions}:arrays")
    assert (data.input_shape, data.num_classes, data.train.inputs.unique().tolist()) == ((3, 4, 5), 3, [1.0])
    assert load(f"{functions}:Holder.method").input_shape == (3, 4, 5)
    data = load(f"{functions}:tensors")
    assert (data.input_shape, data.train.inputs.dtype, data.num_classes) == ((2,), torch.float32, 6)
    data = load(f"{functions}:client_data", split="iid", partition=1, partitions=3)
    assert (sizes(data), data.class_names) == ([2, 2, 2], ("a", "b", "c"))
    assert sys.path == path


def test_the_groups_of_what_a_function_returns_stay_together(functions: str) -> None:
    spec = DataSpec(f"{functions}:patients", split="iid", partitions=2)
    found = [load_client_data(replace(spec, partition=each)).train for each in (0, 1)]
    patients = [set((each.inputs[:, 0] // 4).tolist()) for each in found]
    assert len(patients[0]) == len(patients[1]) == 10 and not patients[0] & patients[1]
    assert all(each.groups is not None and len(set(each.groups.tolist())) == 10 for each in found)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_missing:arrays", "expected a function without arguments, found ModuleNotFoundError: .*; searched from "),
        (
            "own_broken:arrays",
            "expected a function without arguments, found ModuleNotFoundError: .*hyperbloom_lacks_this",
        ),
        (
            "own_functions:absent",
            "expected a function without arguments, found AttributeError: module 'own_functions'",
        ),
        ("own_functions:", "expected a function without arguments, found module"),
        ("own_functions:number", "expected a function without arguments, found int"),
        ("own_functions:nothing", r"expected \(train, val, test\), .* or a ClientData; found NoneType"),
        ("own_functions:two", r"expected \(train, val, test\), .*; found tuple of 2"),
        ("own_functions:no_pair", r"val: expected .*; found int"),
        ("own_functions:lists", r"train inputs: expected .*; found list of 1"),
        ("own_functions:fails", "expected data, found that the function fails with KeyError: 'the file'"),
        ("own_functions:negative", "train labels: expected floats, or classes counted from 0, found -1"),
        ("own_functions:shapes", r"val inputs: expected float32 inputs of shape \(2,\) as .*, found float32 \(3,\)"),
    ],
)
def test_unusable_functions_are_named(functions: str, name: str, message: str) -> None:
    with pytest.raises(DataError, match=f"{name}: {message}"):
        load(name)


def test_what_a_function_returns_is_left_as_it_was(functions: str) -> None:
    data = load(f"{functions}:shared")
    data.train.inputs.zero_()
    data.train.labels.zero_()
    kept = sys.modules[functions]
    assert kept.INPUTS.eq(1).all()
    assert kept.LABELS.tolist() == [0, 1, 2, 3, 4, 5]
