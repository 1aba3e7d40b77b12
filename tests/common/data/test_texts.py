"""Texts in tables: rows of token numbers, what decides them, and models that take texts."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers

from hyperbloom.client.cli import main as client
from hyperbloom.common.data import DataSpec, load_client_data
from hyperbloom.common.data.schema import Column, Schema, propose, read_schema
from hyperbloom.common.data.texts import most_tokens, token_rows
from hyperbloom.common.errors import ConfigError, DataError
from hyperbloom.common.models import BACKBONE, ModelSpec, backbone_digest
from hyperbloom.server.cli import main as server
from tests.common.models.backbones import LENGTH, add_tokenizer, text_folder

GOOD, BAD = "the ward was clean and quiet", "food was cold and bad again"


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(add_tokenizer(text_folder(tmp_path_factory.mktemp("backbones") / "bert")))


def write(path: Path, rows: int = 60) -> str:
    with path.open("w", newline="") as file:
        made = csv.writer(file)
        made.writerow(["stars", "review", "id", "said"])
        for row in range(rows):
            made.writerow([row % 5, (GOOD, BAD)[row % 2], f"guest-{row}", ("good", "bad")[row % 2]])
    return str(path)


def test_a_text_is_its_tokens_cut_and_padded(backbone: str) -> None:
    rows = token_rows(["good food", "", f"{GOOD} {BAD}", "a zebra"], 8, backbone, "here")
    assert rows.dtype == np.float32
    # 2 begins a text; the network takes no more than LENGTH tokens.
    assert rows.tolist() == [
        [2, 13, 10, 0, 0, 0, 0, 0],
        [2, 0, 0, 0, 0, 0, 0, 0],
        [2, 3, 4, 5, 6, 7, 0, 0][:LENGTH] + [0] * (8 - LENGTH),
        [2, 1, 1, 0, 0, 0, 0, 0],
    ]
    assert token_rows([GOOD], 3, backbone, "here").tolist() == [[2, 3, 4]]
    assert token_rows([], 3, backbone, "an empty file").shape == (0, 3)


def test_texts_are_no_longer_than_the_network_takes(tmp_path: Path) -> None:
    folder = add_tokenizer(text_folder(tmp_path / "bert"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": int(1e30)}))
    assert most_tokens(str(folder)) == LENGTH
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "max_position_embeddings": -1}))  # XLNet has no limit
    assert most_tokens(str(shutil.copytree(folder, tmp_path / "boundless"))) == 128
    (folder / "config.json").write_text(json.dumps({**about, "max_position_embeddings": "many"}))
    with pytest.raises(DataError, match=r"^expected a tokenizer in .*, found none: .*'max_position_embeddings'"):
        most_tokens(str(shutil.copytree(folder, tmp_path / "odd")))
    (folder / "config.json").unlink()  # as in the folder of an exported model's tokenizer
    copied = Path(shutil.copytree(folder, tmp_path / "alone"))
    assert most_tokens(str(copied)) == 128


def test_a_table_beside_a_tokenizer_is_a_table_of_texts(backbone: str, tmp_path: Path) -> None:
    data = load_client_data(DataSpec(write(tmp_path / "reviews.csv"), label="said", backbone=backbone))
    assert data.input_shape == (LENGTH,) and data.class_names == ("bad", "good")
    expected = {"good": [2, 3, 4, 5, 6, 7], "bad": [2, 10, 5, 11, 7, 12]}
    for row, label in zip(data.train.inputs, data.train.labels, strict=True):
        assert row.tolist() == expected[data.class_names[int(label)]]
    assert data.schema == Schema(
        label=("said",), classes=("bad", "good"), columns=(Column(name="review", kind="text", length=LENGTH),)
    )


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    table = {"review": [GOOD, BAD], "said": ["good", "bad"]}
    schema = propose(table, ("said",), "a table", tokens=8)
    with pytest.raises(DataError, match="a table: texts need --backbone FOLDER"):
        schema.inputs(table, "a table")
    with pytest.raises(DataError, match=r"expected a tokenizer in .*empty, found none"):
        schema.inputs(table, "a table", str(tmp_path / "empty"))


def test_a_column_of_texts_is_alone() -> None:
    columns = (Column(name="review", kind="text"), Column(name="stars", kind="number"))
    with pytest.raises(ConfigError, match="expected a column of texts to be the only one, found 2"):
        read_schema(Schema(label=("said",), columns=columns).text, "here")


def test_another_tokenizer_is_another_backbone(backbone: str, tmp_path: Path) -> None:
    spec = ModelSpec(BACKBONE, "M", (LENGTH,), 2, "head", backbone)
    same = add_tokenizer(text_folder(tmp_path / "same"))
    other = add_tokenizer(text_folder(tmp_path / "other"), "another order of words")
    digests = [backbone_digest(spec)] + [
        backbone_digest(ModelSpec(BACKBONE, "M", (LENGTH,), 2, "head", str(folder))) for folder in (same, other)
    ]
    assert digests[0] == digests[1] != digests[2]
    (same / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    spec = ModelSpec(BACKBONE, "M", (LENGTH,), 2, "head", str(same))
    backbone_digest.cache_clear()
    assert backbone_digest(spec) != digests[0], "it cuts the same texts in another way"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of transformers, to peft
def test_a_model_of_texts_predicts_texts(
    backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reviews, run = write(tmp_path / "reviews.csv"), tmp_path / "run"
    config = tmp_path / "run.yaml"
    config.write_text(f"data: {{name: {reviews}, label: said}}\nbackbone: {backbone}\nadapt: lora:r=4\n")
    flags = ["--engine", "inline", "--strategy", "fedavg", "--clients", "2", "--cohort", "2", "--rounds", "2"]
    rates = ["--set", "local.steps=20", "--set", "local.learning_rate=1.0"]
    assert server(["--config", str(config), *flags, *rates, "--run-dir", str(run)]) == 0
    assert server(["export", str(run), "--all"]) == 0
    model = run / "models/client-0"
    (tmp_path / "new.txt").write_text(f"{GOOD}\n{BAD}\n")
    capsys.readouterr()
    assert client(["predict", "--model", str(model), str(tmp_path / "new.txt")]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == [f"{tmp_path}/new.txt:1", f"{tmp_path}/new.txt:2"]

    plain = transformers.AutoModelForSequenceClassification.from_pretrained(backbone, num_labels=2)
    tuned = peft.PeftModel.from_pretrained(plain, model / "adapter").eval()
    tokens = transformers.AutoTokenizer.from_pretrained(model / "tokenizer")([GOOD, BAD], return_tensors="pt")
    with torch.no_grad():
        logits = tuned(
            input_ids=tokens["input_ids"][:, :LENGTH], attention_mask=tokens["attention_mask"][:, :LENGTH]
        ).logits
    assert [float(line[2]) for line in lines] == pytest.approx(logits.softmax(1).amax(1).tolist(), abs=1e-5)
    assert [line[1] for line in lines] == [("bad", "good")[place] for place in logits.argmax(1)]


def test_what_is_no_model_of_texts_takes_no_texts(tmp_path: Path) -> None:
    from hyperbloom.common.data.scaling import Scaling
    from hyperbloom.common.data.unlabelled import read_inputs

    path = tmp_path / "new.txt"
    path.write_text(GOOD)
    with pytest.raises(DataError, match="the model was not trained on texts"):
        list(read_inputs([path], (4,), Scaling(1.0)))
