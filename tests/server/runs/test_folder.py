"""The run folder: how it is made, refused and read back."""

import errno
import importlib.metadata
import json
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hyperbloom import __version__
from hyperbloom.common.config import RunConfig, load_run_config
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import EvaluateResult, TrainResult
from hyperbloom.server.loop.exchange import Evaluated, Outcome
from hyperbloom.server.loop.listener import NOTHING_DONE, Checkpoint, RoundReport, Selection
from hyperbloom.server.loop.post import Failure
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.runs import folder
from hyperbloom.server.runs.folder import RunFolder, new_run_folder, read_run
from hyperbloom.server.runs.lines import EVENTS, read_lines
from hyperbloom.server.runs.recorded import has_ended
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.algorithm import Algorithm

from ...scores import right
from ..conftest import ABOUT
from ..recorded import Recording, federation_of, some_config

CONFIG = RunConfig(strategy="local", rounds=20, seed=3)


def some_roster() -> Roster:
    """Return two clients."""
    roster = Roster()
    for node, name in ((5, "a"), (4, "b")):
        roster.admit(node, replace(ABOUT, client_id=name, token=f"secret of {name}"))
    return roster


def some_folder(path: Path, config: RunConfig = CONFIG) -> RunFolder:
    """Return the folder of a run that these clients take part in."""
    folder = RunFolder(path, config, "run-1")
    folder.gathering(federation_of(some_roster()))
    return folder


def some_strategy(state: Mapping[str, Tensor] | None = None) -> Algorithm:
    """Return a strategy with this state."""
    strategy = make_algorithm(CONFIG)
    strategy.state = lambda: dict(state or {})  # type: ignore[method-assign]
    return strategy


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def files(folder: Path) -> list[str]:
    """Return the names of all files below a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# ---------------------------------------------------------------------- making


def test_the_default_folder_is_named_by_date_and_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = new_run_folder(None, "pfedhn")
    assert folder.parent == Path("runs")
    assert re.fullmatch(r"\d{8}-\d{6}-pfedhn", folder.name)
    assert folder.is_dir()


def test_others_on_the_machine_cannot_look_into_a_run(tmp_path: Path) -> None:
    assert new_run_folder(tmp_path / "run", "pfedhn").stat().st_mode & 0o007 == 0


def test_two_runs_in_one_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hyperbloom.server.runs.folder.datetime", Standing)
    names = [new_run_folder(None, "local").name for _ in range(3)]
    assert names == ["20260102-030405-local", "20260102-030405-local-2", "20260102-030405-local-3"]


class Standing:
    """A clock that stands still."""

    @classmethod
    def now(cls) -> "Standing":
        """Return the moment."""
        return cls()

    def __format__(self, form: str) -> str:
        assert form == "%Y%m%d-%H%M%S"
        return "20260102-030405"


def test_a_given_folder_is_made_with_its_parents_or_taken_if_empty(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    assert new_run_folder(path, "local") == path
    assert path.is_dir()
    assert new_run_folder(path, "local") == path


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("")
    with pytest.raises(ConfigError) as caught:
        new_run_folder(tmp_path, "local")
    begin = f"--run-dir: expected a new or empty folder, found files in {tmp_path}; name another"
    assert str(caught.value) == f"{begin}, or give --go-on as well if its run never began"
    with pytest.raises(ConfigError) as caught:
        new_run_folder(tmp_path, "local", anew=True)
    assert str(caught.value) == begin


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root, no permission keeps a process from writing."""

    def refuse(dir: Path) -> NoReturn:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(dir / "x"))

    monkeypatch.setattr(folder, "TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=f"^--run-dir: cannot use {tmp_path}: Operation not permitted$"):
        new_run_folder(tmp_path, "local")


def test_files_of_a_run_that_never_began_are_taken_and_others_are_not(tmp_path: Path) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    (ours / "checkpoints").mkdir(parents=True)
    (ours / "track-mlflow.log").touch()
    assert new_run_folder(ours, "local", anew=True) == ours
    (ours / "config.yaml").touch()
    assert new_run_folder(ours, "local", anew=True) == ours, "the disk was full before the next file"
    (ours / "environment.json").touch()
    assert new_run_folder(ours, "local", anew=True) == ours
    others.mkdir()
    (others / "config.yaml").write_text("database: production")
    with pytest.raises(ConfigError, match=r"^--run-dir: expected a new or empty folder, found files in .*others; name"):
        new_run_folder(others, "local", anew=True)


@pytest.mark.parametrize(("below", "reason"), [("", "File exists"), ("deeper", "Not a directory")])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, below: str, reason: str) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / below if below else tmp_path / "file"
    with pytest.raises(ConfigError) as caught:
        new_run_folder(path, "local")
    assert str(caught.value) == f"--run-dir: cannot use {path}: {reason}"


