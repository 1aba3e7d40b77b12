"""A server that crashes and goes on from its last checkpoint, as if nothing had happened."""

import errno
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from hyperbloom.client.keep.state import ClientState
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import LocalConfig, RunConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.files.storage import write_json
from hyperbloom.server.cli import main
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.server.loop.listener import Listener, RoundReport
from hyperbloom.server.loop.session import Session
from hyperbloom.server.runs.checkpoint import _digest_of, locked
from hyperbloom.server.runs.folder import RunFolder
from hyperbloom.strategies import STRATEGIES
from tests.slow import quick

# What keeps a strategy's four rounds short; one that is not named here has its defaults.
ALIGNED = {"rad": f"{__name__}:public_inputs", "rows": 8, "eta": 0.5}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg-ft": {"epochs": 1},
    "fedhenn": ALIGNED,
    "fedhenn-homogeneous": ALIGNED,
    "hafl-distillation": {"epochs": 1},
    "odpfl": {"hidden_dim": 8},
    "pfedhn": {"hidden_dim": 8},
    "pfedhn-pc": {"hidden_dim": 8},
    "pfedhn-heads": {"hidden_dim": 4},
    "ghn": {"latent": 8, "hidden": 4},
    "ghn-server": {"latent": 8, "hidden": 4, "fit_steps": 2},
}
TIMES = ("seconds", "elapsed", "bytes_down")  # and orders of a run that went on say so, in some bytes more


def public_inputs() -> tuple[Any, Any, Any]:
    """Return inputs that are nobody's, for strategies that need some."""
    x = np.random.default_rng(0).random((12, 1, 8, 8), dtype=np.float32)
    return (x, np.zeros(12, int)), (x, np.zeros(12, int)), (x, np.zeros(12, int))


class Crash(BaseException):
    """The process is killed."""


class CrashAfter(Listener):
    """Kills the server after some rounds in all, before it can do anything about it."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def round_done(self, report: RoundReport) -> None:
        self.left -= 1
        if self.left == 0:
            raise Crash


class CopyAfter(Listener):
    """Copies a run's folder as a server that is killed after so many rounds leaves it, next to it: a kill leaves no
    more than what is on the disk.
    """

    def __init__(self, folder: Path, rounds: Sequence[int]) -> None:
        self.folder, self.rounds, self.done = folder, rounds, 0

    def round_done(self, report: RoundReport) -> None:
        self.done += 1
        if self.done in self.rounds:
            shutil.copytree(self.folder, killed_after(self.folder, self.done))


def killed_after(folder: Path, rounds: int) -> Path:
    """Return where the copy of a run is that was killed after so many rounds."""
    return folder.with_name(f"{folder.name}-{rounds}")


def make_config(strategy: str, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "strategy": strategy,
        "clients": 4,
        # Clients say once that they have got its public inputs; here all do in round 1, before the crash.
        "cohort": 4 if strategy == "fedhenn-homogeneous" else 2,
        "rounds": 4,
        "eval_every": 2,
        "checkpoint_every": 2,
        "model": "mlp",
        "local": LocalConfig(steps=2, batch_size=8),
        "options": OPTIONS.get(strategy, {}),
        "novel": 25 if strategy.startswith("pfl-") else 0,  # clients that join late are what these are about
    }
    return RunConfig(**(values | changes))


def begin(folder: Path, config: RunConfig, crash_after: int = 0, copy_after: Sequence[int] = ()) -> None:
    """Run in a process's stead, to the end or to a crash."""
    client_for.cache_clear()
    listeners = [RunFolder(folder, config, "run"), CopyAfter(folder, copy_after), CrashAfter(crash_after)]
    session = Session(config, inline_grid(config, folder), "run", listeners)
    if crash_after:
        with pytest.raises(Crash):
            session.run()
    else:
        session.run()


def go_on(folder: Path, config: RunConfig, crash_after: int = 0) -> list[str]:
    """Resume in a new process's stead; returns what the operator is told."""
    client_for.cache_clear()
    said: list[str] = []
    recorder, resume = RunFolder.resume(folder, config, said.append)
    listeners = [recorder, CrashAfter(crash_after)]
    session = Session(config, inline_grid(config, folder), resume.checkpoint.run_id, listeners, resume=resume)
    if crash_after:
        with pytest.raises(Crash):
            session.run()
    else:
        session.run()
    return said


