"""The HTML of the live page."""

from math import inf
from pathlib import Path

import pytest
import torch

from hyperbloom.common.files.storage import write_json
from hyperbloom.common.metrics import scale_of
from hyperbloom.common.pages.page import templates
from hyperbloom.server.live.parts import ROWS, _in_order, overview_parts, run_parts
from hyperbloom.server.live.run import LiveRun
from hyperbloom.server.pages.page import render
from hyperbloom.server.runs.checkpoint import locked
from hyperbloom.server.runs.lines import Tail
from hyperbloom.server.watch.board import Board

from ..recorded import Recording, some_config


def parts_of(folder: Path) -> dict[str, str]:
    run = LiveRun(folder)
    run.look(inf)
    return {name: str(part) for name, part in run_parts(run, "the run").items()}


def test_a_run_before_its_first_round(tmp_path: Path) -> None:
    Recording(tmp_path).begin("pfedhn")
    parts = parts_of(tmp_path)
    assert list(parts) == ["head", "figures", "curve", "clients", "map", "events"]
    assert "Nothing has been evaluated yet" in parts["curve"] and parts["map"].strip() == ""


def test_figures_curve_map_and_gains(tmp_path: Path) -> None:
    parts = parts_of(Recording(tmp_path).whole())
    assert (
        "61.0 %" in parts["figures"] and "60.0 %" in parts["figures"] and "<dt>ahead of local</dt>" in parts["figures"]
    )
    assert "0 of 3 clients are ahead of local." in parts["figures"]
    assert parts["curve"].count('class="line') == 2  # pfedhn and local
    assert "<circle" in parts["map"]
    assert "Coloured by test accuracy" in parts["map"] and '60.0 %<span class="ramp"></span>62.0 %' in parts["map"]
    assert "complete" in parts["head"] and "pfedhn, local" in parts["head"]


def test_one_client_is_told_in_the_singular(tmp_path: Path) -> None:
    parts = parts_of(Recording(tmp_path, names=("a",)).whole())
    assert "0 of 1 client is ahead of local." in parts["figures"]


def test_what_a_client_is_ahead_has_a_sign_and_the_digits_of_its_metric() -> None:
    signed = templates("hyperbloom.server.pages").get_template("tile.html").module.signed  # type: ignore[attr-defined]
    told = [(scale_of(name), value) for name, value in (("rmse", 58443.6), ("rmse", -0.5), ("accuracy", 2.04))]
    assert [signed(*each).strip() for each in told] == ["+58,444", "-0.5000", "+2.0"]


def test_what_clients_say_is_text(tmp_path: Path) -> None:
    names = ("<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "c")
    recording = Recording(tmp_path, names=names)
    recording.begin("pfedhn")
    recording.folder.event(f"{names[0]} joined")
    recording.go(1, c="<b>bold</b>")
    recording.go(2)
    parts = parts_of(tmp_path)
    whole = render("live.html", panels=[("the run", "/changes/x", parts)], title=names[0]).decode()
    for text in ("<script>alert", "<img", "<b>bold"):
        assert text not in "".join(parts.values())
    assert "&lt;script&gt;alert(1)" in parts["clients"] and "&lt;script&gt;alert(1)" in parts["events"]
    assert "<title>&lt;script&gt;" in whole


def test_of_many_clients_those_in_trouble_come_first(tmp_path: Path) -> None:
    names = [f"client-{number:03d}" for number in range(2 * ROWS)]
    recording = Recording(tmp_path, names=names, config=some_config(baselines=()), state={"embeddings": torch.ones(1)})
    recording.begin("pfedhn")
    recording.go(2, **{names[-1]: "no disk"})
    parts = parts_of(tmp_path)
    assert parts["clients"].count('<th scope="row">') == ROWS
    assert parts["clients"].index(names[-1]) < parts["clients"].index(names[0])
    assert f"{ROWS} of {2 * ROWS}" in parts["clients"] and "1 in trouble" in parts["figures"]


def test_the_list_of_runs(tmp_path: Path) -> None:
    folders = {name: Recording(tmp_path / name).whole() for name in ("one", "t&wo")}
    text = str(overview_parts(folders, {})["runs"])
    assert 'href="/run/t%26wo"' in text and "t&amp;wo" in text
    assert text.count("61.0 % accuracy") == 2 and "side by side" in text


def test_the_list_reads_a_run_once_and_then_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(tmp_path / "one")
    recording.begin("pfedhn")
    recording.go(1)
    kept: dict[Path, LiveRun] = {}
    overview_parts({"one": recording.folder.path}, kept)
    recording.go(2)
    read = list[int]()
    whole = Tail.read
    monkeypatch.setattr(Tail, "read", lambda tail, most=-1: (lines := whole(tail, most), read.append(len(lines)))[0])
    assert "2 of 6" in str(overview_parts({"one": recording.folder.path}, kept)["runs"])
    assert sum(read) == 1


def test_a_complete_run_is_listed_as_such_however_large_it_is(tmp_path: Path) -> None:
    folder = Recording(tmp_path / "one").whole()
    with (folder / "clients.jsonl").open("a") as file:
        file.write((folder / "clients.jsonl").read_text() * 3_000)
    text = str(overview_parts({"one": folder}, {})["runs"])
    assert "complete" in text and "stopped" not in text


def test_a_run_that_goes_on_is_listed_with_its_round(tmp_path: Path) -> None:
    """Whether it goes on takes a fifth of a second to find out, longer than the list may read of each run."""
    folder = Recording(tmp_path / "one").whole()
    with locked(folder):
        text = str(overview_parts({"one": folder}, {})["runs"])
    assert "running" in text and "6 of 6" in text and "61.0 %" in text


def test_while_local_trains_the_page_says_whose_figures_it_has_and_compares_nothing(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.begin("pfedhn")
    for number in range(1, 7):
        recording.go(number)
    recording.begin("local")
    for number in (1, 2):
        recording.go(number)
    figures = parts_of(tmp_path)["figures"]
    assert "over clients of pfedhn is 61.0 %" in figures and "pfedhn, after round 6" in figures
    assert "bytes of training of local" in figures and "ahead of local" not in figures


def test_all_who_have_joined_count_as_clients(tmp_path: Path) -> None:
    recording = Recording(tmp_path, config=some_config(eval_every=6))
    recording.begin("pfedhn")
    recording.go(1)
    write_json(tmp_path / "roster.json", recording.roster.to_json())
    assert '<dt>clients</dt><dd class="value">3</dd>' in parts_of(tmp_path)["figures"]


def test_novel_clients_gain_nothing_over_training_alone_which_they_do_not(tmp_path: Path) -> None:
    parts = parts_of(Recording(tmp_path, config=some_config(novel=30, clients=3)).whole())
    assert "of 2 clients are ahead of local." in parts["figures"] and "mean of 2<" in parts["figures"]
    assert "c (novel)" in parts["clients"] and "b (novel)" not in parts["clients"]


def test_clients_without_a_gain_come_after_those_with_one() -> None:
    """A gain is in points, and their accuracy is in percent."""
    board = Board("pfedhn", 10)
    for name, value in (("a", 0.9), ("b", 0.5), ("c", 0.02), ("d", 0.01)):
        board.add_client({"round": 1, "client": name, "test_accuracy": value})
    assert [name for name, _ in _in_order(board, {"a": 3.0, "b": -2.0})] == ["b", "a", "d", "c"]
