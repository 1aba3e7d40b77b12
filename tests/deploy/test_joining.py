"""The commands of compose, systemd and Kubernetes as their files have them: clients enrol, from empty folders."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.broker.superlink import free_port
from tests.deploy.conftest import COMPOSE, TOP

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(900)]

PATIENCE_S = 200
PROGRAMS = Path(sys.executable).parent
RUN = "{strategy: pfedhn, clients: 2, cohort: 2, rounds: 2, input_shape: [1, 8, 8], num_classes: 10, model: mlp}\n"
DATA = ["--data=digits", "--max-train=60"]


class Machine:
    """Plays a machine: all its paths are in one folder, and all its names are loopback."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.started: list[subprocess.Popen[str]] = []

    def here(self, text: str) -> str:
        """Return a word of a command with the paths, addresses and programs of this test."""
        text = text.replace("/opt/hyperbloom/bin/", "").replace("0.0.0.0", "127.0.0.1")
        text = re.sub(r"(?<![\w.{}-])/(?=(ca|certs|clients|runs|run|state|var|etc)\b)", f"{self.folder}/", text)
        return re.sub(r"\b(server|hyperbloom|gpu-box):9092", f"127.0.0.1:{self.port}", text)

    def start(self, command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        """Start a command of a file."""
        known = {**os.environ, "PATH": f"{PROGRAMS}:/usr/bin:/bin", "HOME": str(self.folder)}
        known |= {key: self.here(value) for key, value in environment.items()}
        words = [self.here(word) for word in command]
        with (self.folder / f"{len(self.started)}.log").open("w") as log:
            self.started.append(subprocess.Popen(words, env=known, stdout=log, stderr=log, text=True))
        return self.started[-1]

    def run(self, command: Sequence[str], **environment: str) -> str:
        """Run a command of a file to its end; return its output."""
        assert self.start(command, **environment).wait(PATIENCE_S) == 0, self.said()
        return self.said(-1)

    def server(self, command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        """Start a server at this machine's port."""
        return self.start([*command, f"--port={self.port}"], **environment)

    def said(self, number: int | None = None) -> str:
        """Return the output of one process or of all."""
        logs = [(self.folder / f"{at}.log").read_text() for at in range(len(self.started))]
        return "\n".join(logs) if number is None else logs[number]

    def token(self, text: str = "") -> str:
        """Return the token of the line for clients, which a process prints if not in `text`."""
        end = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"--token (HB1\.\S+)", text or self.said())):
            assert time.monotonic() < end and all(each.poll() in (None, 0) for each in self.started), self.said()
            time.sleep(0.1)
        return found[1]

    def check(self, clients: set[str], registry: Path) -> None:
        """Wait until everybody has ended, and see who has enrolled."""
        assert [each.wait(PATIENCE_S) for each in self.started] == [0] * len(self.started), self.said()
        assert set(ClientRegistry(registry).clients()) == clients


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    try:
        yield machine
    finally:
        for each in machine.started:
            each.send_signal(signal.SIGKILL)
            each.wait()


def test_compose(machine: Machine) -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    for name in ("ca", "certs", "clients", "runs"):
        (machine.folder / name).mkdir()
    for name in ("prepare", "replica"):
        (machine.folder / name).write_text(machine.here((COMPOSE.parent / name).read_text()))
    machine.run(["sh", str(machine.folder / "prepare")], SHARES="4")
    command = [re.sub(r"\$\{\w+(:-([^}]*))\}", r"\2", word) for word in services["server"]["command"]]
    own = ["--clients=2", "--cohort=2", f"--config={machine.folder}/run.yaml"]
    machine.server([word for word in command if word.split("=")[0] not in ("--clients", "--cohort", "--config")] + own)
    for _ in range(2):
        machine.start(["sh", str(machine.folder / "replica"), *services["client"]["command"][1:]], SHARES="4")
    machine.check({"client-0", "client-1"}, machine.folder / "certs/clients.json")
    assert not (machine.folder / "certs/ca.key").exists()


def unit(name: str, instance: str, machine: Machine, environment: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a systemd unit, as systemd would make them."""
    text = (TOP / f"deploy/systemd/{name}@.service").read_text().replace("\\\n", " ")
    text = text.replace("%i", instance).replace("%S", "/var/lib")
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.M)
    (settings,) = re.findall(r"^Environment=(.*)$", text, re.M)
    for key, value in environment.items():
        command = command.replace(f"${{{key}}}", value).replace(f"${key}", value)
    return shlex.split(command), dict(word.split("=", 1) for word in settings.split())


def test_systemd(machine: Machine) -> None:
    (machine.folder / "etc/hyperbloom").mkdir(parents=True)
    (machine.folder / "etc/hyperbloom/run-1.yaml").write_text(RUN)
    (machine.folder / "var/lib/hyperbloom").mkdir(parents=True)
    command, environment = unit("hyperbloom-server", "run-1", machine, {})
    machine.server(command, **environment)
    shown = dict(
        line.split("=", 1)
        for line in (TOP / "deploy/systemd/client.env").read_text().splitlines()
        if not line.startswith("#")
    )
    token = {"HYPERBLOOM_TOKEN": shown.pop("HYPERBLOOM_TOKEN").replace("HB1.IKaQ...", machine.token())}
    own = shown | {"JOIN": "", "FLAGS": " ".join(DATA)}
    for name in ("ward-7", "ward-8"):
        command, environment = unit("hyperbloom-client", name, machine, own)
        machine.start([word for word in command if word != "--stay"], **environment, **token)
    machine.check({"ward-7", "ward-8"}, machine.folder / "var/lib/hyperbloom/certs/clients.json")


def pod(name: str) -> dict[str, Any]:
    """Return what a pod of the manifests is made of."""
    found = yaml.safe_load_all((TOP / f"deploy/kubernetes/{name}.yaml").read_text())
    (template,) = [each["spec"]["template"]["spec"] for each in found if each["kind"] in ("StatefulSet", "Deployment")]
    return dict(template)


def test_kubernetes(machine: Machine) -> None:
    for name in ("runs", "run/hyperbloom"):
        (machine.folder / name).mkdir(parents=True)
    (machine.folder / "run/hyperbloom/run.yaml").write_text(RUN)
    (first,) = pod("server")["initContainers"]
    for _ in range(2):  # a pod that starts again has its certificate
        machine.run([*first["command"], *first["args"]])
    (server,), (client,) = pod("server")["containers"], pod("client")["containers"]
    machine.server(server["args"])
    for name in ("ward-7", "ward-8"):
        line = machine.run(["flower-server", "clients", "invite", name, "--certs", "/runs/certs"])
        assert "--server fed.hospital.example:9092 " in line  # the address that clients elsewhere dial
        words = [word for word in client["args"] if word != "--stay" and not word.startswith("--data")]
        told = [word.replace("ward-7", name).replace("/state", f"/state/{name}") for word in words]
        token = {each["name"]: machine.token(line) for each in client["env"]}
        machine.start(told + DATA, **token)
    machine.check({"ward-7", "ward-8"}, machine.folder / "runs/certs/clients.json")
