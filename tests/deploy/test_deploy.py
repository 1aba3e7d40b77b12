import re
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from hyperbloom.client.cli import flower_client
from hyperbloom.common.config import RunConfig, load_run_config
from hyperbloom.server.broker.port import WORKERS
from hyperbloom.server.cli import flower_server
from tests.deploy.conftest import TOP, run, tool
from tests.parsing import commands, flags

UNITS = sorted((TOP / "deploy/systemd").glob("*.service"))
MANIFESTS = sorted((TOP / "deploy/kubernetes").glob("*.yaml"))
WRITTEN = [
    *[path for folder in ("docker", "deploy") for path in sorted((TOP / folder).rglob("*")) if path.is_file()],
    TOP / "docs/security.md",
]
PROGRAMS: dict[str, click.Command] = {"flower-server": flower_server, "flower-client": flower_client}
OTHERS = {"--build-arg"}  # flags of other people's programs


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_takes_the_units_and_finds_them_shut(unit: Path, tmp_path: Path) -> None:
    analyze = tool("systemd-analyze")
    # The programs lie elsewhere on this machine.
    there = tmp_path / unit.name
    there.write_text(unit.read_text().replace("/opt/hyperbloom/bin/flower-", "/bin/echo flower-"))
    done = subprocess.run([analyze, "verify", str(there)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, unit.name.partition("@")[0] in done.stderr) == (0, False), done.stderr
    run(analyze, "security", "--offline=true", "--threshold=20", str(there))


def test_the_server_may_have_as_many_threads_as_it_serves_calls() -> None:
    """One that cannot be started ends the thread that takes all calls, and the port answers no more."""
    unit = (TOP / "deploy/systemd/hyperbloom-server@.service").read_text()
    compose = yaml.safe_load((TOP / "docker/compose.yaml").read_text())
    pids = compose["services"]["server"]["deploy"]["resources"]["limits"]["pids"]
    assert min(int(unit.partition("TasksMax=")[2].split()[0]), pids) > WORKERS + 500


def test_kubernetes_takes_the_manifests() -> None:
    run(tool("kubernetes-validate"), "--strict", *map(str, MANIFESTS))


def objects() -> list[dict[str, Any]]:
    return [one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text())]


def test_pods_fit_the_restricted_profile_and_mount_what_there_is() -> None:
    pods = [one["spec"]["template"]["spec"] for one in objects() if one["kind"] in ("StatefulSet", "Deployment")]
    assert len(pods) == 2
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert {volume["name"] for volume in pod["volumes"]} <= mounted.keys()
        for word in container["args"]:
            _, _, path = word.partition("=")
            assert not path.startswith("/") or any(
                path.startswith(f"{place}/") or path == place for place in mounted.values()
            )


def test_the_runs_that_are_shown_are_runs(tmp_path: Path) -> None:
    (shown,) = (one["data"]["run.yaml"] for one in objects() if one["kind"] == "ConfigMap")
    (tmp_path / "run.yaml").write_text(shown)
    assert isinstance(load_run_config(tmp_path / "run.yaml", {}), RunConfig)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(TOP)))
def test_commands_that_are_written_down_exist(path: Path) -> None:
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    for program, words in re.findall(r"(flower-(?:server|client))(?=[\s`\"'])([^\n`|;&#]*)", text):
        command: click.Command = PROGRAMS[program]
        said = re.findall(r"[^\s,\[\]]+", words)
        while isinstance(command, click.Group) and said and re.fullmatch(r"[a-z]+", said[0]):
            found = command.get_command(click.Context(command), said[0])
            if found is None and command is PROGRAMS[program]:  # a sentence goes on
                break
            assert found, (program, words)
            command, said = found, said[1:]
        known = {flag for each in commands(command) for flag in flags(each)}
        for flag in (word.split("=")[0] for word in said if word.startswith("--") and word != "--"):
            assert flag in known, f"{path}: {program} has no {flag}"
    named = set(re.findall(r"`(--[a-z-]+)", text)) - OTHERS
    assert named <= {flag for program in PROGRAMS.values() for each in commands(program) for flag in flags(each)}
    if path.suffix in (".yaml", ".service"):
        for program in PROGRAMS:
            if f"- {program}\n" in text:  # a list of arguments
                block = text.split(f"- {program}\n", 1)[1]
                listed = re.findall(r"^ +- (--[a-z-]+)", re.split(r"\n +[a-z]\w+:|\n +#", block)[0], re.M)
                assert listed and set(listed) <= flags(PROGRAMS[program]), (path, listed)
