"""The Flower app on a SuperLink and SuperNodes that we did not start, and in Flower's simulation."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file

import hyperbloom
from benchmarks import LEASH
from hyperbloom.client.app import app
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import make_run_config
from hyperbloom.server.broker.superlink import free_port
from hyperbloom.server.cli import main
from hyperbloom.server.flower_strategy import FlowerStrategy
from hyperbloom.server.grids.inline import InlineGrid

from .conftest import cleared

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/server_app.py"
KEYS = {"strategy": "pfedhn-pc", "clients": 2, "cohort": 2, "rounds": 2, "eval_every": 2, "local.steps": 5}
FOREIGN = """\
[project]
name = "foreign"
version = "1.0.0"
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "hyperbloom.client.app:app"
[tool.flwr.app.config]
run-dir = ""
"""
DEADLINE_S = 400
HTTP = Version(version("flwr")) >= Version("1.40")
"""Whether Flower's own SuperLink speaks HTTP to clients, at the one port that it has."""


@dataclass
class Stock:
    """A SuperLink as Flower ships it, with a folder for all that its processes write."""

    folder: Path
    control: str
    fleet: str
    environment: Mapping[str, str]

    def run(self, project: Path, *flags: str) -> str:
        """Let Flower's command run an app to its end, and return what it prints."""
        command = [program("flwr"), "run", str(project), "stock", "--stream", *flags]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=DEADLINE_S)
        logs = "".join(path.read_text() for path in self.folder.glob("*.log"))
        assert done.returncode == 0, done.stdout + done.stderr + logs
        return done.stdout


def program(name: str) -> str:
    """Return the path of a program of this environment."""
    return str(Path(sys.executable).parent / name)


@contextmanager
def stock(folder: Path, *flags: str) -> Iterator[tuple[Stock, Callable[..., None]]]:
    """Run a stock SuperLink; yield it, and a function that starts further programs of Flower's beside it."""
    control, fleet = (f"127.0.0.1:{free_port()}" for _ in range(2))
    home = folder / "flwr"
    home.mkdir(parents=True)
    (home / "config.toml").write_text(f'[superlink.stock]\naddress = "{control}"\ninsecure = true\n')
    environment = {**os.environ, "FLWR_HOME": str(home), "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
    if "--fleet-api-address" in flags:  # for `flower-client` over gRPC
        environment["FLWR_INTERNAL_GRPC_FLEET_API"] = "1"
    environment |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with ExitStack() as stack:

        def start(name: str, *words: str) -> None:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            words = (*LEASH, program(name.partition(" ")[0]), "--insecure", *words)
            child = subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True)
            stack.callback(child.wait)
            stack.callback(child.terminate)

        host, port = control.split(":")
        address = ["--host", host, "--port", port, "--disable-runtime-dependency-installation"]
        start("flower-superlink", *address, *(flags or ("--fleet-api-address", fleet)))
        deadline = time.monotonic() + DEADLINE_S
        while not _answers(control):
            assert time.monotonic() < deadline, (folder / "flower-superlink.log").read_text()
            time.sleep(0.1)
        yield Stock(folder, control, control if HTTP else fleet, environment), start


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/health", timeout=2).is_success
    except httpx.TransportError:
        return False


def node_configs(folder: Path, state: str) -> list[dict[str, str]]:
    """Write the data of two clients, and return their node configs."""
    for index in range(2):
        rng = np.random.default_rng(index)
        x = rng.normal(size=(120, 6)).astype(np.float32)
        np.savez(folder / f"c{index}.npz", x=x, y=(x[:, index] > 0).astype(np.int64) + (x[:, 2] > 0.5))
    names = ("c0", "c1")
    return [
        {"client-id": name, "data": str(folder / f"{name}.npz"), "state-dir": str(folder / state / name)}
        for name in names
    ]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    """A stock SuperLink and two stock SuperNodes with data of their own."""
    folder = tmp_path_factory.mktemp("federation")
    with stock(folder) as (link, start):
        for index, each in enumerate(node_configs(folder, "state")):
            words = " ".join(f"{key}={json.dumps(value)}" for key, value in each.items())
            at = ("--superlink", link.fleet, "--port", str(free_port()))
            start(f"flower-supernode {index}", *at, "--node-config", words)
        yield link


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run with both clients in this process."""
    folder = tmp_path_factory.mktemp("inline")
    configs = node_configs(folder, "state")
    FlowerStrategy(make_run_config({}, KEYS, "a test"), folder / "run").start(InlineGrid(app, configs))
    client_for.cache_clear()
    return folder


def assert_equal(run: Path, state: Path, inline: Path) -> None:
    """Compare the server's state, the accuracies and the personal parts of two clients."""
    assert hyperbloom.Run(run).accuracy == hyperbloom.Run(inline / "run").accuracy
    run_id = json.loads((run / "environment.json").read_text())["run_id"]
    files = [(run / "hypernetwork-last.safetensors", inline / "run/hypernetwork-last.safetensors")]
    for name in ("c0", "c1"):
        (expected,) = (inline / "state" / name / "personal").glob("*.safetensors")
        files.append((state / name / "personal" / f"{run_id}-pfedhn-pc.safetensors", expected))
    for found, wanted in files:
        tensors, others = load_file(found), load_file(wanted)
        assert tensors.keys() == others.keys()
        for name, tensor in others.items():
            assert torch.allclose(tensors[name], tensor, rtol=0, atol=1e-6), (found, name)


