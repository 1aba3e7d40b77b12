"""`flower-server export`: the models that a run's clients were evaluated with, and clear words where there are none."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyperbloom.common.data import DataSpec, load_client_data
from hyperbloom.common.data.digits import SCALING
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.files import export as folders
from hyperbloom.common.files.export import read_model
from hyperbloom.server.cli import main
from hyperbloom.server.runs.export import Export

LORA = "lora:r=2"
SHORT = ["--engine", "inline", "--rounds", "3", "--eval-every", "3", "--clients", "3", "--cohort", "3"]


@pytest.fixture(autouse=True)
def without_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds, and has its own tests."""
    monkeypatch.setattr(folders, "HAS_ONNX", False)


def train(folder: Path, strategy: str, *more: str) -> Path:
    assert main(["--strategy", strategy, *SHORT, "--set", "local.steps=5", "--run-dir", str(folder), *more]) == 0
    return folder


@pytest.mark.parametrize(
    ("strategy", "adapt"),
    [("pfedhn", "all"), ("fedavg", "all"), ("fedprox", "all"), ("fedma", "all"), ("pfedhn", LORA)],
)
def test_an_exported_model_has_the_accuracy_that_the_run_reports(
    strategy: str, adapt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", strategy, "--data", "digits", "--set", f"adapt={adapt}")
    assert main(["export", str(run), "--all"]) == 0
    assert "no ONNX" in capsys.readouterr().out
    reported = json.loads((run / "summary.json").read_text())[strategy]["test_accuracy"]
    assert len(reported) == 3
    for index in range(3):
        name = f"client-{index}"
        described, logits = read_model(run / "models" / name)
        assert described.preprocessing == SCALING
        data = load_client_data(DataSpec(partition=index, partitions=3))
        scores = logits(data.test.inputs)
        best, second = scores.topk(2).values.T
        tie = best - second < 1e-4  # sums in another order may decide it otherwise
        correct, count = scores.argmax(1) == data.test.labels, reported[name] / 100 * len(data.test)
        assert count == pytest.approx(round(count)) and tie.sum() <= 1
        assert int((correct & ~tie).sum()) <= round(count) <= int((correct | tie).sum())
        readme = (run / "models" / name / "README.md").read_text()
        assert f"{reported[name]:.1f} %" in readme and "3 of 3" in readme and strategy in readme


def test_one_client_under_names_of_ones_own(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "pfedhn")
    names = ",".join("abcdefghij")
    assert main(["export", str(run), "--client", "client-1", "--out", str(tmp_path), "--class-names", names]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["client-1", "run"]
    assert read_model(tmp_path / "client-1")[0].class_names == tuple("abcdefghij")
    assert main(["export", str(run), "--client", "client-1", "--out", str(tmp_path / "unnamed")]) == 0
    named, numbered = ((tmp_path / folder / "README.md").read_text() for folder in ("client-1", "unnamed/client-1"))
    assert "numbered as the client numbers them" in numbered and "numbered as" not in named
    assert "It told besides: the shares of its classes." in named, "virtual clients disclose them"


@pytest.mark.parametrize(
    ("strategy", "more", "error"),
    [
        ("pfedhn-pc", [], "keeps a part of its model to itself; on its machine run: flower-client export"),
        ("fedavg-ft", [], "trains the model that it gets before it uses it"),
        ("local", [], "flower-client export"),
        ("fedavg", ["--set", "model=hafl-1", "--set", "sizes=[S]"], "normalises by running statistics"),
    ],
)
def test_models_that_are_not_on_the_server_are_one_clear_line(
    strategy: str, more: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    if "model=hafl-1" in more:
        more = [*more, "--rounds", "1", "--eval-every", "1"]
    train(run, strategy, *more)
    capsys.readouterr()
    assert main(["export", str(run), "--all"]) == 2
    told = capsys.readouterr().err
    assert error in told and told.count("\n") == 1
    assert not (run / "models").exists()


def test_the_card_tells_what_the_noise_of_the_run_is_worth(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "fedavg", "--dp-clients", "--cohort", "2", "--rounds", "2", "--eval-every", "2")
    assert main(["export", str(run), "--all"]) == 0
    spent = json.loads((run / "privacy.json").read_text())["clients"]
    assert len({each["releases"] for each in spent.values()}) > 1
    for name, each in spent.items():
        readme = (run / "models" / name / "README.md").read_text()
        assert f"asked {each['releases']} times has ({each['epsilon']:.4g}, 1e-05)" in readme
        assert "no noise was added" not in readme
        assert "with noise" in readme and "training loss" not in readme


@pytest.mark.parametrize(("more", "masked"), [([], False), (["--secure-aggregation", "--cohort", "3"], True)])
def test_the_card_tells_all_that_was_sent(more: list[str], masked: bool, tmp_path: Path) -> None:
    run = train(tmp_path / "run", "fedavg", *more)
    assert main(["export", str(run), "--client", "client-0", "--out", str(tmp_path / "out")]) == 0
    readme = " ".join((tmp_path / "out" / "client-0" / "README.md").read_text().split())
    assert "the mean training loss" in readme and "version of its program" in readme
    assert ("the server saw the sum" in readme) == masked


def test_wrong_names_and_folders_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path / "run", "pfedhn")
    for flags, error in (
        (["export", str(tmp_path), "--all"], "expected the folder of a run"),
        (["export", str(run), "--client", "ward"], "expected one of client-0, client-1, client-2; found 'ward'"),
        (["export", str(run), "--all", "--class-names", "a,b"], "expected 10 names, found 2"),
        (["export", str(run), "--all", "--class-names", "a,b,c,d,e,f,g,h,i,a"], "expected each name once, found a,b"),
    ):
        assert main(flags) == 2
        assert error in capsys.readouterr().err
    (run / "models" / "client-0").mkdir(parents=True)
    assert main(["export", str(run), "--all"]) == 2
    assert "expected nothing there yet" in capsys.readouterr().err
    (run / "summary.json").unlink()
    assert main(["export", str(run), "--all"]) == 2
    assert "expected the selected round" in capsys.readouterr().err


def test_a_run_that_has_diverged_has_no_models_and_no_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path / "run", "pfedhn")
    tensors = load_file(run / "hypernetwork.safetensors")
    save_file(
        {name: torch.full_like(each, torch.nan) for name, each in tensors.items()}, run / "hypernetwork.safetensors"
    )
    assert main(["export", str(run), "--all"]) == 2
    assert "the weights of its model are not finite" in capsys.readouterr().err
    assert not (run / "models").exists()
    assert main(["report", str(run)]) == 0
    assert "Embeddings by PCA" not in (run / "report.html").read_text()


def test_a_table_of_embeddings_is_one_only_if_the_strategy_has_clients_in_it(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "fedavg")
    stored = load_file(path := run / "hypernetwork.safetensors")
    save_file({**stored, "embeddings": torch.zeros(1, 8)}, path)  # such as a parameter of a plug-in network
    assert len(Export(run).clients(None)) == 3


def test_a_strategy_without_a_state_has_nothing_to_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", "fedavg")
    monkeypatch.delattr("hyperbloom.strategies.fedavg.FedAvg.state")
    assert main(["export", str(run), "--all"]) == 2
    assert "fedavg: it has no `state`, so there is nothing to export" in capsys.readouterr().err


def test_a_run_that_stopped_between_weights_and_scores_is_resumed_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", "pfedhn")
    save_file(load_file(path := run / "hypernetwork.safetensors"), path, {"round": "77"})
    assert main(["export", str(run), "--all"]) == 2
    assert "was stopped while it wrote what validation had selected; resume it first" in capsys.readouterr().err


def test_a_client_that_joined_after_the_selected_round_has_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", "pfedhn")
    roster = json.loads((run / "roster.json").read_text())
    roster["clients"].append({**roster["clients"][0], "client_id": "late", "row": 3})
    (run / "roster.json").write_text(json.dumps(roster))
    assert main(["export", str(run), "--client", "late"]) == 2
    assert "late joined after the kept round 3" in capsys.readouterr().err
    assert main(["export", str(run), "--all"]) == 0
    assert len(list((run / "models").iterdir())) == 3


def test_inputs_are_scaled_as_most_clients_have_told(tmp_path: Path) -> None:
    """Whatever data set the run's configuration names: clients bring their own."""
    run = train(tmp_path / "run", "pfedhn")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("name: digits", "name: cifar10"))
    roster = json.loads((run / "roster.json").read_text())
    others = [{"divisor": 255.0, "mean": [0.5], "std": [0.1]}, {"divisor": 1.0, "mean": [], "std": []}]
    cases = [([], SCALING, "3 of 3"), (others[:1], SCALING, "2 of 3")]
    cases += [(others, Scaling(255.0), "The clients differ in their preprocessing")]
    for index, (changes, scaling, said) in enumerate(cases):
        for client, change in zip(roster["clients"], changes, strict=False):
            client["about"] |= change
        (run / "roster.json").write_text(json.dumps(roster))
        folder = tmp_path / str(index)
        assert main(["export", str(run), "--client", "client-0", "--out", str(folder)]) == 0
        assert read_model(folder / "client-0")[0].preprocessing == scaling
        assert said in (folder / "client-0" / "README.md").read_text()