def left_behind(folder: Path) -> dict[str, Any]:
    """Return all that a run leaves, without times, secrets and what only serves to resume."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if (
            not path.is_file()
            or {"checkpoints", "earlier"} & set(path.parts)
            or path.name in ("identity.json", "events.jsonl")
        ):
            continue
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{key: value for key, value in line.items() if key not in TIMES} for line in lines]
        elif path.suffix == ".safetensors":
            tensors = load_file(path)
            found[name] = {
                key: (tuple(value.shape), value.tolist()) for key, value in tensors.items() if key != "moment"
            }
        elif path.name == "summary.json":
            found[name] = json.loads(path.read_text())
        elif path.name == "roster.json":
            clients = json.loads(path.read_text())["clients"]
            found[name] = [{key: value for key, value in one.items() if key != "token_hash"} for one in clients]
            for one in found[name]:  # said when it joins, the second time after it was sent
                one["about"].pop("has_reference")
    assert {"metrics.jsonl", "clients.jsonl", "summary.json", "roster.json"} <= set(found)
    return found


def assert_same(folder: Path, expected: Path) -> None:
    got, wanted = left_behind(folder), left_behind(expected)
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert got[name] == wanted[name], name


@pytest.mark.parametrize(
    "strategy", quick(sorted(STRATEGIES), "pfedhn-pc", "odpfl", "fedhenn", "fedma", "pfedme", "ghn")
)
def test_a_strategy_that_crashes_and_goes_on_equals_one_that_does_not(tmp_path: Path, strategy: str) -> None:
    """Killed in round 3 of 4, after a checkpoint at 2: what clients learned in round 3 is learned again."""
    config, whole = make_config(strategy), tmp_path / "whole"
    begin(whole, config, copy_after=[3])
    assert go_on(killed_after(whole, 3), config) == []
    assert_same(killed_after(whole, 3), whole)


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("figures.spectral_norm:PFedHNSpectral", {"sizes": ("S", "M"), "options": {"hidden_dim": 8}}),
        ("pfedhn", {"options": {"hidden_dim": 8, "embeddings": "sparse"}, "compression": "top-k:0.1"}),
        ("figures.linear:PFedHNLinear", {"options": {"descriptor": "class-shares"}}),
        ("fedavg", {"compression": "int8"}),
        # So small a rate makes nothing better: round 4 is the last of both.
        ("fedavg", {"patience": 1, "rounds": 8, "baselines": ("local",), "local": LocalConfig(learning_rate=1e-12)}),
        ("pfedhn", {"asynchronous": True, "eval_every": 1}),
        ("ghn", {"models": ("mlp", "plain-4"), "sizes": ("S",), "options": {"latent": 8}}),
    ],
)
def test_options_that_leave_something_behind(tmp_path: Path, strategy: str, changes: dict[str, Any]) -> None:
    config, whole = make_config(strategy, **changes), tmp_path / "whole"
    killed = 4 if config.asynchronous else 3
    begin(whole, config, copy_after=[killed])
    go_on(killed_after(whole, killed), config)
    assert_same(killed_after(whole, killed), whole)


KILLED_TWICE = make_config("pfedhn-pc", baselines=("local",), cohort=3)


@pytest.fixture(scope="module")
def two_phases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a whole run of eight rounds, of which 5 to 8 are the baseline's, with copies of it as killed."""
    whole = tmp_path_factory.mktemp("two-phases") / "whole"
    begin(whole, KILLED_TWICE, copy_after=[1, 4, 5, 8])
    return whole


