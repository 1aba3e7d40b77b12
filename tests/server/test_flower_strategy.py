"""Any of our algorithms behind Flower's interface for strategies, over the inline grid."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Result, Strategy
from safetensors.torch import load_file

import hyperbloom
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import RunConfig, load_run_config, make_run_config
from hyperbloom.common.errors import CohortError, ConfigError
from hyperbloom.server.cli import main
from hyperbloom.server.flower_strategy import ROSTER, FlowerStrategy
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.server.loop.listener import Listener, RoundReport
from hyperbloom.server.runs.lines import read_lines
from hyperbloom.server.runs.recorded import read_summary
from hyperbloom.strategies import STRATEGIES
from hyperbloom.strategies.algorithm import Algorithm

REFUSAL = r"^a round may have several exchanges with a client; call start\(\), which plays all$"


@pytest.fixture(scope="module", params=["pfedhn", "fedavg"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of `flower-server --engine inline` with a baseline."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = f"--engine inline --strategy {request.param} --clients 3 --cohort 2 --rounds 4 --eval-every 2"
    keys = "--set local.steps=3 --set data.max_train=60 --set baselines=[local]"
    assert main([*words.split(), *keys.split(), "--run-dir", str(folder)]) == 0
    client_for.cache_clear()
    return folder


@pytest.fixture
def config() -> RunConfig:
    """Return a run of two clients."""
    return RunConfig(strategy="local", clients=2, cohort=2, rounds=1, eval_every=1)


def started(config: RunConfig, folder: Path, **changes: Any) -> Result:
    """Start a run as a ServerApp of somebody else's would, who knows the grid alone."""
    strategy: Strategy = FlowerStrategy(config, folder / "run")
    return strategy.start(inline_grid(config, folder), **changes)


