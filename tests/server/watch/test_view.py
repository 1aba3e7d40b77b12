"""What a person sees: lines and a table with the right numbers in the right places."""

import errno
import io
import re
import time
from collections.abc import Mapping, Set

import pytest
from rich.console import Console

from hyperbloom.common.config import RunConfig
from hyperbloom.common.gains import Gain
from hyperbloom.common.wire.orders import EvaluateResult, SplitScore, TrainResult
from hyperbloom.server.loop.exchange import Evaluated, Outcome
from hyperbloom.server.loop.listener import RoundReport, Selection
from hyperbloom.server.watch.board import Board
from hyperbloom.server.watch.view import MOST_ROWS, TerminalView, print_results, results_table
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.algorithm import Algorithm

from ...scores import right
from ..recorded import left_out, score


def console(terminal: bool = False) -> Console:
    """Return a console that writes to memory."""
    return Console(file=io.StringIO(), width=200, force_terminal=terminal, color_system=None)


def text(shown: Console) -> str:
    """Return what a console has shown."""
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def strategy(rounds: int = 20) -> Algorithm:
    """Return a strategy that does nothing."""
    return make_algorithm(RunConfig(strategy="local", rounds=rounds))


def selection(number: int, accuracy: Mapping[str, float], **metrics: float) -> Selection:
    """Return an evaluation."""
    values = {"test_mean": 0.0, "test_worst": 0.0, "test_pooled": 0.0} | metrics
    return Selection(number, values, dict(accuracy))


def rows(
    results: Mapping[str, Selection], examples: Mapping[str, int], novel: Set[str] = frozenset()
) -> list[list[str]]:
    """Return the cells of the table, header first."""
    shown = console()
    shown.print(results_table(results, examples, novel))
    lines = [line for line in text(shown).splitlines() if line.startswith(("│", "┃"))]
    return [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines]


# ---------------------------------------------------------------------- the table


def test_the_table_holds_every_clients_accuracy_under_every_strategy() -> None:
    results = {
        "pfedhn": selection(80, {"a": 91.25, "b": 70.0}, test_mean=80.625, test_worst=70.0, test_pooled=85.04),
        "local": selection(9, {"a": 50.0, "b": 99.96}, test_mean=74.98, test_worst=50.0, test_pooled=60.0),
    }
    assert rows(results, {"a": 60, "b": 1234}) == [
        ["", "", "pfedhn", "local"],
        ["client", "examples", "(round 80)", "(round 9)"],
        ["a", "60", "91.2", "50.0"],
        ["b", "1234", "70.0", "100.0"],
        ["mean over clients", "", "80.6", "75.0"],
        ["worst client", "", "70.0", "50.0"],
        ["pooled over examples", "", "85.0", "60.0"],
    ]


def test_a_client_that_was_not_evaluated_is_shown_as_such() -> None:
    results = {"pfedhn": selection(1, {"a": 10.0}), "local": selection(2, {"b": 20.0})}
    table = rows(results, {"a": 1, "b": 2, "c": 3})
    assert table[2:5] == [["a", "1", "10.0", "-"], ["b", "2", "-", "20.0"], ["c", "3", "-", "-"]]


def test_client_2_stands_before_client_10() -> None:
    table = rows({"local": selection(1, {})}, {"client-10": 1, "client-2": 2})
    assert [row[0] for row in table[2:4]] == ["client-2", "client-10"]


def test_novel_clients_are_marked_and_have_a_mean_of_their_own() -> None:
    results = {
        "odpfl": selection(3, {"a": 90.0, "b": 61.5}, test_mean=90.0, novel_test_mean=61.5),
        "fedma": selection(3, {"a": 80.0}, test_mean=80.0),  # no novel client answered
    }
    table = rows(results, {"a": 7, "b": 8}, {"b"})
    assert [row[0] for row in table[2:4]] == ["a", "b (novel)"]
    assert table[4] == ["mean over clients", "", "90.0", "80.0"]
    assert table[-1] == ["mean over novel clients", "", "61.5", "-"]