# ---------------------------------------------------------------------- writing


def test_a_run_begins_without_a_library_that_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def installed(package: str) -> str:
        if package == "torchvision":
            raise importlib.metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(importlib.metadata, "version", installed)
    some_folder(tmp_path)
    versions = json.loads((tmp_path / "environment.json").read_text())["versions"]
    assert [name for name, found in versions.items() if found is None] == ["torchvision"]


def test_the_beginning_of_a_run_is_its_configuration_and_environment(tmp_path: Path) -> None:
    some_folder(tmp_path)
    assert files(tmp_path) == ["config.yaml", "environment.json"]
    assert load_run_config(tmp_path / "config.yaml", {}) == CONFIG
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert (environment["run_id"], environment["seed"]) == ("run-1", 3)
    assert environment["python"] == platform.python_version()
    assert environment["versions"]["hyperbloom"] == __version__
    assert environment["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert set(environment["versions"]) >= {"flwr", "numpy", "grpcio", "protobuf", "safetensors", "torchvision"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", environment["started"])
    assert isinstance(environment["command"], list)


def test_each_round_is_a_line_and_each_client_of_it_another(tmp_path: Path) -> None:
    folder = some_folder(tmp_path)
    folder.phase(some_strategy(), "local")
    results = {"a": TrainResult(0.25, loss=1.0), "b": TrainResult(0.123456, loss=2.0)}
    folder.round_done(
        RoundReport(
            1,
            Outcome(results, None, {"c": Failure(Reason.NO_REPLY, "no reply")}, [3, 0, 9]),
            0.512349,
            1.512349,
            2,
            800,
            640,
        )
    )
    folder.round_done(RoundReport(2, Outcome({}, None, {}), 0.5, 2.0))
    scores = {"a": EvaluateResult(right(1, 4, 0.5), right(3, 4, 1.5))}
    folder.round_done(RoundReport(3, Outcome({"a": results["a"]}, Evaluated(scores), {}), 0.5, 2.25))
    metrics = lines(tmp_path / "metrics.jsonl")
    assert metrics[:2] == [
        {"round": 1, "seconds": 0.5123, "clients": 2, "elapsed": 1.5123, "loss": 1.5, "late": 2}
        | {"bytes_down": 800, "bytes_up": 640}
        | {"left_out": 1, "staleness_mean": 4, "staleness_max": 9},
        {"round": 2, "seconds": 0.5, "clients": 0, "elapsed": 2.0, "bytes_down": 0, "bytes_up": 0},
    ]
    line = {"round": 3, "seconds": 0.5, "clients": 1, "elapsed": 2.25, "loss": 1.0, "bytes_down": 0, "bytes_up": 0}
    assert metrics[2] == line | {"metric": "accuracy"} | Evaluated(scores).metrics()
    assert lines(tmp_path / "clients.jsonl") == [
        {"round": 1, "client": "a", "loss": 1.0, "seconds": 0.25},
        {"round": 1, "client": "b", "loss": 2.0, "seconds": 0.1235},
        {"round": 1, "client": "c", "refused": "no reply", "reason": "timeout"},
        {"round": 3, "client": "a", "loss": 1.0, "seconds": 0.25},
        {
            "round": 3,
            "client": "a",
            "val_accuracy": 0.25,
            "val_total": 4,
            "val_loss": 0.5,
            "test_accuracy": 0.75,
            "test_total": 4,
            "test_loss": 1.5,
        },
    ]


