"""Heads on others' feature extractors, against models that are put together and scored by hand."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from figures.mix_and_match import main as program
from figures.mix_and_match import mix_and_match
from hyperbloom.common.data import DataSpec, data_source
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.models import HEAD, ModelSpec, build
from hyperbloom.server.cli import main
from hyperbloom.server.runs.folder import read_run
from hyperbloom.server.runs.recorded import read_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small run on digits with two classes a client, which heads do not share."""
    folder = tmp_path_factory.mktemp("mix") / "run"
    words = "--strategy pfedhn --engine inline --clients 4 --cohort 4 --rounds 8 --eval-every 8 --max-train 60"
    keys = "--set data.split=shares --set local.steps=10 --set checkpoint_every=0 --set learning_rate=0.05"
    keys += " --set start=hypernetwork"
    assert main([*words.split(), *keys.split(), "--run-dir", str(folder)]) == 0
    return folder


def test_the_diagonal_is_what_the_run_has_reported(run: Path) -> None:
    names, values, last, _ = mix_and_match(run, read_config(run), None)
    accuracy = json.loads((run / "summary.json").read_text())["pfedhn"]["test_accuracy"]
    assert names == list(accuracy) and not last
    np.testing.assert_allclose(np.diag(values), list(accuracy.values()))
    assert np.abs(values - np.diag(values)[:, None]).max() > 5  # others' are worse, or better


def test_the_diagonal_is_of_the_models_that_clients_use(tmp_path: Path) -> None:
    """By default a client uses what it trained last, and begins its next training elsewhere."""
    words = "--strategy pfedhn --engine inline --clients 3 --cohort 3 --rounds 4 --eval-every 4 --max-train 60"
    keys = "--set data.split=shares --set gains=false --set local.learning_rate=0.05"
    assert main([*words.split(), *keys.split(), "--run-dir", str(tmp_path)]) == 0
    accuracy = json.loads((tmp_path / "summary.json").read_text())["pfedhn"]["test_accuracy"]
    _, values, _, _ = mix_and_match(tmp_path, read_config(tmp_path), None)
    np.testing.assert_allclose(np.diag(values), list(accuracy.values()))


def test_every_pair_is_the_model_put_together_by_hand(run: Path) -> None:
    config = read_config(run)
    _, values, _, _ = mix_and_match(run, config, None)
    tensors, roster = read_run(run)
    about = next(iter(roster)).about
    spec = ModelSpec(config.model, "M", about.input_shape, about.num_classes).resolved()
    shapes = {name: parameter.shape for name, parameter in build(spec).named_parameters()}
    for i, j in ((0, 1), (2, 0), (1, 3)):
        of_head, of_body = (written(tensors, row, shapes) for row in (i, j))
        weights = {name: (of_head if name.startswith(HEAD) else of_body)[name] for name in shapes}
        model = build(spec)
        model.load_state_dict(weights)
        model.eval()
        data = DataSpec(
            "digits", split="shares", classes_per_client=2, partition=i, partitions=4, max_train=60, seed=config.seed
        )
        test = data_source(data).client(i).test
        with torch.no_grad():
            right = (model(test.inputs).argmax(1) == test.labels).float().mean().item()
        assert values[i, j] == pytest.approx(100 * right)


def written(tensors: dict[str, torch.Tensor], row: int, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Return the parameters that the hypernetwork writes for a client, with its arithmetic spelled out."""
    values = tensors["embeddings"][row]
    for layer in ("trunk.0", "trunk.2", "trunk.4", "trunk.6", "heads.M"):
        values = values if layer in ("trunk.0", "heads.M") else values.relu()
        values = tensors[f"hypernetwork.{layer}.weight"] @ values + tensors[f"hypernetwork.{layer}.bias"]
    parts = values.split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def test_heads_that_clients_have_kept_are_theirs(tmp_path: Path) -> None:
    """With pFedHN-PC; the last round is evaluated, so that the diagonal is its accuracy."""
    words = "--strategy pfedhn-pc --engine inline --clients 3 --cohort 3 --rounds 4 --eval-every 4 --max-train 60"
    words += " --set local.steps=10 --set start=hypernetwork"
    assert main([*words.split(), "--run-dir", str(tmp_path / "run")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run/clients.jsonl").read_text().splitlines()]
    accuracy = {each["client"]: 100 * each["test_accuracy"] for each in lines if "test_total" in each}
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    names, values, last, _ = mix_and_match(tmp_path / "run", read_config(tmp_path / "run"), None)
    np.testing.assert_allclose(np.diag(values), [accuracy[name] for name in names])
    assert np.abs(values - np.diag(values)[:, None]).max() > 1 and last
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_the_program_tells_the_means_and_draws(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mix_and_match", str(run), "--figure", str(tmp_path / "matrix.png")])
    program()
    _, values, _, _ = mix_and_match(run, read_config(run), None)
    own = np.eye(4, dtype=bool)
    means = f"on their own feature extractor {values[own].mean():.1f} %, on others' {values[~own].mean():.1f} %\n"
    assert capsys.readouterr().out.endswith(means)
    assert (tmp_path / "matrix.png").stat().st_size > 5000


def test_the_program_says_why_there_is_no_matrix(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in run.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = (run / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(config.replace("strategy: pfedhn", "strategy: fedavg"))
    monkeypatch.setattr(sys, "argv", ["mix_and_match", str(tmp_path)])
    with pytest.raises(SystemExit, match="no matrix: "):
        program()


def test_data_of_their_own_are_not_taken_for_those_of_the_run(run: Path, tmp_path: Path) -> None:
    for name in ("config.yaml", "environment.json", "hypernetwork.safetensors", "roster.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    stored = json.loads((tmp_path / "roster.json").read_text())
    stored["clients"][2]["about"]["train_examples"] += 1
    (tmp_path / "roster.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=r"not those of its data section \(client-2 had 61 examples to train on\)"):
        mix_and_match(tmp_path, read_config(tmp_path), None)


def test_a_name_is_no_way_out_of_the_folder(run: Path, tmp_path: Path) -> None:
    for name in ("config.yaml", "environment.json", "hypernetwork.safetensors"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    stored = (run / "roster.json").read_text().replace('"client-0"', '"../../client-0"')
    (tmp_path / "roster.json").write_text(stored)
    config = read_config(run).model_copy(update={"strategy": "pfedhn-pc", "options": {"start": "hypernetwork"}})
    with pytest.raises(ConfigError, match=r"a client's name: expected .*; found '../../client-0'"):
        mix_and_match(tmp_path, config, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "fedavg"}, "fedavg writes no feature extractor for each client"),
        ({"strategy": "pfedhn-pc"}, "client-0 keeps its head, or has none"),
        ({"sizes": ("S", "M")}, "networks of several sizes"),
    ],
)
def test_where_it_cannot_be_it_is_said(run: Path, changes: dict[str, object], message: str) -> None:
    config = read_config(run).model_copy(update={"options": {}, **changes})
    with pytest.raises(ConfigError, match=message):
        mix_and_match(run, config, None)