def test_what_most_clients_told_of_their_inputs_is_counted_once(tmp_path: Path) -> None:
    models = Export(train(tmp_path / "run", "pfedhn"))
    cards = [models.model(client)[2] for client in models.clients(None)]
    assert len(cards) == 3 and models.trained.scaling is models.trained.scaling


def test_the_card_says_what_a_client_has_told_of_its_table(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\n".join(["age,pulse", *(f"{20 + i / 7},{60 + i % 11 / 3}" for i in range(90))]))
    schema = '{"label": ["pulse"], "columns": [{"name": "age", "kind": "number"}]}'
    (tmp_path / "schema.json").write_text(schema)
    about = {"name": str(tmp_path / "t.csv"), "schema_file": str(tmp_path / "schema.json"), "split": "iid"}
    words = [word for key, value in about.items() for word in ("--set", f"data.{key}={value}")]
    run = train(tmp_path / "run", "pfedhn", *words, "--set", "gains=true")
    assert main(["export", str(run), "--client", "client-1", "--out", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "client-1" / "README.md").read_text()
    assert "It told besides: what the columns of its table mean; how many numbers it has to learn" in card
    assert "test metrics of all models that it compared, and its gain." in card and "names of the outputs" not in card
    assert "flower-client export --client-id client-1 --state-dir" in card, "it has chosen another model"