@pytest.mark.parametrize("killed", [1, 4, 5, 8])
def test_whenever_it_is_killed_with_a_baseline_and_more_than_once(two_phases: Path, killed: int) -> None:
    """Killed again one round after it went on, twice."""
    crashed = killed_after(two_phases, killed)
    for _ in range(2):
        go_on(crashed, KILLED_TWICE, crash_after=1)
    go_on(crashed, KILLED_TWICE)
    assert_same(crashed, two_phases)
    resumes = json.loads((crashed / "checkpoints/resumes.json").read_text())
    phase, done = divmod(killed - 1, 4)
    assert [(each["phase"], each["orders"]) for each in resumes] == [(phase, done // 2 * 2)] * 3


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def age(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 1', '"format": 0'))


def alter(path: Path) -> None:
    stored = json.loads(path.read_text())
    stored["body"]["progress"]["elapsed"] += 1.0
    path.write_text(json.dumps(stored))


SIX_ROUNDS = make_config("pfedhn-pc", rounds=6, cohort=3)


@pytest.fixture(scope="module")
def six_rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a whole run of six rounds, with a copy of it as killed in the fifth."""
    whole = tmp_path_factory.mktemp("six-rounds") / "whole"
    begin(whole, SIX_ROUNDS, copy_after=[5])
    return whole


@pytest.mark.parametrize(
    ("damage", "suffix", "told"),
    [
        (flip, ".safetensors", "is not what was written"),
        (flip, "-selected.safetensors", "is not what was written"),
        (flip, ".json", ""),
        (alter, ".json", "it is not what was written"),
        (cut, ".safetensors", "is not what was written"),
        (cut, ".json", ""),
        (age, ".json", "format 0, expected 1"),
        (Path.unlink, ".safetensors", "No such file"),
    ],
)
def test_a_damaged_checkpoint_is_left_for_the_one_before(
    six_rounds: Path, tmp_path: Path, damage: Callable[[Path], None], suffix: str, told: str
) -> None:
    """The clients, too, go back by two checkpoints."""
    crashed = tmp_path / "crashed"
    shutil.copytree(killed_after(six_rounds, 5), crashed)
    newest = sorted((crashed / "checkpoints").glob("*[0-9].json"))[-1]
    damage(newest.with_name(newest.stem + suffix))
    (said,) = go_on(crashed, SIX_ROUNDS)
    assert newest.name in said and told in said and said.endswith("looking for one before")
    assert_same(crashed, six_rounds)


def test_checkpoints_of_which_none_can_be_used_stay_for_whoever_mends_the_folder(
    six_rounds: Path, tmp_path: Path
) -> None:
    """A copy that was made while the run went on has newer checkpoints than lines."""
    crashed = tmp_path / "crashed"
    shutil.copytree(killed_after(six_rounds, 5), crashed)
    lines = (crashed / "metrics.jsonl").read_bytes()
    (crashed / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(ConfigError, match="found none that can be used"):
        go_on(crashed, SIX_ROUNDS)
    (crashed / "metrics.jsonl").write_bytes(lines)
    assert not go_on(crashed, SIX_ROUNDS)
    assert_same(crashed, six_rounds)


@pytest.mark.parametrize("name", ["metrics.jsonl", "clients.jsonl"])
def test_a_checkpoint_whose_lines_are_not_all_there_is_left_for_the_one_before(
    six_rounds: Path, tmp_path: Path, name: str
) -> None:
    """After a power cut, say. The file would be filled up with zeros otherwise, and a round be missing."""
    crashed = tmp_path / "crashed"
    shutil.copytree(killed_after(six_rounds, 5), crashed)
    newest = sorted((crashed / "checkpoints").glob("*[0-9].json"))[-1]
    whole = json.loads(newest.read_text())["body"]["lines"][name]
    with (crashed / name).open("r+b") as file:
        file.truncate(whole - 1)
    (said,) = go_on(crashed, SIX_ROUNDS)
    assert f"{newest} cannot be used ({name} is shorter than it was)" in said
    assert_same(crashed, six_rounds)


def test_a_checkpoint_that_cannot_be_read_now_is_kept(
    six_rounds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails for a moment costs nothing, as the next start may read it."""
    crashed, read = tmp_path / "crashed", Path.read_bytes
    shutil.copytree(killed_after(six_rounds, 5), crashed)
    newest = sorted((crashed / "checkpoints").glob("*[0-9].safetensors"))[-1]

    def fail(path: Path) -> bytes:
        if path == newest:
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(ConfigError, match=r"^--resume: cannot read .*\.json: Input/output error$"):
        go_on(crashed, SIX_ROUNDS)
    monkeypatch.undo()
    assert go_on(crashed, SIX_ROUNDS) == []
    assert_same(crashed, six_rounds)


def test_clients_keep_no_more_than_the_server_can_go_back_to(tmp_path: Path) -> None:
    config = make_config("pfedhn-pc", rounds=12, eval_every=12, cohort=4)
    begin(tmp_path, config, crash_after=11)
    for index in range(4):
        earlier = sorted(path.stem.split("@")[1] for path in (tmp_path / f"clients/client-{index}/earlier").iterdir())
        assert earlier == ["10-0", "8-0"]


def test_what_cannot_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, args = tmp_path / "run", ["--engine", "inline", "--strategy", "local", "--clients", "2", "--rounds", "2"]
    assert main([*args, "--eval-every", "1", "--set", "local.steps=1", "--run-dir", str(run)]) == 0
    capsys.readouterr()

    def refusal(*more: str, folder: Path = run) -> str:
        assert main(["--resume", str(folder), *more]) == 2
        return capsys.readouterr().err

    assert "is complete; there is nothing to go on with" in refusal()
    assert "--rounds would change the run" in refusal("--rounds", "3")
    assert "--rounds would change the run" in refusal("--rounds", "0")
    assert "--seed would change the run" in refusal("--seed", "0")
    assert "--baselines would change the run" in refusal("--baselines", "")
    assert "--data would change the run" in refusal("--data", "mnist")
    assert "--set would change the run" in refusal("--set", "seed=3")
    assert "--vectorise would change the run" in refusal("--vectorise")
    assert "expected the folder of a run" in refusal(folder=tmp_path)
    environment = run / "environment.json"
    environment.write_text(
        (whole := environment.read_text()).replace('"inline"', '"grpc"').replace('"insecure": 0', '"insecure": 1')
    )
    assert "was in plain text; give --insecure again" in refusal(), "the folder may be somebody else's"
    began = json.loads(whole)
    for flag, value in (
        *(("superlink", "elsewhere.example:9093"), ("web", "0.0.0.0:80"), ("metrics-port", "[::]:81")),
        *(("certs", str(run / "certs")), ("serve-backbone", True)),
    ):
        machines = began["machines"] | {"engine": "grpc", flag.replace("-", "_"): value}
        environment.write_text(json.dumps(began | {"machines": machines}))
        assert f"had --{flag} {value}; give it again if you mean it" in refusal()
    machines = began["machines"] | {"web": "8080", "metrics_port": "127.0.0.1:81", "superlink": "localhost:9093"}
    environment.write_text(json.dumps(began | {"machines": machines}))
    assert "is complete; there is nothing" in refusal("--superlink", "")
    environment.write_text(whole.replace('"inline"', '"grpc"').replace('"insecure": 0', '"insecure": 1'))
    assert "is complete; there is nothing" in refusal("--insecure")
    environment.write_text(whole)
    with locked(run):
        assert "another server is still at work" in refusal()
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 1"))
    assert "is not what the run began with" in refusal()
    config.write_text(config.read_text().replace("seed: 1", "seed: 0"))
    for path in (run / "checkpoints").glob("*.json"):
        path.unlink()
    assert "found none that can be used" in refusal()


def crafted(folder: Path, **changes: Any) -> None:
    """Change the newest checkpoint of a run, digest included, as its sender can."""
    newest = sorted((folder / "checkpoints").glob("*[0-9].json"))[-1]
    stored = json.loads(newest.read_text())
    body = {**stored["body"], **changes}
    write_json(newest, {**stored, "body": body, "digest": _digest_of(body)})


@pytest.mark.parametrize("name", ["../outside.txt", "hypernetwork.safetensors", "baselines/x/../../../outside.txt"])
def test_a_checkpoint_that_names_other_files_cuts_nothing(six_rounds: Path, tmp_path: Path, name: str) -> None:
    crashed, outside = tmp_path / "crashed", tmp_path / "outside.txt"
    shutil.copytree(killed_after(six_rounds, 5), crashed)
    outside.write_text("not of this run")
    crafted(crashed, lines={name: 0})
    with pytest.raises(ConfigError, match="names files that are not its run's"):
        go_on(crashed, SIX_ROUNDS)
    crafted(crashed, lines={str(outside): 3})
    with pytest.raises(ConfigError, match="names files that are not its run's"):
        go_on(crashed, SIX_ROUNDS)
    assert outside.read_text() == "not of this run"


@pytest.mark.parametrize(
    "changes", [{"files": {"../metrics.jsonl": ""}}, {"number": "x"}, {"phase": -1}, {"phase": True}]
)
def test_a_checkpoint_with_other_files_or_numbers_is_left(
    six_rounds: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    crashed = tmp_path / "crashed"
    shutil.copytree(killed_after(six_rounds, 5), crashed)
    crafted(crashed, **changes)
    (said,) = go_on(crashed, SIX_ROUNDS)
    assert said.endswith("looking for one before")


def test_a_run_without_checkpoints_leaves_none(tmp_path: Path) -> None:
    config = make_config("pfedhn-pc", checkpoint_every=0)
    begin(tmp_path, config)
    assert not (tmp_path / "checkpoints").exists()
    assert not list(tmp_path.glob("clients/*/earlier"))
    with pytest.raises(ConfigError, match="found none that can be used"):
        RunFolder.resume(tmp_path, config, lambda text: None)


def test_the_command_goes_on_with_the_flags_that_the_run_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["--engine", "inline", "--strategy", "pfedhn", "--clients", "3", "--cohort", "2", "--rounds", "4"]
    args += ["--eval-every", "2", "--set", "checkpoint_every=1", "--set", "local.steps=2", "--set", "hidden_dim=8"]
    assert main([*args, "--run-dir", str(tmp_path / "whole")]) == 0
    real = RunFolder.round_done

    def killed(folder: RunFolder, report: RoundReport) -> None:
        real(folder, report)
        if report.number == 3:
            raise Crash

    monkeypatch.setattr(RunFolder, "round_done", killed)
    with pytest.raises(Crash):
        main([*args, "--run-dir", str(tmp_path / "run")])
    monkeypatch.setattr(RunFolder, "round_done", real)
    assert main(["--resume", str(tmp_path / "run")]) == 0
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_a_run_without_checkpoints_is_over_when_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [
        "--engine",
        "inline",
        "--clients",
        "2",
        "--rounds",
        "2",
        "--set",
        "checkpoint_every=0",
        "--set",
        "gains=false",
    ]
    args += ["--set", "local.steps=1", "--set", "hidden_dim=8", "--go-on", "--run-dir"]
    assert main([*args, str(tmp_path / "whole")]) == 0 == main([*args, str(tmp_path / "whole")])
    assert "is complete" in capsys.readouterr().out
    real = RunFolder.round_done

    def killed(folder: RunFolder, report: RoundReport) -> None:
        real(folder, report)
        raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(RunFolder, "round_done", killed)
        main([*args, str(tmp_path / "killed")])
    assert main([*args, str(tmp_path / "killed")]) == 2
    assert "has no checkpoints (checkpoint_every); delete it to begin anew" in capsys.readouterr().err


def test_what_a_killed_process_was_writing_is_deleted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    left = [run / ".summary.json.abc.unfinished", run / "checkpoints/.1.json.abc.unfinished"]
    writing = run / "clients/a/.identity.json.abc.unfinished"  # by a client that is alive
    for path in (*left, writing):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with locked(run):
        assert not any(path.exists() for path in left) and writing.exists()
    with ClientState(run / "clients/a").lock():
        assert not writing.exists()


def test_the_same_command_begins_a_run_goes_on_with_it_and_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--engine", "inline", "--strategy", "pfedhn", "--clients", "2", "--rounds", "4", "--eval-every", "2"]
    args += ["--set", "checkpoint_every=1", "--set", "local.steps=1", "--set", "hidden_dim=8"]
    assert main([*args, "--run-dir", str(tmp_path / "whole")]) == 0
    run, real = tmp_path / "run", RunFolder.round_done
    supervised = [*args, "--run-dir", str(run), "--go-on"]

    # Killed while it waits for clients, it begins anew; killed in round 3, it goes on.
    for when in (0, 3):

        def killed(folder: RunFolder, report: RoundReport, when: int = when) -> None:
            real(folder, report)
            if report.number == when:
                raise Crash

        monkeypatch.setattr(RunFolder, "round_done", killed)
        with monkeypatch.context() as early, pytest.raises(Crash):
            if not when:
                early.setattr("hyperbloom.server.loop.session.Session.run", lambda session: killed_early())
            main(supervised)
    monkeypatch.setattr(RunFolder, "round_done", real)
    assert main([*supervised, "--set", "seed=1"]) == 2
    assert "was begun with seed = 0, found 1; choose another folder" in capsys.readouterr().err
    assert main(supervised) == 0
    assert_same(run, tmp_path / "whole")
    assert json.loads((run / "checkpoints/resumes.json").read_text())

    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(supervised) == 0
    assert "is complete; name a new --run-dir" in capsys.readouterr().out.replace("\n", " ")
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main([*args, "--go-on"]) == 2
    assert "expected --run-dir DIR" in capsys.readouterr().err
    assert main([*supervised, "--port", "0"]) == 2
    assert "expected a --port" in capsys.readouterr().err


def killed_early() -> None:
    raise Crash


def test_clients_keep_earlier_versions_until_the_run_is_complete(tmp_path: Path) -> None:
    config = make_config("pfedhn-pc", clients=2, cohort=2, baselines=("local",))
    begin(tmp_path, config, crash_after=3)
    assert list(tmp_path.glob("clients/*/earlier/*")), "what the run may go back to"
    go_on(tmp_path, config)
    assert not list(tmp_path.glob("clients/*/earlier/*"))
    assert len(list(tmp_path.glob("clients/*/personal/*"))) == 4, "heads and models of their own stay"
