"""The numbers on the board."""

import io

import pytest
from rich.console import Console

from hyperbloom.common.errors import printable
from hyperbloom.server.watch.board import PACE_OVER, Board, amount, duration


def shown(board: Board) -> str:
    """Return a board as a wide terminal without colours shows it."""
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(board.render())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line(number: int, elapsed: float, **more: float) -> dict[str, float]:
    """Return a round's line."""
    return {"round": number, "elapsed": elapsed, "seconds": 1.0, "clients": 2, **more}


def test_the_pace_is_that_of_the_last_rounds() -> None:
    board = Board("pfedhn", 1000)
    assert (board.pace, board.seconds_left) == (None, None)
    board.add_round(line(100, 1000.0))
    assert board.pace == pytest.approx(0.1)
    for number in range(101, 101 + PACE_OVER):
        board.add_round(line(number, 1000.0 + 2 * (number - 100)))
    assert board.pace == pytest.approx(0.5)
    assert board.seconds_left == pytest.approx((1000 - 100 - PACE_OVER) * 2)


def test_a_slow_pace_is_told_as_the_time_of_a_round() -> None:
    board = Board("pfedhn", 10)
    board.add_round(line(1, 75.0, test_mean=50.0, test_worst=40.0))
    assert board.sentence().endswith("  1:15 min a round  11:15 min left")
    assert "1:15 min a round" in shown(board)


def test_a_late_evaluation_does_not_turn_the_round_back() -> None:
    board = Board("pfedhn", 10)
    board.add_round(line(5, 5.0))
    board.add_round(line(3, 3.0, test_mean=50.0, test_worst=40.0))
    assert board.done == 5
    assert board.pace == pytest.approx(1.0)
    assert "at round 3" in shown(board)


def test_an_evaluation_of_the_present_round_does_not_hide_its_training() -> None:
    board = Board("pfedhn", 10)
    board.add_round(line(5, 5.0, loss=0.25))
    before = shown(board)
    board.add_round({**line(5, 5.5, test_mean=50.0, test_worst=40.0), "clients": 0, "metric": "accuracy"})  # type: ignore[dict-item]
    training = next(row for row in before.splitlines() if "0.25" in row)
    assert training in shown(board)


def test_of_an_error_less_is_a_gain() -> None:
    ours, alone = Board("pfedhn", 10), Board("local", 10)
    for board, errors in ((ours, (3.0, 5.0)), (alone, (4.0, 4.5))):
        board.add_round({**line(5, 5.0, test_mean=4.0, test_worst=5.0), "metric": "rmse"})  # type: ignore[dict-item]
        for name, error in zip("ab", errors, strict=True):
            board.add_client({"client": name, "round": 5, "test_rmse": error})
    assert ours.gains_over(alone) == {"a": 1.0, "b": -0.5}


def test_the_worst_client_is_named() -> None:
    board = Board("pfedhn", 10)
    board.add_round(line(2, 2.0, test_mean=60.0, test_worst=100 / 3))
    for name, right in (("a", 3), ("b", 1), ("c", 1)):
        board.add_client({"round": 2, "client": name, "test_accuracy": right / 3})
    assert "worst client 33.3 % (b), at round 2" in shown(board)
    board.add_round(line(4, 4.0, test_mean=50.0, test_worst=50.0))
    assert "worst client 50.0 %, at round 4; best mean 60.0 % at round 2" in shown(board)


def test_who_is_left_out_most_comes_first() -> None:
    board = Board("pfedhn", 10)
    for name, times in (("a", 1), ("b", 3), ("c", 2), ("d", 1)):
        for number in range(times):
            board.add_client({"round": number + 1, "client": name, "refused": f"reason {number}\x1b"})
    said = [row.strip().split("  ")[-1].strip() for row in shown(board).splitlines()[2:]]
    assert said == [
        "b 3 times, last in round 3: reason 2",
        "c 2 times, last in round 2: reason 1",
        "a 1 time, last in round 1: reason 0",
        "and 1 more",
    ]


def test_an_evaluation_that_was_left_out_is_no_training_that_was() -> None:
    board = Board("pfedhn", 10)
    board.add_round(line(1, 1.0, asked=3))
    board.add_client({"round": 1, "client": "a", "refused": "too slow"})
    for name in ("b", "c", "d"):
        board.add_client({"round": 1, "client": name, "refused": "not evaluated: it still works on an earlier round"})
    assert (board.trained, board.left_out) == (2, 1)


def test_a_client_that_keeps_a_round_waiting_is_named() -> None:
    board = Board("pfedhn", 10)
    board.add_round(line(1, 1.0, bytes_down=2_500_000, bytes_up=1_000, loss=0.5))
    for name, seconds in (("a", 1.0), ("b", 1.1), ("c", 4.0)):
        board.add_client({"round": 1, "client": name, "loss": 1.0, "seconds": seconds})
    assert "loss 0.5 · 2 clients in 1.00 s · 2.5 MB down, 1.0 kB up in all · slowest c 4.0 s" in shown(board)


def test_numbers_for_people() -> None:
    assert [amount(n) for n in (999, 1500, 2_340_000, 7.1e9)] == ["999 bytes", "1.5 kB", "2.3 MB", "7.1 GB"]
    assert [duration(s) for s in (0, 0.012, 0.44, 12.4, 184, 8100)] == [
        "0.0 s",
        "12 ms",
        "0.4 s",
        "12 s",
        "3:04 min",
        "2:15 h",
    ]
    assert printable("a\x1b[2J\nb") == "a [2J b"
