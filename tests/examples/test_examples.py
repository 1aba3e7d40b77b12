"""The examples: short, and doing what their pages say."""

import copy
import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import numpy as np
import pytest
import sklearn.metrics as reference
import torch
from flwr.app import Context, RecordDict

import hyperbloom
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import make_run_config
from hyperbloom.common.data import DataSpec, load_client_data
from hyperbloom.common.errors import DataError
from hyperbloom.common.models import build_from_factory
from hyperbloom.common.tasks import TaskSpec
from hyperbloom.common.wire.orders import TrainResult
from hyperbloom.server.cli import main
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.exchange import Client, Update

from ..server.conftest import ABOUT

FOLDER = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("hospital", "momentum", "server_app", "text", "text_on_demand", "visits")


@pytest.fixture(autouse=True)
def in_the_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples' own folder is where their commands are run."""
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


def test_each_is_under_fifty_lines() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == list(NAMES)
    for name in NAMES:
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 50


# ---------------------------------------------------------------------- a strategy


def strategy(beta: float, rate: float = 1.0) -> Any:
    """Return the example's strategy with nothing around it."""
    values = {"strategy": "momentum:FedAvgM", "options": {"beta": beta, "rate": rate}}
    made = make_algorithm(make_run_config(values, {}, "a test"))
    made.build(made.settle(ABOUT))
    return made


def update(returned: torch.Tensor, examples: int) -> Update:
    """Return what a client's training brings."""
    return Update(Client("a", 0, ABOUT), TrainResult(0.0), None, returned, None, examples)


def learn(made: Any, *means: torch.Tensor) -> None:
    """Let the clients' means be these, round by round."""
    for mean in means:
        made.learn([update(mean - 3.0, 1), update(mean + 1.0, 3)])


@pytest.fixture
def means() -> list[torch.Tensor]:
    """Return the means of three rounds."""
    return list(torch.randn(3, strategy(0.0).global_weights.numel(), generator=torch.Generator().manual_seed(0)))


def test_without_momentum_it_is_the_mean(means: list[torch.Tensor]) -> None:
    made = strategy(beta=0.0)
    learn(made, *means[:2])
    assert torch.allclose(made.global_weights, means[1], atol=1e-6)


def test_momentum_is_the_heavy_ball(means: list[torch.Tensor]) -> None:
    # An independent form without v: w' = w + rate (m - w) + beta (w - w_before).
    beta, rate = 0.5, 0.25
    made = strategy(beta, rate)
    before = current = made.global_weights
    learn(made, *means)
    for mean in means:
        step = rate * (mean - current) + beta * (current - before)
        before, current = current, current + step
    assert torch.allclose(made.global_weights, current, atol=1e-6)


def test_nobody_answering_moves_nothing() -> None:
    made = strategy(beta=0.5)
    before, made.velocity = made.global_weights, torch.ones_like(made.global_weights)
    made.learn([])
    assert torch.equal(made.global_weights, before)


def test_its_velocity_outlives_a_crash(means: list[torch.Tensor]) -> None:
    whole, resumed = strategy(beta=0.5), strategy(beta=0.5)
    learn(whole, *means[:2])
    resumed.restore(copy.deepcopy(whole.checkpoint()))
    learn(whole, means[2])
    learn(resumed, means[2])
    assert torch.equal(resumed.global_weights, whole.global_weights)


def test_without_momentum_it_is_fedavg_in_a_comparison_and_as_a_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = "--set clients=2 --set cohort=2 --set rounds=1 --set eval_every=1 --set local.steps=1"
    flags = f"--strategies momentum:FedAvgM,fedavg --seeds 1 {few} --set momentum:FedAvgM.beta=0"
    assert main(["compare", *flags.split(), "--out", str(tmp_path / "out")]) == 0
    own, fedavg = json.loads((tmp_path / "out/comparison.json").read_text())
    assert (own["name"], fedavg["name"]) == ("momentum:FedAvgM", "fedavg")
    assert all(own[key] == fedavg[key] for key in ("mean", "deviation", "client_std", "client_worst"))
    flags = f"--engine inline --baselines momentum:FedAvgM {few}"
    assert main([*flags.split(), "--run-dir", str(tmp_path / "run")]) == 0
    assert "momentum:FedAvgM: round 1/1" in capsys.readouterr().out