def test_a_table_of_many_clients_says_where_the_others_are() -> None:
    names = [f"client-{index}" for index in range(MOST_ROWS + 7)]
    table = rows({"local": selection(2, dict.fromkeys(names, 20.0))}, dict.fromkeys(names, 5))
    assert len(table) == 2 + MOST_ROWS + 1 + 3
    assert table[2 + MOST_ROWS][0] == "7 more in summary.json"
    assert table[1 + MOST_ROWS][0] == names[MOST_ROWS - 1]


def test_long_names_are_whole_in_a_narrow_table() -> None:
    clients = [f"university-hospital-heidelberg-radiology-{number}" for number in (1, 2)]
    results = {name: selection(80, dict.fromkeys(clients, 50.0)) for name in ("pfedhn", "hafl-distillation", "local")}
    shown = Console(file=io.StringIO(), width=60, color_system=None)
    shown.print(results_table(results, dict.fromkeys(clients, 9)))
    columns = zip(*(re.split("[│┃]", line)[1:-1] for line in text(shown).splitlines() if line[0] in "│┃"), strict=True)
    first, _, _, second, _ = ("".join(cell.strip() for cell in column) for column in columns)
    assert all(name in first for name in clients) and "hafl-distillation" in second


def test_names_from_a_folder_cannot_write_to_the_terminal() -> None:
    name = "\x1b]0;mine\x07\x1b[2Jward"
    shown = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    shown.print(results_table({name: selection(1, {name: 50.0})}, {name: 9}))
    assert "\x1b]0" not in text(shown) and "\x1b[2J" not in text(shown) and "ward" in text(shown)


def test_in_a_file_a_table_is_as_wide_as_it_needs() -> None:
    results = {f"a-strategy-of-mine-{number}": selection(80, {"a": 50.0}) for number in range(9)}
    shown = Console(file=io.StringIO(), width=80, color_system=None)
    print_results(shown, results, {"a": 9}, set())
    assert len(text(shown).splitlines()) == 11 and all(name in text(shown) for name in results)


def test_the_best_of_a_row_stands_out() -> None:
    results = {
        "one": selection(1, {"a": 1.0, "b": 5.0}, test_mean=3.0),
        "two": selection(1, {"a": 2.0, "b": 5.0}, test_mean=3.5),
    }
    cells = [list(column.cells) for column in results_table(results, {"a": 1, "b": 1}).columns[2:]]
    assert cells[0][:3] == ["1.0", "[bold green]5.0[/]", "3.0"]
    assert cells[1][:3] == ["[bold green]2.0[/]", "[bold green]5.0[/]", "[bold green]3.5[/]"]


@pytest.mark.parametrize("name", ["[/red]", "[b]"])
def test_any_name_can_stand_in_the_table(name: str) -> None:
    assert rows({"local": selection(1, {name: 10.0})}, {name: 1})[2] == [name, "1", "10.0"]


