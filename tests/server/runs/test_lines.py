"""Lines that grow while they are read."""

import json
from pathlib import Path

import pytest

from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import TrainResult
from hyperbloom.server.loop.exchange import Outcome
from hyperbloom.server.loop.listener import RoundReport
from hyperbloom.server.loop.post import Failure
from hyperbloom.server.runs.lines import Tail, client_lines, metrics_line, read_lines
from hyperbloom.server.watch.board import Board


def without_loss(*names: str, **told: float) -> RoundReport:
    """Return a round in which some clients keep their losses to themselves."""
    results = {name: TrainResult(0.1, loss=told.get(name)) for name in (*names, *told)}
    return RoundReport(1, Outcome(results), 0.5, 0.5)


def test_a_loss_that_nobody_told_is_no_zero() -> None:
    line = metrics_line(without_loss("a", "b"))
    assert line["clients"] == 2 and "loss" not in line
    assert ["loss" in each for each in client_lines(without_loss("a", b=0.5))] == [False, True]
    assert metrics_line(without_loss("a", b=0.5, c=1.0))["loss"] == pytest.approx(0.75)
    board = Board("pfedhn", 6)
    board.add_round(line)
    assert board._training_row().startswith("2 clients in 0.50 s")


def test_who_lied_is_not_looked_up_anew_for_each_client(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, looks = Outcome.lied.fget, list[Outcome]()
    monkeypatch.setattr(Outcome, "lied", property(lambda outcome: looks.append(outcome) or kept(outcome)))
    refused = {f"c{n}": Failure(Reason.CONTENT if n % 2 else Reason.NO_REPLY, "no") for n in range(6)}
    lines = client_lines(RoundReport(1, Outcome(refused=refused), 0.5, 0.5))
    assert [line.get("lied", False) for line in lines] == [False, True] * 3 and len(looks) <= 1


def test_only_what_is_new_and_whole_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"round": 1}\n{"rou')
    assert tail.read() == [{"round": 1}]
    assert tail.read() == []
    with path.open("a") as file:
        file.write('nd": 2}\n{"round": 3}\n')
    assert tail.read() == [{"round": 2}, {"round": 3}]
    assert not tail.cut


def test_a_file_that_was_cut_back_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 1}\n{"round": 2}\n')
    tail = Tail(path)
    tail.read()
    path.write_text('{"round": 1}\n')
    assert tail.read() == [{"round": 1}]
    assert tail.cut
    path.unlink()
    assert (tail.read(), tail.cut) == ([], True)
    assert (tail.read(), tail.cut) == ([], False)


def test_what_is_no_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "clients.jsonl"
    path.write_bytes(b'{"a": 1}\n\xff\xfe\n[1]\n' + json.dumps({"b": "\ud800\n"}).encode() + b"\n")
    assert list(read_lines(path)) == [{"a": 1}, {"b": "\ud800\n"}]
