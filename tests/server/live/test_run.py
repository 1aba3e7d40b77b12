"""What the live page reads of a run folder, while it grows and after it went back."""

import json
import shutil
from math import inf
from pathlib import Path

import pytest

from hyperbloom.common.errors import ConfigError
from hyperbloom.server.live.run import LiveRun, find_runs, how_far
from hyperbloom.server.runs.checkpoint import locked

from ..recorded import Recording, some_config


def test_rounds_and_clients_are_read_as_they_come(tmp_path: Path) -> None:
    recording, run = Recording(tmp_path), LiveRun(tmp_path)
    recording.begin("pfedhn")
    run.look(inf)
    assert not run.main.clients and run.current is run.main

    recording.go(1)
    recording.go(2, b="out of memory")
    before = run.version
    run.look(inf)
    assert run.version > before
    assert run.main.done == 2 and run.main.means == [(2, 21.0)] and run.main.worsts == [(2, 20.0)]
    first, second = run.main.clients["a"], run.main.clients["b"]
    assert (first.trained, first.accuracy, first.left_out) == (2, 20.0, 0)
    assert (second.trained, second.left_out, second.left_out_in, second.why) == (None, 1, 2, "out of memory")
    assert (run.main.bytes_down, run.main.bytes_up, run.main.trained, run.main.left_out) == (4000, 2000, 2, 1)

    before = run.version
    run.look(inf)
    assert run.version == before
    (tmp_path / "report.html").write_text("")
    run.look(inf)
    assert run.version > before


def test_a_client_is_well_again_once_it_has_trained(tmp_path: Path) -> None:
    recording, run = Recording(tmp_path), LiveRun(tmp_path)
    recording.begin("pfedhn")
    recording.go(1, a="too slow")
    run.look(inf)
    assert not run.main.clients["a"].well  # it trained and was left out in the same round
    recording.go(2)
    run.look(inf)
    assert run.main.clients["a"].well