# ---------------------------------------------------------------------- plain lines


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it be the same time of day always."""
    monkeypatch.setattr(time, "strftime", lambda form: "12:34:56")


def report(number: int, evaluated: bool = True, **refused: str) -> RoundReport:
    """Return a round of half a second with two clients, one of them right in 3 of 4 and one in 1 of 4 cases."""
    evaluation = Evaluated({"a": score(1, 4, 3, 4), "b": score(1, 4, 1, 4)}) if evaluated else None
    outcome = Outcome({"a": TrainResult(0.1, loss=1.0)}, evaluation, left_out(**refused))
    return RoundReport(number, outcome, 0.5, number * 0.5)


def test_without_a_terminal_an_evaluation_is_a_line(now: None) -> None:
    shown = console()
    view = TerminalView(shown)
    view.phase(strategy(), "pfedhn")
    view.round_done(report(9, evaluated=False))
    assert text(shown) == ""
    view.round_done(report(10))
    view.phase_done(strategy())
    view.close()
    assert text(shown) == ("pfedhn: round 10/20  accuracy mean 50.0 %, worst client 25.0 %  2.0 rounds/s  5.0 s left\n")


def test_an_evaluation_without_the_selecting_metric_says_that_it_cannot_be_selected(now: None) -> None:
    shown = console()
    view = TerminalView(shown)
    view.phase(strategy(), "pfedhn")
    scores = {name: EvaluateResult(SplitScore(4, 1.0), right(correct, 4)) for name, correct in (("a", 3), ("b", 1))}
    view.round_done(RoundReport(10, Outcome({}, Evaluated(scores)), 0.5, 5.0))
    warning, figures = text(shown).splitlines()
    assert warning == (
        "round 10 cannot be selected: no training client has accuracy on its validation examples "
        "(set select to another metric)"
    )
    assert figures.startswith("pfedhn: round 10/20  accuracy mean 50.0 %, worst client 25.0 %")


def test_each_strategy_is_timed_from_its_own_start(now: None) -> None:
    shown = console()
    view = TerminalView(shown)
    for name in ("pfedhn", "local"):
        view.phase(strategy(), name)
        view.round_done(report(20))
    lines = text(shown).splitlines()
    assert [line.split(":")[0] for line in lines] == ["pfedhn", "local"]
    assert all(line.endswith("2.0 rounds/s  0.0 s left") for line in lines)


def test_events_are_lines_with_the_time(now: None) -> None:
    shown = console()
    TerminalView(shown).event("ward-7 left")
    assert text(shown) == "12:34:56 ward-7 left\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_the_gains_of_all_stay_on_the_screen_and_who_stays_alone_shares_a_line(terminal: bool) -> None:
    shown = console(terminal)
    view = TerminalView(shown)
    view.phase(strategy(), "pfedhn")
    better = {
        f"ward-{number}": Gain("personal", 0.031, 0.012, 0.05, ("personal", "alone"), (0.9, 0.8)) for number in range(9)
    }
    alone = {f"clinic-{number}": Gain("alone", 0.0, 0.0, 0.0, ("personal", "alone"), (0.8, 0.8)) for number in (10, 2)}
    view.gained(better | alone, "accuracy", 20)
    view.close()
    for name in better:
        assert text(shown).count(f"{name} gains 3.1 points (1.2 to 5.0)") == 1
    assert text(shown).count("clinic-2, clinic-10: keep training alone") == 1
    assert text(shown).count("11 clients gain 2.5 points") == 1


def test_a_long_event_is_one_line(now: None) -> None:
    shown = console()
    TerminalView(shown).event("word " * 100)
    assert text(shown).count("\n") == 1


def test_who_was_left_out_is_said_with_the_reason(now: None) -> None:
    shown = console()
    view = TerminalView(shown)
    view.phase(strategy(), "pfedhn")
    view.round_done(report(3, evaluated=False, b="no reply", c="tensor fc1.weight: 3 values are not finite"))
    assert text(shown).splitlines() == [
        "12:34:56 round 3: b left out: no reply",
        "12:34:56 round 3: c left out: tensor fc1.weight: 3 values are not finite",
    ]


@pytest.mark.parametrize("reason", ["no file in [/data/x]", "[red]ok[/red]", "found [1, 2]", "näme"])
def test_any_reason_can_be_shown(now: None, reason: str) -> None:
    shown = console()
    TerminalView(shown).event(reason)
    assert text(shown) == f"12:34:56 {reason}\n"


def test_no_word_becomes_a_picture(now: None) -> None:
    shown = console()
    TerminalView(shown).event("refused: ValueError:bug: no")
    assert text(shown) == "12:34:56 refused: ValueError:bug: no\n"


def test_control_characters_do_not_reach_the_terminal(now: None) -> None:
    shown = console(terminal=True)
    view = TerminalView(shown)
    view.event("a\x1b[2Jb\nc\rd")
    view.phase(strategy(), "pfedhn")
    view.close()
    assert text(shown).startswith("12:34:56 a [2Jb c d\n")


def test_any_reason_can_be_left_out_for(now: None) -> None:
    shown = console()
    view = TerminalView(shown)
    view.phase(strategy(), "pfedhn")
    view.round_done(report(3, evaluated=False, **{"[/b]": "[/x]\n"}))
    assert text(shown) == "12:34:56 round 3: [/b] left out: [/x] \n"


# ---------------------------------------------------------------------- a terminal


def last_block(shown: Console) -> list[str]:
    """Return the lines of the last block that a terminal has shown."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text(shown)).replace("\r", "\n")
    return [line.rstrip() for line in ("pfedhn" + plain.rsplit("pfedhn", 1)[1]).splitlines() if line.strip()]