def test_flwr_run_trains_on_stock_nodes_as_the_inline_engine_does(
    federation: Stock, inline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["app", "new", str(tmp_path / "ward"), *(f"--set={key}={KEYS[key]}" for key in KEYS)]) == 0
    run = tmp_path / "run"
    printed = federation.run(tmp_path / "ward", "--run-config", f"run-dir='{run}'")
    assert f"everything is in {run}" in printed
    assert_equal(run, federation.folder / "state", inline)
    (run / "report.html").unlink()
    assert main(["report", str(run)]) == 0 and (run / "report.html").exists()
    assert main(["watch", str(run)]) == 0
    assert "pfedhn-pc: round 2/2" in capsys.readouterr().out


def test_a_foreign_server_app_gives_the_same_numbers(federation: Stock, inline: Path, tmp_path: Path) -> None:
    project, run = tmp_path / "foreign", tmp_path / "run"
    project.mkdir()
    (project / "pyproject.toml").write_text(FOREIGN)
    (project / "server_app.py").write_text(EXAMPLE.read_text())
    federation.run(project, "--run-config", f"run-dir='{run}'")
    assert_equal(run, federation.folder / "state", inline)


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
@pytest.mark.parametrize("over", ["grpc", "http"])
def test_flower_server_uses_a_superlink_that_is_there(
    over: str, inline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if over == "http" and not HTTP:
        pytest.skip("until 1.39 Flower's own SuperLink speaks gRPC alone to clients")
    keys = [f"--set={key}={KEYS[key]}" for key in KEYS]
    with cleared(tmp_path) as site:
        fleet = ["--fleet-api-address", f"127.0.0.1:{site.port}"] if over == "grpc" else []
        with stock(tmp_path / "link", "--isolation", "process", *fleet) as (link, _):
            if over == "http":
                site.port = int(link.control.rpartition(":")[2])
            for name in ("c0", "c1"):
                site.client(name, "--data", str(inline / f"{name}.npz"), *(["--http"] if over == "http" else []))
            run = tmp_path / "run"
            assert main(["--superlink", link.control, "--insecure", *keys, "--run-dir", str(run)]) == 0
            assert f"the clients are the nodes of the SuperLink at {link.control}" in capsys.readouterr().out
        assert_equal(run, tmp_path / "state", inline)
        assert main(["--superlink", link.control, "--insecure", "--run-dir", str(tmp_path / "none")]) == 5
        said = capsys.readouterr().err
        assert f"the SuperLink at {link.control} does not answer" in said and "--resume goes on with a run" in said


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install '.[simulation]'")
def test_the_same_app_runs_in_flowers_simulation(tmp_path: Path) -> None:
    assert main(["app", "new", str(tmp_path / "ward"), *(f"--set={key}={KEYS[key]}" for key in KEYS)]) == 0
    with stock(tmp_path / "link", "--simulation") as (link, _):
        flags = ["--federation-config", "num-supernodes=2"]
        link.run(tmp_path / "ward", "--run-config", f"run-dir='{tmp_path / 'run'}'", *flags)
    inline = hyperbloom.run(KEYS, run_dir=tmp_path / "inline")
    assert hyperbloom.Run(tmp_path / "run").accuracy == inline.accuracy
    states = [load_file(folder / "hypernetwork-last.safetensors") for folder in (tmp_path / "run", inline.folder)]
    for name, tensor in states[1].items():
        assert torch.allclose(states[0][name], tensor, rtol=0, atol=1e-6), name
