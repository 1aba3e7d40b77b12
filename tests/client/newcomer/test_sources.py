"""Examples are scaled as at training, and their labels play no part."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hyperbloom.client.newcomer.newcomer import DECLINED
from hyperbloom.common.data import DataSpec
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.data.schema import read_schema
from hyperbloom.common.data.table import read_cells
from hyperbloom.common.layout import Weights
from hyperbloom.common.models import ModelSpec, full_layout
from hyperbloom.common.tasks import TaskSpec
from hyperbloom.common.wire.newcomers import Delivery, Description

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


SCHEMA = """{"label": ["ill"], "columns": [{"name": "age", "kind": "number", "mean": 50.0, "std": 10.0},
{"name": "sex", "kind": "category", "words": ["f", "m"]}]}"""


def test_tables_with_and_without_labels_are_read_by_the_servers_schema(tmp_path: Path) -> None:
    ages = np.random.default_rng(0).normal(70, 10, 20).round(1)
    rows = [f"{age},{'fm'[index % 2]}" for index, age in enumerate(ages)]
    (tmp_path / "bare.csv").write_text("\n".join(["age,sex", *rows]))
    labelled = [f"{row},{index % 3 % 2}" for index, row in enumerate(rows)]
    (tmp_path / "labelled.csv").write_text("\n".join(["age,sex,ill", *labelled]))
    schema = read_schema(SCHEMA, "here")
    made = replace(offer(shape=(schema.width,)), num_classes=2, scaling=Scaling(1.0), schema=schema.text)
    inputs = torch.from_numpy(schema.inputs(read_cells(tmp_path / "bare.csv"), "here"))
    assert inputs[:, 0].numpy() == pytest.approx((ages - 50) / 10, abs=1e-5), "not by these rows' own mean"
    for spec in (DataSpec(str(tmp_path / "bare.csv")), DataSpec(str(tmp_path / "labelled.csv"), label="ill")):
        one = newcomer(tmp_path, spec)
        description = one.describe(made)
        assert isinstance(description, Description), one.failure
        torch.testing.assert_close(description.weights.values, expected(made, inputs), rtol=0, atol=1e-5)
        assert one.sources.schema == schema
    named = SCHEMA.replace('"columns"', '"classes": ["well", "sick"], "columns"')
    bare = newcomer(tmp_path, DataSpec(str(tmp_path / "bare.csv")))
    assert isinstance(bare.describe(replace(made, schema=named)), Description)
    assert bare.sources.class_names(made) == ("well", "sick")
    bare, numbers = newcomer(tmp_path, DataSpec(str(tmp_path / "bare.csv"))), replace(made, num_classes=1)
    assert isinstance(bare.describe(replace(numbers, task=TaskSpec("regression"), metric="rmse")), Description)
    assert bare.sources.class_names(numbers) == ("ill",), "the column of a table of numbers to learn"


@pytest.mark.parametrize("labels", [np.arange(40) % 2, np.linspace(0, 1, 40), np.eye(2)[np.arange(40) % 2] * np.nan])
def test_labels_of_another_kind_than_the_runs_give_no_score(tmp_path: Path, labels: np.ndarray) -> None:
    """Two numbers are to learn; the data have classes, one number, or labels that nobody knows."""
    spec = labelled(tmp_path / "own.npz", np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32), labels)
    made = replace(offer(shape=(4,)), num_classes=2, task=TaskSpec("regression"), metric="rmse", scaling=Scaling(1.0))
    one = newcomer(tmp_path, spec)
    assert isinstance(one.describe(made), Description), one.failure
    assert not one.sources.scored(made)
    one.receive(Delivery(Weights(layout := full_layout(ModelSpec("mlp", "S", (4,), 2)), torch.zeros(layout.numel))))
    one.write(tmp_path / "model")
    assert "| test RMSE | not known here |" in (tmp_path / "model" / "README.md").read_text()


def test_another_schema_than_the_servers_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\n".join(["age,sex,ill", *(f"{50 + i},{'fm'[i % 2]},{i % 2}" for i in range(20))]))
    (tmp_path / "own.json").write_text(SCHEMA.replace('"f", "m"', '"m", "f"'))
    made = replace(offer(shape=(5,)), num_classes=2, schema=read_schema(SCHEMA, "here").text)
    one = newcomer(tmp_path, DataSpec(str(tmp_path / "t.csv"), schema=tmp_path / "own.json"))
    assert one.describe(made) is DECLINED
    assert str(one.failure).startswith("--schema: not the server's: expected")


def test_a_schema_that_leaves_the_scale_to_the_run_is_the_servers(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\n".join(["age,sex,ill", *(f"{50 + i},{'fm'[i % 2]},{i % 2}" for i in range(20))]))
    (tmp_path / "own.json").write_text(SCHEMA.replace(', "mean": 50.0, "std": 10.0', ""))
    schema = read_schema(SCHEMA, "here")
    made = replace(offer(shape=(schema.width,)), num_classes=2, schema=schema.text)
    one = newcomer(tmp_path, DataSpec(str(tmp_path / "t.csv"), schema=tmp_path / "own.json"))
    assert isinstance(one.describe(made), Description), one.failure


def test_a_table_is_never_scaled_by_its_own_values(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\n".join(["age,ill", *(f"{i / 3},{i % 2}" for i in range(40))]))
    one = newcomer(tmp_path, DataSpec(str(tmp_path / "t.csv"), label="ill"))
    assert one.describe(replace(offer(shape=(2,)), num_classes=2)) is DECLINED
    assert str(one.failure).startswith("--schema: expected what the columns mean, as the server does not say it")