def test_on_a_terminal_there_is_one_live_block_per_strategy() -> None:
    shown = console(terminal=True)
    view = TerminalView(shown)
    view.phase(strategy(), "pfedhn")
    view.round_done(report(19, evaluated=False, b="no reply"))
    view.event("ward-7 left")
    view.round_done(report(20))
    view.phase_done(strategy())
    head, *rows = last_block(shown)
    assert head.split() == ["pfedhn", "━" * 24, "20/20", "2.0", "rounds/s"]
    assert rows[0].startswith("accuracy  mean 50.0 %, worst client 25.0 % (b), at round 20")
    assert rows[1].startswith("training  loss 1 · 1 client in 0.50 s")
    assert rows[2].startswith("left out  b 1 time, last in round 19: no reply")
    assert [row.rsplit(" ", 2)[1:] for row in rows[4:]] == [["ward-7", "left"]]


def test_what_happens_to_many_does_not_flood_the_terminal() -> None:
    shown = console(terminal=True)
    view = TerminalView(shown)
    view.phase(strategy(), "pfedhn")
    for index in range(100):
        view.event(f"ward-{index} left")
    view.close()
    assert [row.split()[-2] for row in last_block(shown)[2:]] == ["ward-96", "ward-97", "ward-98", "ward-99"]


def test_the_block_is_not_drawn_anew_for_each_of_many_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(Board, "render", lambda board: drawn.append(len(board.clients)) or "")
    view = TerminalView(console(terminal=True))
    view.phase(strategy(), "pfedhn")
    begun = time.monotonic()
    view.add_clients([{"round": 3, "client": f"ward-{number}", "refused": "no reply"} for number in range(2000)])
    view.close()
    assert drawn[-1] == 2000 and len(drawn) < 5 + 5 * (time.monotonic() - begun)


def test_a_strategy_that_ends_before_its_last_round_has_no_time_left() -> None:
    shown = console(terminal=True)
    view = TerminalView(shown)
    view.phase(strategy(), "pfedhn")
    view.round_done(report(10))
    view.close()  # patience has ended it, or Ctrl-C
    assert last_block(shown)[0].endswith("10/20  2.0 rounds/s")


def test_before_the_first_evaluation_the_live_block_says_so() -> None:
    shown = console(terminal=True)
    view = TerminalView(shown)
    view.phase(strategy(), "pfedhn")
    view.close()
    head, row = last_block(shown)
    assert head.endswith("0/20")
    assert row == "accuracy  waiting for the first evaluation"
    assert "\x1b[?25h" in text(shown)  # the cursor is given back


def test_closing_is_harmless_at_any_time() -> None:
    view = TerminalView(console(terminal=True))
    view.close()
    view.phase(strategy(), "pfedhn")
    view.close()
    view.close()


def test_a_log_that_takes_no_more_does_not_end_the_run() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    TerminalView(Console(file=Full())).event("ward-7 joined")