def test_gains_are_against_training_alone(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.whole()
    lines = [json.loads(line) for line in (tmp_path / "baselines/local/clients.jsonl").read_text().splitlines()]
    for line in lines:
        if line.get("client") == "b" and "test_accuracy" in line:
            line["test_accuracy"] -= 0.1
    (tmp_path / "baselines/local/clients.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = LiveRun(tmp_path)
    run.look(inf)
    assert run.main.gains_over(run.courses["local"]) == {"a": 0.0, "b": 10.0, "c": 0.0}
    assert run.current is run.courses["local"] and run.state == "complete"


def test_a_run_that_went_back_is_read_anew(tmp_path: Path) -> None:
    recording, run = Recording(tmp_path, config=some_config(baselines=())), LiveRun(tmp_path)
    recording.begin("pfedhn")
    recording.go(1)
    metrics, clients = tmp_path / "metrics.jsonl", tmp_path / "clients.jsonl"
    lengths = [metrics.stat().st_size, clients.stat().st_size]
    recording.go(2)
    recording.go(3)
    run.look(inf)
    assert run.main.done == 3
    for path, length in zip((metrics, clients), lengths, strict=True):
        with path.open("r+b") as file:
            file.truncate(length)
    for _ in range(3):
        run.look(inf)
    assert run.main.done == 1 and run.main.means == [] and run.main.trained == 1


def test_a_large_folder_is_read_a_little_at_a_time(tmp_path: Path) -> None:
    recording, run = Recording(tmp_path), LiveRun(tmp_path)
    recording.begin("pfedhn")
    recording.go(1)
    line = (tmp_path / "clients.jsonl").read_text()
    (tmp_path / "clients.jsonl").write_text(line * (9_000_000 // len(line)))
    run.look(0)
    assert run.behind and run.main.clients == {} and run.main.done == 1, "its rounds say how far it is"
    run.look(inf)
    assert not run.behind and set(run.main.clients) == {"a"}


def test_another_run_that_begins_in_the_folder_is_read_with_its_own_configuration(tmp_path: Path) -> None:
    folder = Recording(tmp_path / "run").whole()
    run = LiveRun(folder)
    run.look(9)
    shutil.rmtree(folder)
    run.look(9)
    recording = Recording(folder, config=some_config(strategy="fedavg", baselines=()))
    recording.begin("fedavg")
    recording.go(1)
    run.look(9)
    assert run.main.name == "fedavg" and list(run.courses) == ["fedavg"] and run.current.done == 1


def test_the_lock_says_whether_it_runs(tmp_path: Path) -> None:
    recording, run = Recording(tmp_path), LiveRun(tmp_path)
    recording.begin("pfedhn")
    with locked(tmp_path):
        run.look(inf)
        assert run.state == "running"
    run.look(inf)
    assert run.state == "stopped"


def test_a_run_that_stopped_while_its_clients_compared_is_not_complete(tmp_path: Path) -> None:
    recording = Recording(tmp_path, config=some_config(baselines=()))
    recording.begin("pfedhn")
    for number in range(1, 7):
        recording.go(number)
    run = LiveRun(tmp_path)
    run.look(inf)
    assert run.state == "stopped"
    recording.folder.end()
    assert run.state == "complete"


def test_a_damaged_line_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    recording, run = Recording(tmp_path), LiveRun(tmp_path)
    recording.begin("pfedhn")
    (tmp_path / "metrics.jsonl").write_text('{"round": "x"}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is damaged"):
        run.look(inf)


def test_runs_are_found_in_a_folder_and_in_comparisons(tmp_path: Path) -> None:
    Recording(tmp_path / "one").begin("pfedhn")
    Recording(tmp_path / "compared" / "pfedhn-0").begin("pfedhn")
    assert set(find_runs(tmp_path)) == {"one", "compared/pfedhn-0"}
    assert find_runs(tmp_path / "one") == {"one": tmp_path / "one"}
    shutil.rmtree(tmp_path / "one")
    shutil.rmtree(tmp_path / "compared")
    assert find_runs(tmp_path) == {}


def test_once_for_people_and_for_programs(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.begin("pfedhn")
    recording.go(1)
    recording.go(2, b="out of memory")
    recording.go(3)
    assert how_far(tmp_path, False).splitlines() == [
        "pfedhn: round 2/6  accuracy mean 21.0 %, worst client 20.0 %  2.0 rounds/s",  # nobody works on the rest
        "stopped: pfedhn: round 3 of 6",
    ]
    with locked(tmp_path):
        assert how_far(tmp_path, False).splitlines() == [
            "pfedhn: round 2/6  accuracy mean 21.0 %, worst client 20.0 %  2.0 rounds/s  2.0 s left",
            "running: pfedhn: round 3 of 6",
        ]
        assert json.loads(how_far(tmp_path, True))["seconds_left"] == 1.5
    told = json.loads(how_far(tmp_path, True))
    assert (told["state"], told["rounds"], told["strategies"]["local"]["round"]) == ("stopped", 6, 0)
    assert told["seconds_left"] is None
    pfedhn = told["strategies"]["pfedhn"]
    assert (pfedhn["round"], pfedhn["test_mean"], pfedhn["bytes_down"]) == (3, {"2": 21.0}, 6000)
    assert pfedhn["clients"]["b"]["why"] == "out of memory"
    recording.begin("local")
    recording.go(1)
    recording.go(2)
    with locked(tmp_path):  # the first strategy is over, whatever was the reason
        assert "left" not in how_far(tmp_path, False).splitlines()[0]


def test_a_run_that_went_back_and_has_grown_again_is_read_anew(tmp_path: Path) -> None:
    """Nobody looked meanwhile, so its files never were shorter than at the last look."""
    recording, run = Recording(tmp_path), LiveRun(tmp_path)
    recording.begin("pfedhn")
    for number in (1, 2, 3):
        recording.go(number)
    run.look(inf)
    assert run.main.trained == 3
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    (tmp_path / "checkpoints" / "resumes.json").write_text("[]")
    for name in ("metrics.jsonl", "clients.jsonl"):
        (tmp_path / name).unlink()
    for number in range(1, 6):
        recording.go(number, b="too slow")
    run.look(inf)
    assert (run.main.trained, run.main.left_out, [number for number, _ in run.main.means]) == (5, 5, [2, 4])