def test_its_options_are_explained_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--explain", "momentum:FedAvgM"]) == 0
    shown = capsys.readouterr().out
    assert "momentum:FedAvgM: FedAvg with server momentum." in shown
    assert "options.beta" in shown
    assert main(["--strategy", "momentum:FedAvgM", "--engine", "inline", "--set", "beta=-1"]) == 2
    assert "beta: expected greater than or equal to 0, found -1" in capsys.readouterr().err


# ---------------------------------------------------------------------- a ServerApp, a notebook


@pytest.mark.usefixtures("clean_process")
def test_a_server_app_of_ones_own_gives_the_numbers_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    keys = {"strategy": "pfedhn-pc", "clients": 2, "cohort": 2, "rounds": 2, "eval_every": 2, "local.steps": 5}
    run = hyperbloom.run(keys, run_dir=tmp_path / "command")
    client_for.cache_clear()
    capsys.readouterr()
    app = importlib.import_module("server_app").app
    context = Context(1, 1, {}, RecordDict(), {"run-dir": str(tmp_path / "app")})
    app(inline_grid(run.config, tmp_path / "clients"), context)
    assert hyperbloom.Run(tmp_path / "app").accuracy == run.accuracy
    assert f"'test_mean': {run.metrics[-1]['test_mean']}" in capsys.readouterr().out


SIX_ROUNDS = [[name, "round", str(number)] for name in ("pfedhn", "fedavg", "local") for number in range(1, 7)]


def short_notebook() -> nbformat.NotebookNode:
    """Return the notebook with six rounds."""
    notebook = nbformat.read(FOLDER / "digits.ipynb", as_version=4)
    setup = notebook.cells[1]
    assert setup.source.count("ROUNDS = 60") == 1
    setup.source = setup.source.replace("ROUNDS = 60", "ROUNDS = 6")
    return notebook


@pytest.mark.usefixtures("clean_process")
def test_the_notebooks_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    for cell in short_notebook().cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, "digits.ipynb", "exec"), scope)
    printed = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert [line for line in printed if line in SIX_ROUNDS] == SIX_ROUNDS


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook, resources = short_notebook(), {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=110, kernel_name="python3", resources=resources).execute()
    printed = notebook.cells[3].outputs[0].text.splitlines()
    assert [line.split()[:3] for line in printed] == SIX_ROUNDS


# ---------------------------------------------------------------------- data and models


def write_reviews(path: Path, texts: int, labels: bool = True) -> None:
    """Write a table of made-up reviews: three classes, of which one is rare; each has words of its own."""
    rows = ["text,kind,detail" if labels else "text"]
    for index in range(texts):
        text = f"the {('good', 'late', 'lost', 'odd')[index % 4]} thing {index % 7} the"
        kind, detail = (("praise", ""), ("blame", "delay"), ("blame", "luggage"), ("odd", ""))[index % 4]
        rows += [f"{text},{kind},{detail}" if labels else text] if index % 4 < 3 or index < 40 else []
    path.write_text("\n".join(rows))


def test_texts_become_tfidf_and_a_newcomers_agree_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (FOLDER / "text_on_demand.py").read_text()
    monkeypatch.chdir(tmp_path)

    def call(words: str) -> dict[str, np.ndarray]:
        monkeypatch.setattr(sys, "argv", ["text_on_demand.py", *words.split()])
        exec(compile(program, "text_on_demand.py", "exec"), {"__name__": "__main__"})
        with np.load(words.split()[1]) as file:
            return dict(file)

    write_reviews(tmp_path / "all.csv", 400)
    made = call("all.csv all.npz --text text --labels kind,detail")
    assert "all.npz: 300 texts, 3 classes" in capsys.readouterr().out  # ten odd ones are too few
    assert made["class_names"].tolist() == ["delay", "luggage", "praise"]
    assert made["y"][:6].tolist() == [2, 0, 1, 2, 0, 1]
    words = {"good": math.log(301 / 101) + 1, "the": 1.0, "thing": 1.0}  # ln((1 + N) / (1 + n)) + 1
    raw = {"good": words["good"], "the": 1 + math.log(2), "thing": 1.0}  # (1 + ln of the count in the text) times that
    row = dict(zip(made["words"].tolist(), made["x"][0].tolist(), strict=True))
    norm = sum(value**2 for value in raw.values()) ** 0.5
    assert {word: value for word, value in row.items() if value} == pytest.approx(
        {word: value / norm for word, value in raw.items()}
    )
    write_reviews(tmp_path / "mine.csv", 3, labels=False)
    mine = call("mine.csv mine.npz --text text --words all.npz")
    assert sorted(mine) == ["idf", "words", "x"]
    assert np.array_equal(mine["x"], made["x"][:3])
    data = load_client_data(DataSpec(data="all.npz"))
    assert (data.input_shape, data.class_names) == ((made["x"].shape[1],), ("delay", "luggage", "praise"))