def test_without_a_grid_it_opens_no_server(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^start: expected Flower's grid, found None$"):
        FlowerStrategy(config, tmp_path / "run").start(None)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_its_numbers_are_those_of_flower_server_to_the_bit(finished: Path, tmp_path: Path) -> None:
    config = load_run_config(finished / "config.yaml", {})
    asked: list[int] = []

    def central(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        asked.append(number)
        return MetricRecord({"tensors": len(arrays)}) if number == 4 else None

    result = started(config, tmp_path, evaluate_fn=central)
    lines = {line["round"]: line for line in read_lines(finished / "metrics.jsonl")}
    assert {number: (m["loss"], m["clients"]) for number, m in result.train_metrics_clientapp.items()} == {
        number: (line["loss"], line["clients"]) for number, line in lines.items()
    }
    for number, metrics in result.evaluate_metrics_clientapp.items():
        assert dict(metrics) == {key: lines[number][key] for key in metrics}
    assert asked == sorted(result.evaluate_metrics_clientapp) == [2, 4]
    stored = load_file(finished / "hypernetwork-last.safetensors")
    arrays = {name: torch.from_numpy(array.numpy()) for name, array in result.arrays.items() if name != ROSTER}
    assert arrays.keys() == stored.keys()
    assert all(torch.equal(arrays[name], stored[name]) for name in stored)
    assert result.evaluate_metrics_serverapp == {4: MetricRecord({"tensors": len(stored) + 1})}
    for name in ("hypernetwork-last.safetensors", "summary.json"):
        assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()


def test_start_takes_rounds_and_seconds_from_its_caller(config: RunConfig, tmp_path: Path) -> None:
    result = started(config, tmp_path, num_rounds=3, timeout=60.0)
    assert list(result.train_metrics_clientapp) == [1, 2, 3]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_rounds": 0}, r"rounds: expected greater than 0, found 0 in FlowerStrategy\.start"),
        ({"timeout": -5.0}, r"round_timeout_s: expected greater than 0, found -5\.0 in FlowerStrategy\.start"),
    ],
)
def test_start_refuses_what_no_run_can_have(
    config: RunConfig, tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        started(config, tmp_path, **given)


@pytest.mark.parametrize(("given", "evaluated"), [({}, [2, 4, 6, 8]), ({"eval_every": 5}, [5, 8])])
def test_fewer_rounds_are_evaluated_as_in_a_run_of_so_many(
    given: dict[str, Any], evaluated: list[int], tmp_path: Path
) -> None:
    config = RunConfig.model_validate({"clients": 2, "local": {"steps": 1}, **given})
    assert list(started(config, tmp_path, num_rounds=8).evaluate_metrics_clientapp) == evaluated


def test_a_run_that_cannot_work_is_refused_before_it_starts() -> None:
    with pytest.raises(ConfigError, match="asynchronous: fedavg learns from whole rounds"):
        FlowerStrategy(RunConfig(strategy="fedavg", asynchronous=True))


def test_it_goes_on_from_the_arrays_of_an_earlier_result_with_the_same_clients(tmp_path: Path) -> None:
    config = make_run_config({"clients": 2, "rounds": 1, "local": {"steps": 1}, "eval_every": 1}, {}, "a test")
    first = started(config, tmp_path)
    client_for.cache_clear()
    (tmp_path / "run").rename(tmp_path / "first")
    result = started(config, tmp_path, initial_arrays=first.arrays)
    ends, begins = (
        next(line for line in read_lines(tmp_path / name / "metrics.jsonl") if line["round"] == number)
        for name, number in (("first", 1), ("run", 0))
    )
    assert begins["val_loss"] == ends["val_loss"]
    assert len(result.arrays["embeddings"].numpy()) == 2, "nobody got a second row"


def test_arrays_that_no_run_has_made_are_refused(config: RunConfig, tmp_path: Path) -> None:
    arrays = ArrayRecord({"w": torch.zeros(2)})
    with pytest.raises(ConfigError, match=r"^initial_arrays: expected Result.arrays of an earlier run, .*; found w\."):
        started(config, tmp_path, initial_arrays=arrays)


def test_releases_of_noisy_changes_are_counted(tmp_path: Path) -> None:
    values = {"strategy": "fedavg", "clients": 2, "cohort": 2, "rounds": 2, "eval_every": 2, "local": {"steps": 1}}
    started(make_run_config(values | {"privacy": {"where": "client"}}, {}, "a test"), tmp_path)
    clients = json.loads((tmp_path / "run/privacy.json").read_text())["clients"]
    assert {name: each["releases"] for name, each in clients.items()} == {"client-0": 2, "client-1": 2}


def test_it_goes_on_in_a_folder_where_the_run_has_begun(config: RunConfig, tmp_path: Path) -> None:
    class Killed(Listener):
        def round_done(self, report: RoundReport) -> None:
            if report.number == 2:
                raise ConnectionError("killed")

    config = config.model_copy(update={"rounds": 3, "checkpoint_every": 1})
    with pytest.raises(ConnectionError, match="killed"):
        FlowerStrategy(config, tmp_path / "run", [Killed()]).start(inline_grid(config, tmp_path))
    result = started(config, tmp_path)
    assert list(result.train_metrics_clientapp) == [1, 2, 3]
    with pytest.raises(ConfigError, match="is complete"):
        started(config, tmp_path)
    with pytest.raises(ConfigError, match=r"^run_dir: .* was begun with rounds = 3, found 4; choose another folder$"):
        started(config, tmp_path, num_rounds=4)


def test_a_run_that_flower_ends_says_so(config: RunConfig, tmp_path: Path) -> None:
    """Flower's handler of SIGTERM, by which `flwr stop` ends a ServerApp, calls `sys.exit`."""

    class Stopped(Listener):
        def round_done(self, report: RoundReport) -> None:
            sys.exit(0)

    with pytest.raises(SystemExit):
        FlowerStrategy(config, tmp_path / "run", [Stopped()]).start(inline_grid(config, tmp_path))
    assert "the run stopped: its process was ended" in (tmp_path / "run/events.jsonl").read_text()


def test_a_run_that_stopped_in_a_baseline_has_the_result_of_its_strategy(tmp_path: Path) -> None:
    class Killed(Listener):
        def phase(self, algorithm: Algorithm, name: str) -> None:
            self.name = name

        def round_done(self, report: RoundReport) -> None:
            if self.name == "fedavg":
                raise ConnectionError("killed")

    keys = {"clients": 2, "cohort": 2, "rounds": 2, "eval_every": 2, "baselines": ["fedavg"], "gains": False}
    config = make_run_config({**keys, "local": {"steps": 1}}, {}, "a test")
    asked: list[int] = []
    with pytest.raises(ConnectionError, match="killed"):
        FlowerStrategy(config, tmp_path / "run", [Killed()]).start(inline_grid(config, tmp_path))
    result = started(config, tmp_path, evaluate_fn=lambda number, arrays: asked.append(number))
    stored = load_file(tmp_path / "run/hypernetwork-last.safetensors")
    assert set(result.arrays) == {*stored, ROSTER}
    assert not asked, "the baseline's state is none of the caller's"
    (chosen,) = (each for name, each in read_summary(tmp_path / "run").items() if name == "pfedhn")
    assert result.evaluate_metrics_clientapp[chosen.round]["val_mean"] == chosen.metrics["val_mean"]


def test_an_evaluation_in_asynchronous_mode_leaves_the_training_of_its_round(tmp_path: Path) -> None:
    keys = {"clients": 2, "cohort": 2, "rounds": 2, "eval_every": 1, "asynchronous": True, "gains": False}
    result = started(make_run_config({**keys, "local": {"steps": 1}}, {}, "a test"), tmp_path)
    assert [metrics["clients"] for metrics in result.train_metrics_clientapp.values()] == [2, 2]
    assert list(result.evaluate_metrics_clientapp) == [1, 2]


def test_each_algorithm_is_a_strategy_of_the_library(tmp_path: Path) -> None:
    ours = {each.__name__ for each in STRATEGIES.values() if each.__module__.startswith("hyperbloom.")}
    assert set(hyperbloom.__all__) == ours | {"Client", "Report", "Run", "run"}
    strategy = hyperbloom.PFedHN(clients=2, embedding_dim=5, local={"steps": 7}, run_dir=tmp_path)
    assert isinstance(strategy, FlowerStrategy)
    assert (strategy.config.strategy, strategy.config.local.steps) == ("pfedhn", 7)
    assert strategy.config.options == {"embedding_dim": 5}
    with pytest.raises(ConfigError, match=r"^clint: unknown key in options of pfedhn\."):
        hyperbloom.PFedHN(clint=2)
    with pytest.raises(AttributeError, match="no attribute 'FedSGD'"):
        _ = hyperbloom.FedSGD


def test_importing_the_package_imports_neither_torch_nor_flower() -> None:
    code = "import sys, hyperbloom; print(sorted({'torch', 'flwr', 'numpy', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_clients_that_do_not_come_end_it(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(CohortError, match="2 of 3 clients joined"):
        FlowerStrategy(config.model_copy(update={"clients": 3, "join_timeout_s": 0.1}), tmp_path / "run").start(
            inline_grid(config, tmp_path)
        )


@pytest.mark.parametrize(
    "call",
    [
        lambda strategy, grid: strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid),
        lambda strategy, grid: strategy.aggregate_train(1, []),
        lambda strategy, grid: strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), grid),
        lambda strategy, grid: strategy.aggregate_evaluate(1, []),
    ],
)
def test_flowers_own_loop_is_told_what_to_call_instead(
    config: RunConfig, tmp_path: Path, call: Callable[[Strategy, object], object]
) -> None:
    with pytest.raises(NotImplementedError, match=REFUSAL):
        call(FlowerStrategy(config), inline_grid(config, tmp_path))
