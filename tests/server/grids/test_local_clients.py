"""The command lines of clients: the one that is printed, and those that are started, mean the same to the client."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hyperbloom.client.cli import main as client_main
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work import client
from hyperbloom.common.config import RunConfig, load_run_config
from hyperbloom.common.errors import CohortError, HyperbloomError
from hyperbloom.common.secrecy.keys import public_pem, read_private_key
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.grids.local_clients import client_settings, local_clients, make_keys, printed_line

CONFIGS = [
    {},
    {"data.name": "cifar10", "data.root": "/data/cifar 10", "clients": 12, "seed": 9, "data.max_train": 500},
    {"data.split": "iid", "data.alpha": 0.05},
    {"data.split": "dirichlet", "data.alpha": 0.05, "data.classes_per_client": 3},
    {"data.name": "mnist", "data.split": "shards", "data.classes_per_client": 4},
    {"data.split": "dirichlet", "data.alpha": 1e-7, "seed": 2**40},
    {"data.first": 4, "data.parts": 12},
    {"strategy": "ghn", "models": ["mlp", "plain-4"]},
    {"strategy": "ghn"},
    {"strategy": "ghn-server", "models": ["plain-4"]},
]


def started(count: int, folder: Path) -> list[ClientSettings]:
    """Return the settings of the first clients of a run."""
    return [client_settings(RunConfig(clients=9), index, folder) for index in range(count)]


@pytest.fixture
def understood(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], ClientSettings]:
    """Return a function from the words of a command line to the settings that the client takes them for."""

    class Understood(HyperbloomError):
        """Carries the settings out of the command."""

    found: list[ClientSettings] = []

    def take(settings: ClientSettings) -> Any:
        found.append(settings)
        raise Understood

    monkeypatch.setattr(client, "client_for", take)

    def parse(words: list[str]) -> ClientSettings:
        assert client_main(words) == Understood.exit_code
        return found.pop()

    return parse


# ---------------------------------------------------------------------- the printed line


def test_the_printed_line_of_the_default_run() -> None:
    assert printed_line(["--server", "10.0.0.5:9092", "--insecure"], RunConfig()) == (
        "flower-client --server 10.0.0.5:9092 --insecure --client-id NAME --data digits --partition I/6"
    )


def test_the_printed_line_of_another_run() -> None:
    config = load_run_config(
        None,
        {
            "clients": 40,
            "seed": 7,
            "data.name": "cifar10",
            "data.root": "/my data",
            "data.split": "dirichlet",
            "data.alpha": 0.1,
            "data.max_train": 100,
        },
    )
    assert printed_line(["--root-certificates", "/etc/ca.pem"], config) == (
        "flower-client --root-certificates /etc/ca.pem --client-id NAME "
        "--data cifar10 --root '/my data' --split dirichlet --alpha 0.1 --max-train 100 --data-seed 7 --partition I/40"
    )


def test_the_printed_line_of_a_run_on_tables_has_a_table_for_each(tmp_path: Path) -> None:
    schema = '{"label": ["ill", "dead"], "columns": [{"name": "age", "kind": "number"}]}'
    (tmp_path / "schema.json").write_text(schema)
    config = load_run_config(None, {"data.schema_file": str(tmp_path / "schema.json"), "data.split": "owner"})
    assert printed_line(["--server", "a:1", "--insecure"], config) == (
        "flower-client --server a:1 --insecure --client-id NAME --data TABLE --label ill,dead"
    )


def test_the_printed_line_of_a_table_asks_for_its_column_if_the_run_names_none() -> None:
    """Nobody can join without one."""
    for label, words in ((None, "COLUMN"), ("ill", "ill")):
        line = printed_line(
            ["--server", "a:1"], load_run_config(None, {"data.name": "my table.csv", "data.label": label})
        )
        assert f" --data 'my table.csv' --label {words} " in line


def test_the_printed_line_counts_the_parts_of_the_data_set() -> None:
    line = printed_line(["--server", "a:1", "--insecure"], load_run_config(None, {"data.first": 4, "data.parts": 12}))
    assert line.endswith(" --client-id NAME --data digits --partition I/12")


@pytest.mark.parametrize(("sizes", "words"), [(["S"], "--size S "), (["S", "L"], "--size 'S|L' "), (["M"], "")])
def test_the_printed_line_names_the_sizes_that_the_run_takes(sizes: list[str], words: str) -> None:
    config = load_run_config(None, {"sizes": sizes})
    assert printed_line(["--server", "a:1", "--insecure"], config) == (
        f"flower-client --server a:1 --insecure --client-id NAME --data digits {words}--partition I/6"
    )


def test_the_printed_line_discloses_what_the_run_demands(understood: Callable[[list[str]], ClientSettings]) -> None:
    config = load_run_config(None, {"descriptor": "class-shares", "sizes": ["L"]})
    words = (
        printed_line(["--server", "127.0.0.1:1", "--insecure"], config)
        .replace("NAME", "x")
        .replace("I/", "0/")
        .split()[1:]
    )
    settings = understood(words)
    assert (settings.disclose_class_shares, settings.size) == (True, "L")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"strategy": "ghn", "models": ["mlp", "plain-4", "mlp"]}, "--model 'mlp|plain-4' --partition"),
        ({"strategy": "ghn"}, "--model MODEL --partition"),
        ({"strategy": "ghn-server", "models": ["my.nets:make"]}, "--model my.nets:make --disclose graph --partition"),
        ({"strategy": "local"}, "--data digits --partition"),
        ({"strategy": "local", "models": ["mlp"]}, "--model mlp --partition"),
    ],
)
def test_the_printed_line_asks_for_a_model_where_clients_bring_their_own(overrides: dict[str, Any], words: str) -> None:
    assert words in printed_line(["--server", "a:1", "--insecure"], load_run_config(None, overrides))


# ---------------------------------------------------------------------- child processes


class Child:
    """A process that ends at the goodbye, when it is terminated, or only when it is killed."""

    def __init__(self, command: list[str], log: str, ends_at: str) -> None:
        self.command, self.log, self.ends_at = command, log, ends_at
        self.returncode: int | None = None
        self.told = ["goodbye"]

    def wait(self, timeout: float | None = None) -> int:
        """Return at once, or time out."""
        if self.ends_at in self.told:
            self.returncode = 0
            return 0
        assert timeout is not None, "waits for ever"
        raise subprocess.TimeoutExpired(self.command, timeout)

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.returncode

    def terminate(self) -> None:
        """Note it."""
        self.told.append("terminate")

    def kill(self) -> None:
        """Note it."""
        self.told.append("kill")


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """Return the processes that were started, none of them for real; the second and third end late."""
    started: list[Child] = []

    def popen(command: list[str], *, stdout: Any, **options: Any) -> Child:
        assert options["start_new_session"]
        assert options["stderr"] == subprocess.STDOUT
        ends_at = {1: "terminate", 2: "kill"}.get(len(started), "goodbye")
        started.append(Child(command, stdout.name, ends_at))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    return started


@pytest.mark.parametrize(
    "overrides",
    [
        *CONFIGS,
        {"sizes": ["S", "L"], "clients": 3},
        {"descriptor": "class-shares", "clients": 2},
    ],
)
def test_started_clients_are_the_virtual_clients_of_the_inline_engine(
    children: list[Child],
    understood: Callable[[list[str]], ClientSettings],
    tmp_path: Path,
    overrides: dict[str, Any],
) -> None:
    config = load_run_config(None, overrides)
    settings = [client_settings(config, index, tmp_path) for index in range(config.clients)]
    with local_clients(settings, ["--server", "127.0.0.1:9", "--insecure"]):
        assert len(children) == config.clients
    for index, child in enumerate(children):
        assert child.command[:3] == [sys.executable, "-m", "hyperbloom.client"]
        assert child.command[3:6] == ["--server", "127.0.0.1:9", "--insecure"]
        assert child.log == str(tmp_path / "clients" / f"client-{config.part(index)[0]}.log")
        assert child.command[child.command.index("--parent-pid") + 1] == str(os.getpid())
        assert understood(child.command[3:]) == replace(settings[index], server="127.0.0.1:9")


@pytest.mark.parametrize(("cores", "count", "threads"), [(8, 3, "2"), (2, 6, "1"), (4, 4, "1")])
def test_clients_share_the_cores(
    children: list[Child],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cores: int,
    count: int,
    threads: str,
) -> None:
    monkeypatch.setattr("hyperbloom.server.grids.local_clients.cores", lambda: cores)
    with local_clients(started(count, tmp_path), []):
        pass
    assert {child.command[child.command.index("--threads") + 1] for child in children} == {threads}


def test_no_clients_are_no_processes(children: list[Child], tmp_path: Path) -> None:
    with local_clients([], []):
        assert children == []


def test_a_client_that_could_not_start_is_told_with_the_end_of_its_log(children: list[Child], tmp_path: Path) -> None:
    with local_clients(started(3, tmp_path), []) as watch:
        watch()
        children[0].returncode = 0  # it left in good order
        watch()
        log = tmp_path / "clients" / "client-2.log"
        children[2].returncode = 2
        with pytest.raises(CohortError) as caught:
            watch()
        assert str(caught.value) == f"client-2 ended with code 2: (its log is empty) (see {log})"
        log.write_text("noise\nflower-client: data: expected one of ...\n\n")
        with pytest.raises(CohortError) as caught:
            watch()
        assert str(caught.value) == f"client-2 ended with code 2: flower-client: data: expected one of ... (see {log})"


def test_clients_that_do_not_leave_are_ended_and_killed_if_they_are_deaf(children: list[Child], tmp_path: Path) -> None:
    with pytest.raises(KeyError), local_clients(started(3, tmp_path), []):
        raise KeyError  # however the run ends
    assert [child.told for child in children] == [
        ["goodbye"],
        ["goodbye", "terminate"],
        ["goodbye", "terminate", "kill"],
    ]


def test_if_one_cannot_be_started_the_others_are_ended(
    monkeypatch: pytest.MonkeyPatch, children: list[Child], tmp_path: Path
) -> None:
    start = subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        if len(children) == 2:
            raise BlockingIOError("Resource temporarily unavailable")
        return start(command, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(BlockingIOError), local_clients(started(3, tmp_path), []):
        pass
    assert [child.told for child in children] == [["goodbye"], ["goodbye", "terminate"]]


def test_many_deaf_clients_are_not_waited_for_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, children: list[Child], tmp_path: Path
) -> None:
    now = 0.0

    def wait(child: Child, timeout: float | None = None) -> int:
        nonlocal now
        if "kill" in child.told:
            child.returncode = -9
            return -9
        assert timeout is not None, "waits for ever"
        now += timeout
        raise subprocess.TimeoutExpired(child.command, timeout)

    monkeypatch.setattr(Child, "wait", wait)
    monkeypatch.setattr("hyperbloom.common.program.signals.time", SimpleNamespace(monotonic=lambda: now))
    with local_clients(started(9, tmp_path), []):
        pass
    assert [child.told for child in children] == [["goodbye", "terminate", "kill"]] * 9
    assert now == 20.0


# ---------------------------------------------------------------------- virtual clients


def test_sizes_are_dealt_in_turn_and_states_lie_apart(tmp_path: Path) -> None:
    config = load_run_config(None, {"sizes": ["S", "M", "L"], "clients": 5})
    settings = [client_settings(config, index, tmp_path) for index in range(5)]
    assert [each.size for each in settings] == ["S", "M", "L", "S", "M"]
    assert [each.client_id for each in settings] == [f"client-{index}" for index in range(5)]
    assert [each.folder for each in settings] == [tmp_path / "clients" / f"client-{index}" for index in range(5)]
    assert [(each.data.partition, each.data.partitions) for each in settings] == [(index, 5) for index in range(5)]


def test_keys_are_made_once(tmp_path: Path) -> None:
    registry = ClientRegistry(make_keys(started(2, tmp_path), tmp_path))
    keys = registry.keys()
    assert sorted(keys.values()) == ["client-0", "client-1"]
    for key, name in keys.items():
        assert public_pem(read_private_key(tmp_path / "clients" / name / "key.pem", name)) == key
    assert make_keys(started(3, tmp_path), tmp_path) == registry.path
    assert {key: name for key, name in registry.keys().items() if name != "client-2"} == keys
    assert "client-2" in registry.keys().values()
