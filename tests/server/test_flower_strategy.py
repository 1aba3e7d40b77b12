"""Any of our algorithms behind Flower's interface for strategies, over the inline grid."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Result, Strategy
from safetensors.torch import load_file

from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import RunConfig, load_run_config
from hyperbloom.common.errors import CohortError, ConfigError
from hyperbloom.server.cli import main
from hyperbloom.server.flower_strategy import FlowerStrategy
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.server.runs.lines import read_lines

REFUSAL = r"^a round may have several exchanges with a client; call start\(\), which plays them all$"


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
    strategy: Strategy = FlowerStrategy(config)
    return strategy.start(inline_grid(config, folder), **changes)


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
    arrays = {name: torch.from_numpy(array.numpy()) for name, array in result.arrays.items()}
    assert arrays.keys() == stored.keys()
    assert all(torch.equal(arrays[name], stored[name]) for name in stored)
    assert result.evaluate_metrics_serverapp == {4: MetricRecord({"tensors": len(stored)})}


def test_start_takes_rounds_and_seconds_from_its_caller(config: RunConfig, tmp_path: Path) -> None:
    result = started(config, tmp_path, num_rounds=3, timeout=60.0)
    assert list(result.train_metrics_clientapp) == [1, 2, 3]


def test_a_run_that_cannot_work_is_refused_before_it_starts() -> None:
    with pytest.raises(ConfigError, match="asynchronous: fedavg learns from whole rounds"):
        FlowerStrategy(RunConfig(strategy="fedavg", asynchronous=True))


def test_arrays_to_start_from_are_refused(config: RunConfig, tmp_path: Path) -> None:
    arrays = ArrayRecord({"w": torch.zeros(2)})
    with pytest.raises(ConfigError, match=r"^initial_arrays: networks start from the run's seed; set init_from"):
        started(config, tmp_path, initial_arrays=arrays)


def test_clients_that_do_not_come_end_it(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(CohortError, match="2 of 3 clients joined"):
        FlowerStrategy(config.model_copy(update={"clients": 3, "join_timeout_s": 0.1})).start(
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
