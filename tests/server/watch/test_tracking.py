"""Trackers as plug-ins bring them, in processes of their own; among them such as fail."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hyperbloom.common.config import dump_run_config
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.program import signals
from hyperbloom.common.program.plugins import plugins
from hyperbloom.server.cli import main
from hyperbloom.server.runs.lines import Line, metrics_line
from hyperbloom.server.watch import tracking
from hyperbloom.server.watch.tracking import Subject, Tracker, curves, find_tracker, follow

from ..recorded import Recording, some_config

CODE = """
import os, signal, sys, time
from hyperbloom.server.watch.tracking import Tracker

class Raises(Tracker):
    def rounds(self, lines):
        raise RuntimeError("no room in the store")

class Hangs(Tracker):
    def rounds(self, lines):
        print("hanging", flush=True)
        time.sleep(1000)

class Kills(Tracker):
    def rounds(self, lines):
        print("dying", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""
TINY = "--strategy pfedhn --engine inline --clients 3 --rounds 3 --eval-every 1 --max-train 20 --set local.steps=1"


class Telling(Tracker):
    """Writes down what it is told."""

    told: list[tuple[Any, ...]]

    def __init__(self, where: str, subject: Subject) -> None:
        super().__init__(where, subject)
        self.told += [("subject", subject), ("begin", where, subject["name"])]

    def rounds(self, lines: Sequence[Line]) -> None:
        self.told.append((self.subject["settings"]["strategy"], [line["round"] for line in lines]))

    def end(self, complete: bool, selected: Mapping[str, float], files: Mapping[str, str]) -> None:
        self.told.append((self.subject["settings"]["strategy"], complete, selected.get("selected/test_mean"), *files))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that installs a package with these trackers, here and for child processes."""
    site = tmp_path / "site"
    (site / "ours-1.0.dist-info").mkdir(parents=True)
    (site / "ours_trackers.py").write_text(CODE)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    def write(**trackers: str) -> None:
        (site / "ours-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
        lines = ["[hyperbloom.trackers]", *(f"{name} = {target}" for name, target in trackers.items())]
        (site / "ours-1.0.dist-info" / "entry_points.txt").write_text("\n".join(lines) + "\n")
        plugins.cache_clear()

    yield write
    plugins.cache_clear()


@pytest.fixture
def told(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return what the tracker `telling` is told in this process."""
    install(telling="telling_tracker:Telling")
    module = ModuleType("telling_tracker")
    module.Telling = Telling  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "telling_tracker", module)
    monkeypatch.setattr(Telling, "told", [], raising=False)
    monkeypatch.setattr(tracking, "LOOK_EVERY_S", 0.0)
    return Telling.told


def test_a_run_that_is_over_is_told_strategy_by_strategy(tmp_path: Path, told: list[tuple[Any, ...]]) -> None:
    folder = Recording(tmp_path / "run").whole()
    (folder / "report.html").touch()
    follow(folder, "telling:a:b", lambda: False)
    rounds = [1, 2, 3, 4, 5, 6]
    assert [each for each in told if each[0] != "subject"] == [
        ("begin", "a:b", "run"),
        ("pfedhn", rounds),
        ("begin", "a:b", "run local"),
        ("local", rounds),
        ("pfedhn", True, 61.0, "folder", "report"),
        ("local", True, 61.0, "folder", "report"),
    ]


def test_a_run_is_told_as_it_goes_and_anew_after_it_went_back(tmp_path: Path, told: list[tuple[Any, ...]]) -> None:
    recording = Recording(tmp_path / "run", config=some_config(baselines=()))

    def steps() -> Iterator[bool]:
        yield True  # before the run has a folder of its own
        recording.begin("pfedhn")
        recording.go(1)
        yield True
        recording.go(2)
        yield True
        os.truncate(tmp_path / "run" / "metrics.jsonl", 0)
        yield True
        recording.go(1)
        yield False

    going = steps()
    follow(tmp_path / "run", "telling", lambda: next(going, False))
    numbers = [each[1] for each in told if each[0] == "pfedhn" and len(each) == 2]
    assert numbers == [[1], [2], [1]]
    assert [each[0] for each in told].count("begin") == 2
    assert told[-1] == ("pfedhn", False, 21.0, "folder")


