"""The trackers that we bring, as their own programs read what they wrote."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hyperbloom
from hyperbloom.common.wire.orders import TrainResult
from hyperbloom.server.cli import main
from hyperbloom.server.runs.checkpoint import locked
from hyperbloom.server.runs.lines import metrics_line
from hyperbloom.server.watch import tracking
from hyperbloom.server.watch.tracking import follow

from ..recorded import Recording

pytestmark = pytest.mark.filterwarnings("ignore")  # of their imports
STRATEGIES = ("pfedhn", "local")


# ---------------------------------------------------------------------- MLflow


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database without runs, which takes MLflow seconds to make."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    pytest.importorskip("mlflow.tracking").MlflowClient(f"sqlite:///{path}").search_registered_models()
    return path


@pytest.fixture
def store(empty: Path, tmp_path: Path) -> str:
    """Return the address of a database of this test's own."""
    shutil.copyfile(empty, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def runs_of(store: str, experiment: str) -> dict[str, Any]:
    """Return the runs of an experiment by name."""
    client = pytest.importorskip("mlflow.tracking").MlflowClient(store)
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    assert len({run.info.run_name for run in found}) == len(found)
    return {run.info.run_name: run for run in found}


@pytest.mark.slow
def test_a_store_of_a_comparison_has_its_numbers(tmp_path: Path, store: str, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "compared"
    flags = "--seeds 1 --set clients=3 --set rounds=2 --set eval_every=1 --set data.max_train=20 --set local.steps=1"
    arguments = ["--strategies", ",".join(STRATEGIES), *flags.split(), "--out", str(out), "--track", f"mlflow:{store}"]
    assert main(["compare", *arguments, "--json"]) == 0, capfd.readouterr().err
    means = {row["name"]: row["mean"] for row in json.loads(capfd.readouterr().out)}
    found = runs_of(store, "compared")
    assert set(found) == {"pfedhn-seed0", "local-seed0"}
    for name in STRATEGIES:
        folder, run = out / f"{name}-seed0", found[f"{name}-seed0"]
        selected = json.loads((folder / "summary.json").read_text())[name]
        for key, value in selected["metrics"].items():
            assert run.data.metrics[f"selected/{key}"] == pytest.approx(value, nan_ok=True), key
        assert run.data.metrics["selected/test_mean"] == pytest.approx(means[name])
        assert (run.data.params["strategy"], run.data.params["data.max_train"]) == (name, "20")
        assert run.data.tags["hyperbloom.folder"] == folder.resolve().as_uri()
        assert run.info.status == "FINISHED"


def test_every_round_is_there_once_however_often_it_is_told(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "wards")
    recording, about = Recording(tmp_path / "run"), tmp_path / "run/environment.json"
    about.write_text(about.read_text().replace("run-1", "bob's run-1"))  # as of a folder that is so called
    recording.begin("pfedhn")
    for first, last, status in ((1, 3, "KILLED"), (4, 6, "KILLED")):
        for number in range(first, last + 1):
            recording.go(number)
        follow(tmp_path / "run", f"mlflow:{store}", lambda: False)
        (run,) = runs_of(store, "wards").values()
        assert run.info.status == status  # the baseline has not run
    history = tracking.MlflowClient(store).get_metric_history(run.info.run_id, "accuracy/test_mean")
    begun = run.info.start_time
    assert [(each.step, each.value, each.timestamp - begun) for each in history] == [
        (number, 10 * number + 1.0, 500 * number) for number in (2, 4, 6)
    ]


def test_exported_models_are_registered_by_client_if_asked(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    keys = {"strategy": "pfedhn", "baselines": ["local"], "clients": 2, "cohort": 2, "rounds": 1, "local.steps": 1}
    ran = hyperbloom.run(keys, run_dir=tmp_path / "run")
    ran.client("client-1").export(ran.folder / "models" / "client-1")
    client = tracking.MlflowClient(store)
    follow(ran.folder, f"mlflow:{store}", lambda: False)
    assert not client.search_registered_models()
    monkeypatch.setenv("HYPERBLOOM_REGISTER", "wards")
    for _ in range(2):
        follow(ran.folder, f"mlflow:{store}", lambda: False)
    (model,) = client.search_registered_models()
    found = {each.version: each.source for each in client.search_model_versions(f"name = '{model.name}'")}
    assert model.name == "wards-client-1"
    source = (ran.folder / "models" / "client-1").resolve().as_uri()
    assert found == {"1": source, "2": source} or found == {1: source, 2: source}


# ---------------------------------------------------------------------- TensorBoard


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars by name, each with its rounds, as TensorBoard reads them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_curves_are_those_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    follow(Recording(tmp_path / "run").whole(), "tensorboard", lambda: False)
    for name in ("run", "run local"):
        found = curves(tmp_path / "run" / "tensorboard" / name)
        assert dict(found["accuracy/test_mean"]) == pytest.approx({2: 21.0, 4: 41.0, 6: 61.0})
        assert dict(found["accuracy/test_worst"]) == pytest.approx({2: 20.0, 4: 40.0, 6: 60.0})
        assert dict(found["round/loss"]) == pytest.approx({number: 1 / number for number in range(1, 7)})
        assert found["round/bytes_down"] == [(number, 2000.0) for number in range(1, 7)]


def test_without_losses_there_is_no_curve_of_zeros(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = Recording(tmp_path / "run")
    run.begin("pfedhn")
    report = run.report(1)
    report.outcome.results["a"] = TrainResult(0.1, loss=None)
    assert "loss" not in metrics_line(report)
    run.folder.round_done(report)
    follow(tmp_path / "run", f"tensorboard:{tmp_path / 'boards'}", lambda: False)
    found = curves(tmp_path / "boards" / tmp_path.name / "run")
    assert "round/loss" not in found and found["round/left_out"] == [(1, 0.0)]


def test_a_run_that_is_told_again_is_there_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = Recording(tmp_path / "run")
    run.begin("pfedhn")
    for first, last in ((1, 4), (5, 6)):
        for number in range(first, last + 1):
            run.go(number)
        follow(tmp_path / "run", "tensorboard", lambda: False)
    found = curves(tmp_path / "run" / "tensorboard" / "run")
    assert [step for step, _ in found["round/seconds"]] == [1, 2, 3, 4, 5, 6]


# ---------------------------------------------------------------------- Weights & Biases


class FakeRun:
    """A run of the package, which keeps what it is given."""

    def __init__(self, **begun: Any) -> None:
        self.begun, self.lines, self.summary, self.code = begun, list[dict[str, float]](), dict[str, Any](), -1
        self.log = self.lines.append

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "round")

    def finish(self, exit_code: int) -> None:
        self.code = exit_code


def test_rounds_settings_and_the_selected_round_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[FakeRun] = []

    def init(**begun: Any) -> FakeRun:
        assert begun["settings"]["symlink"] is False
        logs = begun["dir"] / "wandb" / f"offline-run-{len(runs)}" / "logs"
        logs.mkdir(parents=True)
        (logs / "debug-core.log").symlink_to(tmp_path / "cache")  # whatever the settings say
        runs.append(FakeRun(**begun))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))  # type: ignore[arg-type]
    monkeypatch.setattr(tracking, "find_spec", lambda name: name)
    folder = Recording(tmp_path / "wards" / "run").whole()
    follow(folder, "wandb", lambda: False)
    follow(folder, "wandb:mine", lambda: False)
    assert [(run.begun["name"], run.begun["project"]) for run in runs] == [
        *(("run", "wards"), ("run local", "wards")),
        *(("run", "mine"), ("run local", "mine")),
    ]
    run = runs[0]
    assert run.begun["mode"] == "offline" and run.begun["config"]["strategy"] == "pfedhn"
    assert [(line["round"], line.get("accuracy/test_mean")) for line in run.lines] == [
        *((1, None), (2, 21.0), (3, None), (4, 41.0), (5, None), (6, 61.0))
    ]
    assert run.summary["selected/test_mean"] == 61.0 and run.summary["folder"] == folder.as_uri()
    assert run.code == 0
    with locked(folder):  # `--resume` takes it
        pass


def test_the_package_writes_a_file_for_each_strategy_without_a_network(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    follow(Recording(tmp_path / "run").whole(), "wandb", lambda: False)
    wandb.teardown()  # as the end of the tracker's process does
    (strategy, baseline) = (
        path.read_bytes() for path in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    )
    assert (b"run local" in strategy) is not (b"run local" in baseline)
    for content in (strategy, baseline):
        assert b"accuracy/test_mean" in content and b"selected/test_mean" in content
