import json
import os
import re
import shutil
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from hyperbloom.client.cli import flower_client
from hyperbloom.client.flags import data_spec
from hyperbloom.common.config import load_run_config
from hyperbloom.server.grids.local_clients import client_settings
from tests.deploy.conftest import COMPOSE, TOP, run, tool
from tests.parsing import parse

CUDA = COMPOSE.with_name("compose.cuda.yaml")


def docker() -> str:
    found = shutil.which("docker")
    if found is None or subprocess.run([found, "compose", "version"], capture_output=True).returncode:
        pytest.skip("there is no docker compose here")
    return found


def test_hadolint_finds_nothing() -> None:
    run(tool("hadolint"), str(COMPOSE.with_name("Dockerfile")))


def test_the_image_needs_nothing_but_its_base() -> None:
    lines = COMPOSE.with_name("Dockerfile").read_text().splitlines()
    assert not any(line.lower().replace(" ", "").startswith("#syntax=") for line in lines)
    assert {line.split()[1] for line in lines if line.startswith("FROM ")} == {"$PYTHON"}
    assert "ARG PYTHON=python:3.11-slim" in lines[: lines.index("FROM $PYTHON AS libraries")]


def test_scripts_are_shell() -> None:
    for name in ("prepare", "replica", "lock"):
        run("sh", "-n", str(COMPOSE.with_name(name)))
        assert os.access(COMPOSE.with_name(name), os.X_OK)


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_the_image_takes_tested_versions_with_hashes(build: str) -> None:
    text = COMPOSE.with_name(f"requirements-{build}.txt").read_text()
    locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}", text, re.M))
    assert len(locked) == len(re.findall(r"^\w", text, re.M))
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    for one in map(Requirement, project["dependencies"]):
        assert one.specifier.contains(locked[one.name]), one
    assert ("cpu" in locked["torch"]) == (build == "cpu") == (not any(name.startswith("cuda") for name in locked))


@pytest.mark.parametrize("files", [[COMPOSE], [COMPOSE, CUDA]], ids=["cpu", "cuda"])
def test_every_service_has_as_little_as_it_needs(files: list[Path]) -> None:
    flags = [word for file in files for word in ("--file", str(file))]
    config = json.loads(run(docker(), "compose", *flags, "config", "--format", "json"))
    assert set(config["services"]) == {"prepare", "server", "client"}
    for name, service in config["services"].items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert {"cpus", "memory", "pids"} <= service["deploy"]["resources"]["limits"].keys(), name
        assert "ports" not in service and not service.get("privileged"), name
        assert name == "prepare" or (service["restart"], bool(service["healthcheck"])) == ("on-failure:5", True)
    volumes = {name: {each["source"] for each in one["volumes"]} for name, one in config["services"].items()}
    assert volumes == {"prepare": {"ca", "certs", "clients"}, "server": {"certs", "runs"}, "client": {"clients"}}
    assert config["networks"]["federation"]["internal"]


def test_clients_in_containers_have_the_data_of_the_run() -> None:
    words = yaml.safe_load(COMPOSE.read_text())["services"]["client"]["command"]
    given = data_spec(parse(flower_client, words[1:]).params)
    wanted = client_settings(load_run_config(TOP / "examples/demo.yaml", {}), 0, TOP).data
    assert given == replace(wanted, partition=None, partitions=1)  # docker/replica says which part


RUN = """\
strategy: pfedhn
clients: 2
cohort: 2
rounds: 120
eval_every: 20
checkpoint_every: 2
join_timeout_s: 120
model: mlp
data: {name: digits, split: concepts, max_train: 60}
"""


class Project:
    """A compose project of its own, whose volumes go with it."""

    def __init__(self, folder: Path) -> None:
        self.docker = docker()
        self.config = folder / "run.yaml"
        self.config.write_text(RUN)
        self.config.chmod(0o644)
        folder.chmod(0o755)

    def compose(self, *words: str, timeout: float = 300) -> str:
        name = f"hyperbloom-test-{os.getpid()}"
        environment = {**os.environ, "CLIENTS": "2", "SHARES": "4", "RUN": "run-1", "CONFIG": str(self.config)}
        command = [self.docker, "compose", "--project-name", name, "--file", str(COMPOSE), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def containers(self, service: str) -> list[dict[str, object]]:
        lines = self.compose("ps", "--all", "--format", "json", service).splitlines()
        return sorted((json.loads(line) for line in lines), key=lambda one: one["Name"])

    def wait(self, what: str, come: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 600
        while not come():
            assert time.monotonic() < deadline, f"{what}: not in ten minutes\n{self.compose('logs', '--tail', '40')}"
            time.sleep(1)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    if subprocess.run([docker(), "image", "inspect", "hyperbloom"], capture_output=True).returncode:
        pytest.skip("there is no Docker engine with the image hyperbloom here (docker compose build)")
    project = Project(tmp_path)
    try:
        yield project
    finally:
        project.compose("down", "--volumes", "--timeout", "1")


@pytest.mark.docker
@pytest.mark.timeout(1800)
def test_a_run_in_containers_outlives_a_client_and_its_server(project: Project, tmp_path: Path) -> None:
    project.compose("up", "--detach", "--scale", "client=3")

    def told() -> str:
        return project.compose("logs", "server")

    project.wait("three clients", lambda: "3 clients are here" in told())
    name = str(project.containers("client")[0]["Name"])
    run(project.docker, "kill", name)
    project.wait("a loss", lambda: " left" in told())
    run(project.docker, "start", name)
    project.wait("a return", lambda: " is back" in told())
    # From inside, as a crash: what somebody stops from outside is not started again.
    project.compose("exec", "server", "python", "-c", KILL)
    project.wait("a new start", lambda: "going on after round" in told())

    project.wait("the end", lambda: all(one["State"] == "exited" for one in project.containers("server")))
    project.wait("goodbye", lambda: all(one["State"] == "exited" for one in project.containers("client")))
    ends = [one["ExitCode"] for service in ("prepare", "server", "client") for one in project.containers(service)]
    assert ends == [0] * 5
    project.compose("cp", "server:/runs/run-1", str(tmp_path / "out"))
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, 121))
    assert len(json.loads((tmp_path / "out/summary.json").read_text())["pfedhn"]["test_accuracy"]) == 3
    roster = json.loads((tmp_path / "out/roster.json").read_text())
    assert "client-0" in json.dumps(roster) and "client-3" not in json.dumps(roster)


KILL = """
import os, pathlib, signal
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    words = path.read_bytes().split(b"\\0")
    if int(path.parent.name) not in (1, os.getpid()) and any(word.endswith(b"flower-server") for word in words):
        os.kill(int(path.parent.name), signal.SIGKILL)
"""