def test_events_are_lines_with_the_time_and_the_round_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG.model_copy(update={"baselines": ("fedavg",)}), "run-1")
    folder.event("a joined")
    folder.phase(some_strategy(), "local")
    folder.round_done(RoundReport(1, Outcome(), 0.5, 0.5))
    folder.event("a left\n")
    folder.phase(some_strategy(), "fedavg")
    folder.event("a is back")
    found = lines(tmp_path / "events.jsonl")
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", line.pop("time")) for line in found)
    assert found == [
        {"strategy": "local", "round": 0, "text": "a joined"},
        {"strategy": "local", "round": 1, "text": "a left\n"},
        {"strategy": "fedavg", "round": 0, "text": "a is back"},
    ]


def test_what_was_selected_and_what_came_last_are_kept_apart(tmp_path: Path) -> None:
    folder = some_folder(tmp_path)
    best, last = torch.tensor([1.0]), torch.tensor([2.0])
    folder.phase(some_strategy(), "local")
    folder.selected(Selection(7, {"val_mean": 50.0}, {"a": 60.0}), {"w": best}, some_roster())
    folder.phase_done(some_strategy({"w": last}))
    for name, value, metadata in (
        ("hypernetwork.safetensors", best, {"round": "7"}),
        ("hypernetwork-last.safetensors", last, None),
    ):
        with safe_open(tmp_path / name, framework="pt") as file:
            assert torch.equal(file.get_tensor("w"), value)
            assert (file.metadata() or None) == metadata
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "local": {
            "round": 7,
            "metrics": {"val_mean": 50.0},
            "test_accuracy": {"a": 60.0},
            "rank": [0, 0.0],
            "metric": "accuracy",
            "counts": [],
            "newcomers": None,
        }
    }


def test_baselines_get_folders_of_their_own_and_share_the_summary(tmp_path: Path) -> None:
    folder = some_folder(tmp_path)
    for name, state in (("local", None), ("fedavg", {"w": torch.zeros(1)})):
        folder.phase(some_strategy(), name)
        folder.round_done(RoundReport(1, Outcome(), 0.5, 0.5))
        folder.selected(Selection(1, {"val_mean": 1.0}, {}), state, some_roster())
        folder.phase_done(some_strategy(state))
    assert files(tmp_path) == [
        "baselines/fedavg/clients.jsonl",
        "baselines/fedavg/hypernetwork-last.safetensors",
        "baselines/fedavg/hypernetwork.safetensors",
        "baselines/fedavg/metrics.jsonl",
        "clients.jsonl",
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "roster.json",
        "summary.json",
    ]
    assert list(json.loads((tmp_path / "summary.json").read_text())) == ["local", "fedavg"]


def test_the_roster_is_kept_without_secrets(tmp_path: Path) -> None:
    folder = some_folder(tmp_path)
    folder.phase_done(some_strategy())
    text = (tmp_path / "roster.json").read_text()
    assert "secret of" not in text
    assert [(client["client_id"], client["row"]) for client in json.loads(text)["clients"]] == [("a", 0), ("b", 1)]


