"""Virtual clients as Flower's simulation has them: nodes that know a number, and an engine that may fail."""

import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import Mock

import flwr.simulation
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import ServerApp
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

from hyperbloom.client.keep.state import ClientState
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import LocalConfig, RunConfig
from hyperbloom.common.errors import ConfigError, ConnectionFailed, DataError
from hyperbloom.common.messages import Greeting, Introduction
from hyperbloom.server.cli import main
from hyperbloom.server.grids import simulation
from hyperbloom.server.grids.engine import VirtualClients, inline_grid, virtual_clients
from hyperbloom.server.grids.inline import InlineGrid
from hyperbloom.server.loop.session import Session
from hyperbloom.server.runs.folder import RunFolder

RAY = Mock()
CONFIG = RunConfig(
    strategy="pfedhn-pc",
    clients=4,
    cohort=3,
    rounds=3,
    eval_every=1,
    local=LocalConfig(steps=3),
    options={"hidden_dim": 8},
)


def numbered(app: VirtualClients) -> InlineGrid:
    """Return a grid whose nodes know what Flower's simulation tells them."""
    return InlineGrid(app, [{"partition-id": index, "num-partitions": 4} for index in range(4)])


def outcome(grid: InlineGrid, folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Run a session and return the server's last state and the selection."""
    session = Session(CONFIG, grid, "run-1", [RunFolder(folder, CONFIG, "run-1")])
    results = session.run()
    return load_file(folder / "hypernetwork-last.safetensors"), results


def test_numbered_nodes_are_the_clients_of_the_inline_engine(tmp_path: Path) -> None:
    inline, selected = outcome(inline_grid(CONFIG, tmp_path / "inline"), tmp_path / "inline")
    client_for.cache_clear()
    app = pickle.loads(pickle.dumps(virtual_clients(CONFIG, tmp_path / "numbered")))
    state, again = outcome(numbered(app), tmp_path / "numbered")
    assert again == selected
    assert state.keys() == inline.keys()
    for name, tensor in inline.items():
        assert torch.equal(state[name], tensor), name
    kept = {path.parent.parent.name for path in (tmp_path / "numbered").glob("clients/*/personal/*")}
    assert kept == {"client-0", "client-1", "client-2", "client-3"}


def test_two_actors_do_not_work_as_the_same_client(tmp_path: Path) -> None:
    session = Session(CONFIG, numbered(virtual_clients(CONFIG, tmp_path)), "run-1", [RunFolder(tmp_path, CONFIG, "r")])
    with ClientState(tmp_path / "clients" / "client-2").lock():
        (selection,) = session.run().values()
    assert set(selection.test_accuracy) == {"client-0", "client-1", "client-3"}
    lines = (tmp_path / "clients.jsonl").read_text()
    assert "RefusedError: process" in lines and "already runs as this client" in lines


def test_an_answer_leaves_the_nodes_own_configuration_alone(tmp_path: Path) -> None:
    app = virtual_clients(CONFIG, tmp_path)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    context = Context(1, 9, {"partition-id": 3, "num-partitions": 4}, RecordDict(), {})
    reply = app(Message(Greeting("1").pack(), 9, Greeting.type), context)
    assert Introduction.unpack(reply.content).client_id == "client-3"
    assert context.node_config == {"partition-id": 3, "num-partitions": 4}  # Flower reads it after every answer


def test_data_that_are_not_there_are_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="client 0 of 2000"):
        virtual_clients(CONFIG.model_copy(update={"clients": 2000}), tmp_path)


# ---------------------------------------------------------------------- the engine, without Ray


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], None]:
    """Return a function that puts another engine in the place of Flower's."""
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")  # restored afterwards
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(simulation, "find_spec", lambda name: "found")
    monkeypatch.setitem(sys.modules, "ray", RAY)
    RAY.init.reset_mock(side_effect=True)

    def put(run: Callable[..., None]) -> None:
        monkeypatch.setattr(flwr.simulation, "run_simulation", run)

    return put


def context() -> Context:
    return Context(1, 1, {}, RecordDict(), {})


def test_the_grid_is_there_as_long_as_it_is_needed(
    engine: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, seen = InlineGrid(VirtualClients(CONFIG, tmp_path), []), []

    def run(server: ServerApp, app: VirtualClients, clients: int, backend_config: dict[str, Any]) -> None:
        server(grid, context())
        seen.append((clients, backend_config["client_resources"]["num_cpus"]))

    engine(run)
    with simulation.simulation_grid(VirtualClients(CONFIG, tmp_path), 4) as (found, watch):
        assert found is grid
        watch()
        assert not seen
    assert seen == [(4, 1)]
    assert RAY.init.call_args.kwargs["address"] == "local"
    assert simulation.os.environ["RAY_AUTH_MODE"] == "token"
    token = simulation.os.environ["RAY_AUTH_TOKEN"]
    assert len(token) == 64
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with simulation.simulation_grid(VirtualClients(CONFIG, tmp_path), 4):
        pass
    assert RAY.init.call_args.kwargs["address"] is None
    assert simulation.os.environ["RAY_AUTH_TOKEN"] == token  # a cluster has its own


def test_gpus_are_shared_so_that_every_actor_gets_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for cores in (1, 6, 7, 16):
        monkeypatch.setattr(simulation.os, "cpu_count", lambda cores=cores: cores)
        resources = simulation._resources()
        assert resources["num_cpus"] == 1
        parts = round(10_000 * resources["num_gpus"])
        assert parts == pytest.approx(10_000 * resources["num_gpus"], abs=1e-6)  # Ray's resolution
        assert 10_000 - cores < cores * parts <= 10_000


@pytest.mark.parametrize("started", [False, True])
def test_an_engine_that_fails_says_why(engine: Callable[..., None], tmp_path: Path, started: bool) -> None:
    app = VirtualClients(CONFIG, tmp_path)

    def run(server: ServerApp, *args: Any, **options: Any) -> None:
        if started:
            Thread(target=server, args=(InlineGrid(app, []), context())).start()
        raise RuntimeError("An error was encountered.") from ValueError("no\n memory")

    engine(run)
    with pytest.raises(ConnectionFailed) as caught, simulation.simulation_grid(app, 4) as (_, watch):
        assert started
        while True:  # what a session does that waits for clients
            watch()
            time.sleep(0.01)
    assert str(caught.value) == "Flower's simulation has ended: no memory"


def test_ray_that_cannot_be_started_is_told_in_a_line(engine: Callable[..., None], tmp_path: Path) -> None:
    engine(lambda *args, **options: None)
    RAY.init.side_effect = RuntimeError("no\nport")
    with (
        pytest.raises(ConnectionFailed, match="--engine ray: Ray cannot be started: no port"),
        simulation.simulation_grid(VirtualClients(CONFIG, tmp_path), 4),
    ):
        pass


def test_without_ray_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulation, "find_spec", lambda name: None)
    assert main(["--engine", "ray", "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install 'hyperbloom[simulation]'" in error
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="Ray"), simulation.simulation_grid(VirtualClients(CONFIG, tmp_path), 4):
        pass