def test_the_hospitals_files_and_networks_train_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (FOLDER / "hospital.py").read_text()
    monkeypatch.chdir(tmp_path)
    exec(compile(source, "hospital.py", "exec"), {"__name__": "__main__"})
    north = load_client_data(DataSpec(data="north.npz"))
    south = load_client_data(DataSpec(data="south.npz"))
    assert (north.input_shape, north.num_classes) == (south.input_shape, south.num_classes) == ((1, 16, 16), 2)
    assert len(north.train.labels) == 210
    # A bright spot: the mean of the brightest 16 pixels tells the classes apart, in the south that of the darkest.
    for data, sign in ((north, 1), (south, -1)):
        score = (sign * data.train.inputs).flatten(1).topk(16).values.mean(1)
        ill, well = score[data.train.labels == 1], score[data.train.labels == 0]
        assert ill.min() > well.max()
    monkeypatch.chdir(FOLDER)
    small, deep = (build_from_factory(f"hospital:{name}", (1, 16, 16), 2) for name in ("small", "deep"))
    assert [name for name, _ in small.named_parameters()] != [name for name, _ in deep.named_parameters()]
    flags = ["--engine", "inline", "--strategy", "ghn", "--clients", "2", "--cohort", "2", "--rounds", "2"]
    flags += ["--eval-every", "2", "--data", str(tmp_path / "north.npz"), "--set", "local.steps=5"]
    flags += ["--set", "models=[hospital:small,hospital:deep]", "--run-dir", str(tmp_path / "run")]
    assert main(flags) == 0
    assert "client-1" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # reading other packages' documentation touches names that are on their way out
def test_the_texts_can_be_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = load_client_data(DataSpec(data="text:load"))
    assert (data.input_shape, data.num_classes) == ((512,), 5)
    centres = torch.stack([data.train.inputs[data.train.labels == label].mean(0) for label in range(5)])
    cosine = torch.nn.functional.cosine_similarity(data.test.inputs[:, None], centres[None], dim=2)
    assert (cosine.argmax(1) == data.test.labels).float().mean() > 0.6
    flags = "--engine inline --data text:load --split dirichlet --clients 3 --cohort 2 --rounds 2 --eval-every 2"
    assert main([*flags.split(), "--run-dir", str(tmp_path / "run")]) == 0
    assert "pfedhn: round 2/2" in capsys.readouterr().out


# ---------------------------------------------------------------------- a task


def test_visits_are_learned_by_their_deviance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    module: Any = importlib.import_module("visits")
    task, counts = module.Visits(TaskSpec("visits")), torch.tensor([0.0, 1.0, 4.0])
    rates = torch.tensor([[0.5], [1.0], [2.0]])
    expected = reference.mean_poisson_deviance(counts, rates.flatten())
    assert task.loss(rates.log(), counts).item() == pytest.approx(expected, rel=1e-5)
    found = task.measure(task.answers(rates.log()), counts, 1, ["mae"]).values
    assert found["mae"] == pytest.approx(reference.mean_absolute_error(counts, rates.flatten()))
    assert task.describe(["y"]) == "the logarithms of 1 rates: y"
    with pytest.raises(DataError, match="counts from 0, found -1"):
        task.check(torch.tensor([-1.0]), 1)


def test_the_folder_is_left_as_it_was() -> None:
    assert {path.name for path in FOLDER.iterdir()} - {"__pycache__"} == {
        *("demo.yaml", "digits.ipynb"),
        *(f"{n}.py" for n in NAMES),
    }