# ---------------------------------------------------------------------- reading back


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Return the folder of a finished run."""
    folder = RunFolder(tmp_path / "run", CONFIG, "run-1")
    folder.selected(
        Selection(7, {"val_mean": 50.0}, {}),
        {"w": torch.tensor([1.5])},
        some_roster(),
    )
    return tmp_path / "run"


def test_a_finished_run_is_read_back(finished: Path) -> None:
    tensors, roster = read_run(finished)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"w": [1.5]}
    assert [(client.client_id, client.row) for client in roster] == [("a", 0), ("b", 1)] and roster.live == []


def test_a_client_of_a_finished_run_is_known_by_its_secret(finished: Path) -> None:
    _, roster = read_run(finished)
    client, _ = roster.admit(9, replace(ABOUT, client_id="b", token="secret of b"))
    assert client.row == 1


@pytest.mark.parametrize("name", ["hypernetwork.safetensors", "roster.json"])
@pytest.mark.parametrize("content", [None, b"", b"garbage", b"[]", b"{}", b'{"seed": 0, "clients": [{}]}', b"\xff"])
def test_a_folder_that_is_no_finished_run_is_refused(finished: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (finished / name).unlink()
    else:
        (finished / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_run(finished)
    text = str(caught.value)
    expected = f"init_from: expected a run folder with hypernetwork.safetensors and roster.json, found {finished} ("
    assert text.startswith(expected)
    assert "\n" not in text


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^init_from: .*, found .*/nowhere \("):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize("about", ["[]", "null", '"words"'])
def test_a_roster_with_other_entries_is_refused(finished: Path, about: str) -> None:
    entry = f'{{"client_id": "a", "row": 0, "token_hash": "x", "about": {about}}}'
    (finished / "roster.json").write_text(f'{{"seed": 0, "clients": [{entry}]}}')
    with pytest.raises(ConfigError, match=r"^init_from: "):
        read_run(finished)


def test_reading_leaves_the_run_as_it_is(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "before")
    tensors, _ = read_run(finished)
    tensors["w"].zero_()
    save_file(tensors, tmp_path / "elsewhere.safetensors")
    for name in files(finished):
        assert (finished / name).read_bytes() == (tmp_path / "before" / name).read_bytes()


def test_the_command_is_kept_without_a_trackers_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = "mlflow:https://me:secret@mlflow.example"
    monkeypatch.setattr("sys.argv", ["flower-server", "--track", where, f"--track={where}", "--set", "a:b=1"])
    some_folder(tmp_path)
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["command"] == ["flower-server", "--track", "mlflow", "--track=mlflow", "--set", "a:b=1"]


def test_the_command_is_kept_without_the_token_of_a_server_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["flwr-serverapp", "--token", "5ec2e7", "--token=5ec2e7", "--parent-pid", "7"])
    some_folder(tmp_path)
    assert "5ec2e7" not in (tmp_path / "environment.json").read_text()


@pytest.mark.parametrize("row", [-1, 0, 2])
def test_a_roster_with_a_row_too_few_is_damaged(tmp_path: Path, row: int) -> None:
    some_folder(tmp_path).phase_done(some_strategy())
    save_file({"x": torch.zeros(1)}, tmp_path / "hypernetwork.safetensors")
    roster = json.loads((tmp_path / "roster.json").read_text())
    roster["clients"][1]["row"] = row
    (tmp_path / "roster.json").write_text(json.dumps(roster))
    with pytest.raises(
        ConfigError, match=r"^init_from: expected a run folder .*expected clients with the rows 0, 1, 2"
    ):
        read_run(tmp_path)


@pytest.mark.parametrize("every", [0, 1])
def test_a_run_has_ended_once_its_last_checkpoint_is_told_and_not_before(tmp_path: Path, every: int) -> None:
    run = Recording(tmp_path, config=some_config(checkpoint_every=every))
    run.begin("pfedhn")
    for phase, over in ((0, False), (1, False), (2, True)):
        run.folder.checkpoint(Checkpoint("run-1", phase, NOTHING_DONE, {}, Roster().to_json(), 3, {}))
        assert has_ended(tmp_path) is over
    assert any((tmp_path / "checkpoints").glob("*.json")) is bool(every)


def test_an_event_that_a_loss_of_power_has_torn_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    run = Recording(tmp_path, config=(config := some_config()))
    run.begin("pfedhn")
    run.folder.event("before")
    run.folder.checkpoint(Checkpoint("run-1", 0, NOTHING_DONE, {}, Roster().to_json(), 3, {}))
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"time": "2026-')
    RunFolder.resume(tmp_path, config, print)[0].event("after")
    assert [line["text"] for line in read_lines(tmp_path / EVENTS)][-2:] == ["before", "after"]