def test_numbers_have_the_names_of_their_kind(tmp_path: Path) -> None:
    line = metrics_line(Recording(tmp_path).report(2, b="too slow"))
    named = curves(line)
    assert named["round/loss"] == 0.5 and named["round/left_out"] == 1 and named["round/bytes_up"] == 1000
    assert named["accuracy/test_mean"] == 21.0 and named["accuracy/val_mean"] == 50.0
    assert "round/round" not in named and all(isinstance(value, int | float) for value in named.values())
    assert curves({**line, "quarantined": {"ward-7": 13, "ward-8": 14}})["round/quarantined"] == 2
    alone = curves({**line, "clients": 0, "bytes_up": 0})  # in asynchronous mode
    assert set(alone) == {name for name in named if name.startswith("accuracy/")}


def test_a_strategy_is_told_with_its_own_settings(tmp_path: Path, told: list[tuple[Any, ...]]) -> None:
    folder = Recording(tmp_path / "wards" / "run").whole()
    (folder / "config.yaml").write_text(dump_run_config(some_config(options={"hidden_dim": 8})))
    follow(folder, "telling", lambda: False)
    own, baseline = (each[1] for each in told if each[0] == "subject")
    assert own["settings"]["options"]["hidden_dim"] == 8 and own["settings"]["rounds"] == 6
    assert (baseline["settings"]["strategy"], baseline["settings"]["options"]) == ("local", {})
    assert (own["group"], own["name"], baseline["name"]) == ("wards", "run", "run local")
    assert (own["run"], baseline["run"]) == ("run-1/pfedhn", "run-1/local")


def test_a_tracker_that_is_not_there_is_named_before_the_run(
    tmp_path: Path, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(hangs="ours_trackers:Hangs")
    assert main([*TINY.split(), "--run-dir", str(tmp_path / "run"), "--track", "aim"]) == 2
    assert "expected one of mlflow, wandb, tensorboard, hangs, found 'aim'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'hyperbloom\[mlflow\]'"):
        find_tracker("mlflow:sqlite:///m.db")
    install(mlflow="ours_trackers:Hangs")
    with pytest.raises(ConfigError, match="expected one meaning"):
        find_tracker("mlflow")


def outcome(folder: Path) -> dict[str, object]:
    """Return what a run has computed: everything but times and names of this run."""
    digests: dict[str, object] = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("hypernetwork.safetensors", "hypernetwork-last.safetensors", "summary.json")
    }
    for name in ("metrics.jsonl", "clients.jsonl"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        digests[name] = [{key: line[key] for key in line if key not in ("seconds", "elapsed")} for line in lines]
    return digests


def test_a_tracker_that_fails_hangs_or_dies_never_touches_the_run(
    tmp_path: Path, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    signs = {"raises": "no room in the store", "hangs": "hanging", "kills": "dying"}
    install(raises="ours_trackers:Raises", hangs="ours_trackers:Hangs", kills="ours_trackers:Kills")
    assert main([*TINY.split(), "--run-dir", str(tmp_path / "alone" / "run")]) == 0
    capfd.readouterr()
    logs = {name: tmp_path / "tracked" / "run" / f"track-{name}.log" for name in signs}

    def monotonic() -> float:
        """Let no time pass before each tracker has come to its fault, however long its start takes."""
        while not all(sign in logs[name].read_text() for name, sign in signs.items()):
            time.sleep(0.05)
        return time.monotonic()

    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    monkeypatch.setattr(tracking, "PATIENCE_S", 1.0)
    flags = [word for name in signs for word in ("--track", name)]
    assert main([*TINY.split(), "--run-dir", str(tmp_path / "tracked" / "run"), *flags]) == 0
    said = " ".join(capfd.readouterr().out.split())
    for name in signs:
        assert f"tracker {name} failed: see" in said
    assert outcome(tmp_path / "tracked" / "run") == outcome(tmp_path / "alone" / "run")
    recorded = json.loads((tmp_path / "tracked" / "run" / "environment.json").read_text())["machines"]
    assert "track" not in recorded  # an address may hold a password
