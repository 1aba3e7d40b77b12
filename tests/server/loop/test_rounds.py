"""The loop over rounds with clients that are late: who is asked, what is learned, what is counted."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Error, Message, RecordDict

from hyperbloom.common.errors import CohortError
from hyperbloom.common.layout import Weights
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import EvaluateOrder
from hyperbloom.common.wire.pack import unpack
from hyperbloom.server.loop import exchange
from hyperbloom.server.loop.listener import NOTHING_DONE, Listener
from hyperbloom.server.loop.post import Failure
from hyperbloom.server.runs.folder import RunFolder
from hyperbloom.strategies import STRATEGIES
from hyperbloom.strategies.exchange import Ask, Client, Exchanges, ask
from hyperbloom.strategies.local import Local
from hyperbloom.strategies.turn import Evaluation, Turn

from ..conftest import Clock, app_error
from .crew import Crew, LoggingGrid, Twice

HYPERNETWORK = {"strategy": "pfedhn", "options": {"hidden_dim": 4, "embedding_dim": 2, "learning_rate": 0.2}}


@pytest.fixture
def crew(clock: Clock) -> Callable[..., Crew]:
    """Return how to make a run by rounds."""
    return lambda **config: Crew(LoggingGrid(clock), clock, **config)


def everyone(run: Crew, *names: str) -> Crew:
    """Let clients appear that answer after a tenth of a second."""
    for node, name in enumerate(names, start=2):
        run.join(node, name)
    return run


class Describing(Local):
    """Asks for something before it scores, as odpfl does for descriptors."""

    def evaluate(self, turn: Turn, clients: Sequence[Client]) -> Exchanges[Evaluation]:
        yield from ask(Ask(clients, turn.training(clients).orders))
        return Evaluation((yield from turn.score(clients)))


def test_what_an_evaluation_asks_for_is_no_traffic_of_the_round_after_it(
    crew: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STRATEGIES, "local", Describing)
    traffic = []
    for eval_every in (1, 9):
        run = everyone(crew(clients=2, cohort=2, rounds=2, eval_every=eval_every), "a", "b")
        run.run()
        traffic.append([(report.bytes_down, report.bytes_up) for report in run.told.reports])
    assert traffic[0] == traffic[1] and min(map(min, traffic[0])) > 0


# ---------------------------------------------------------------------- late replies


def late_run(crew: Callable[..., Crew], clock: Clock, folder: Path) -> Crew:
    """Run rounds of at most a second; `slow` takes 5.5 s for its first order, then it is as fast as others."""
    run = everyone(crew(clients=3, cohort=3, rounds=80, eval_every=10, round_timeout_s=1.0, **HYPERNETWORK), *"ab")
    run.join(4, "slow", train=5.5)
    run.join(5, "idler", train=0.1)

    def watch() -> None:
        if any(entry.what == "answer" for entry in run.entries("train", "slow")):
            run.set_pace("slow", "train", 0.1)
        else:
            clock.after(0.01, watch)

    watch()
    run.run(RunFolder(folder, run.config, "run-1"))
    return run


def test_a_straggler_is_dropped_counted_and_asked_again_when_it_has_answered(
    crew: Callable[..., Crew], clock: Clock, tmp_path: Path
) -> None:
    run = late_run(crew, clock, tmp_path)
    log = run.entries("train", "slow")
    assert [entry.what for entry in log] == ["order", "answer"] * (len(log) // 2)  # not asked while it works
    assert len(log) > 20
    learned = [entry.id for entry in log if entry.what == "answer" and float(entry.id[1:]) in run.learned]
    assert learned == [entry.id for entry in log[3::2]]  # all but the first reply
    late = {report.number: report.late for report in run.told.reports if report.late}
    (number,) = late
    assert late == {number: 1} and number > 10
    first = next(
        r.number for r in run.told.reports if r.outcome.refused.get("slow") == Failure(Reason.NO_REPLY, "no reply")
    )
    again = next(r.number for r in run.told.reports if "slow" in r.outcome.results)
    assert first < number < again
    assert run.events.count("slow answered after the deadline; its reply is dropped") == 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["round"]: line["late"] for line in lines if "late" in line} == late
    # Meanwhile the rounds went on with the others, and without waiting: one deadline in all, not one a round.
    between = run.told.reports[first : number - 1]
    assert all(set(report.outcome.results) == {"a", "b", "idler"} for report in between)
    assert sum(report.seconds > 0.9 for report in run.told.reports) == 1


def test_who_still_works_is_not_evaluated_and_is_named(crew: Callable[..., Crew], clock: Clock, tmp_path: Path) -> None:
    run = late_run(crew, clock, tmp_path)
    why = Failure(Reason.BUSY, "not evaluated: it still works on an earlier round")
    evaluated = {r.number: r.outcome for r in run.told.reports if r.outcome.evaluation}
    assert sorted(evaluated) == list(range(10, 81, 10))
    for number, outcome in evaluated.items():
        assert outcome.evaluation is not None
        busy = number < next(r.number for r in run.told.reports if r.late)
        assert list(outcome.evaluation.scores) == ["a", "b", "idler"] + ([] if busy else ["slow"])
        assert outcome.refused.get("slow") == (why if busy else None)
    asked = [run.grid.names[m.metadata.dst_node_id] for _, m in run.grid.sent if m.metadata.message_type == "evaluate"]
    assert asked.count("slow") == sum("slow" not in outcome.refused for outcome in evaluated.values())
    assert 0 < asked.count("slow") < 8


def test_a_late_reply_leaves_no_trace_in_what_is_learned(crew: Callable[..., Crew], clock: Clock) -> None:
    """The run with a reply that comes too late is, to the bit, the run in which it never comes."""
    states = []
    for pace in (1.5, math.inf):
        run = everyone(crew(clients=2, cohort=2, rounds=15, eval_every=15, round_timeout_s=1.0, **HYPERNETWORK), "a")
        run.join(3, "slow", train=pace)
        # However fast, it takes no part afterwards.
        run.algorithm.trains = lambda client, run=run: client.client_id == "a" or run.federation.round < 2
        # The losses, and so the changes, are numbered by message, which counts what the evaluation asks; it is last.
        run.run()
        states.append((run.federation.late, run.state()))
    (came, one), (never, other) = states
    assert (came, never) == (1, 0)
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_who_is_late_each_time_is_left_out_for_more_and_more_rounds(
    crew: Callable[..., Crew], clock: Clock, tmp_path: Path
) -> None:
    """Each round that it is in takes as long as the timeout, and its reply is dropped all the same."""
    config = {"clients": 2, "cohort": 2, "rounds": 120, "eval_every": 4, "round_timeout_s": 1.0}
    run = everyone(crew(**config, **HYPERNETWORK), "a")
    run.join(3, "slow", train=1.25)  # and evaluates in time
    run.run(RunFolder(tmp_path, run.config, "run-1"))
    held_up = [report.number for report in run.told.reports if report.seconds > 0.9]
    asked = [report.number for report in run.told.reports if "slow" in report.outcome.refused]
    terms = [
        report.outcome.quarantined["slow"] - report.number for report in run.told.reports if report.outcome.quarantined
    ]
    assert terms == [10, 20, 40, 80] and len(held_up) == 12
    for term, last in zip(terms, held_up[2::3], strict=True):
        assert not set(range(last + 1, last + term + 1)) & set(asked)
    assert sum("raise round_timeout_s" in event for event in run.events) == 4
    assert all("a" in report.outcome.results for report in run.told.reports)


@pytest.mark.parametrize(("names", "quarantined"), [("a", 0), ("ab", 1)])
def test_if_all_are_too_slow_one_is_left_and_the_run_ends_with_the_reason(
    crew: Callable[..., Crew], clock: Clock, names: str, quarantined: int
) -> None:
    """Where nobody else is left, nobody waits for the last one."""
    config = {"clients": len(names), "cohort": 2, "rounds": 100, "eval_every": 100, "round_timeout_s": 1.0}
    run = crew(**config, **HYPERNETWORK)
    for node, name in enumerate(names, start=2):
        run.join(node, name, train=1.25)
    with pytest.raises(CohortError, match=r"no usable reply in 10 rounds, giving up after round 10 .*: no reply"):
        run.run()
    assert sum(len(report.outcome.quarantined) for report in run.told.reports) == quarantined


def test_rounds_in_which_all_are_in_quarantine_do_not_hide_that_nobody_answers(crew: Callable[..., Crew]) -> None:
    run = everyone(crew(clients=2, cohort=2, rounds=100, eval_every=100, **HYPERNETWORK), *"ab")
    run.answer = {name: lambda order: RecordDict() for name in "ab"}
    with pytest.raises(CohortError, match="no usable reply in 10 rounds, giving up after round 80 "):
        run.run()  # 3 rounds, 10 of quarantine, 3, 20 of quarantine, 3, 40 of quarantine, 1


def test_who_is_late_now_and_then_stays_in(crew: Callable[..., Crew], clock: Clock) -> None:
    run = everyone(crew(clients=2, cohort=2, rounds=60, eval_every=60, round_timeout_s=1.0, **HYPERNETWORK), "a")
    times = cycle([1.25, 1.25, 0.1])
    taken: dict[str, float] = {}
    run.join(
        3,
        "slow",
        train=lambda identity: taken[identity] if identity in taken else taken.setdefault(identity, next(times)),
    )
    run.run()
    assert sum(report.seconds > 0.9 for report in run.told.reports) > 6
    assert not any(report.outcome.quarantined for report in run.told.reports)


class Said(Listener):
    """Keeps what is told of the run."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def event(self, text: str) -> None:
        self.texts.append(text)


@pytest.mark.parametrize(("asynchronous", "last"), [(False, 12), (True, 15)])  # it trains on while it is evaluated
def test_patience_counts_evaluations_and_a_tie_is_not_better(
    crew: Callable[..., Crew], asynchronous: bool, last: int
) -> None:
    config = {"rounds": 60, "eval_every": 3, "patience": 2, "asynchronous": asynchronous}
    run, said = everyone(crew(clients=2, cohort=2, **config), *"ab"), Said()
    run.accuracy = lambda name, number: {3: 4, 6: 7, 9: 7, 12: 6}.get(number, 10)
    selection = run.run(said)
    assert selection.round == 6 and [number for number, _ in run.told.selections] == [3, 6]
    assert [r.number for r in run.told.reports][-1] == last
    asked = {message.metadata.message_type for _, message in run.grid.sent}
    assert asked >= {"train", "evaluate"} and len(run.entries("evaluate", "a")) == 2 * 4
    assert said.texts == [f"validation accuracy has not become better for 2 evaluations: round {last} was the last"]


@pytest.mark.parametrize(
    ("reached", "selected"),
    [
        (["a", "abcd"], 2),  # one client of four, which is right in all, says little beside a worse mean of all
        (["abcd", "a"], 1),
        (["ab", "abcd"], 1),  # half of them do say something
        (["abcd", "ab"], 2),
    ],
)
def test_an_evaluation_that_reached_few_clients_is_not_selected_before_one_of_many(
    crew: Callable[..., Crew], reached: list[str], selected: int
) -> None:
    run = everyone(crew(clients=4, cohort=4, rounds=2, eval_every=1), *"abcd")
    run.accuracy = lambda name, number: 10 if len(reached[number - 1]) < 4 else 5

    def answer(name: str, message: Message) -> RecordDict | Error:
        unreached = (
            message.metadata.message_type == "evaluate"
            and name not in reached[unpack(EvaluateOrder, message.content).scope.round - 1]
        )
        return Error(4, "unavailable") if unreached else run.sound(name, message)

    run.answer = {name: partial(answer, name) for name in "abcd"}
    assert run.run().round == selected


def test_when_all_are_late_the_next_round_waits_for_one_of_them(crew: Callable[..., Crew], clock: Clock) -> None:
    run = crew(clients=2, cohort=2, rounds=3, eval_every=3, round_timeout_s=1.0)
    run.join(2, "a", train=4.0)
    run.join(3, "b", train=6.0)
    for name in "ab":
        clock.after(4.5, partial(run.set_pace, name, "train", 0.1))
    run.run()
    assert [sorted(report.outcome.results) for report in run.told.reports] == [[], ["a"], ["a", "b"]]
    assert sum(report.late for report in run.told.reports) == run.federation.late == 2
    assert any(event.startswith("waiting for 1 client until") for event in run.events)


@pytest.mark.parametrize("back", [True, False])
def test_a_novel_client_does_not_let_rounds_go_by_while_the_others_are_away(
    crew: Callable[..., Crew], clock: Clock, back: bool
) -> None:
    run = everyone(crew(clients=3, cohort=2, rounds=9, eval_every=9, novel=30, join_timeout_s=30.0), *"abc")

    def leave(report: Any) -> None:
        if report.number == 2:
            run.grid.leave(2), run.grid.leave(3)
            if back:
                clock.after(9.0, lambda: (run.join(2, "a"), run.join(3, "b")))

    run.told.hears = leave
    if back:
        run.run()
        assert [len(report.outcome.results) for report in run.told.reports] == [2, 2, 0, *[2] * 6]
    else:
        with pytest.raises(CohortError, match=r"^too few of the clients that are here can be trained, and no other"):
            run.run()
    assert any(text.startswith("too few of the clients that are here can be trained; waiting") for text in run.events)


def test_who_never_trains_a_model_of_its_own_has_no_score(crew: Callable[..., Crew]) -> None:
    run = everyone(crew(clients=3, cohort=2, rounds=1, eval_every=1, novel=30), *"abc")
    run.run()
    evaluation = run.told.reports[-1].outcome.evaluation
    assert evaluation is not None and list(evaluation.scores) == ["a", "b"]
    assert "novel_test_mean" not in evaluation.metrics()


def test_waiting_for_busy_clients_in_vain_says_so(crew: Callable[..., Crew]) -> None:
    run = crew(clients=2, cohort=2, rounds=3, eval_every=3, round_timeout_s=1.0, join_timeout_s=20.0)
    for node, name in ((2, "a"), (3, "b")):
        run.join(node, name, train=math.inf)
    with pytest.raises(
        CohortError, match=r"0 of 1 clients joined within 20 s \(a, b\); 2 still work on an earlier round\."
    ):
        run.run()


def test_an_error_that_comes_late_frees_its_client_and_is_no_late_reply(
    crew: Callable[..., Crew], clock: Clock
) -> None:
    run = everyone(crew(clients=2, cohort=2, rounds=40, eval_every=40, round_timeout_s=1.0), "a")
    run.join(3, "slow", train=2.0)

    def fail_once(message: Message) -> Error:
        run.answer.clear()
        run.set_pace("slow", "train", 0.1)
        return app_error("ValueError: no")

    run.answer["slow"] = fail_once
    run.run()
    assert run.federation.late == 0 and all(report.late == 0 for report in run.told.reports)
    assert any("slow" in report.outcome.results for report in run.told.reports)


def test_a_late_client_that_leaves_is_not_counted_and_may_come_back(crew: Callable[..., Crew], clock: Clock) -> None:
    run = everyone(crew(clients=2, cohort=2, rounds=60, eval_every=60, round_timeout_s=1.0), "a")
    run.join(3, "slow", train=math.inf)
    clock.after(2.0, lambda: run.grid.leave(3))
    clock.after(3.0, lambda: run.join(4, "slow"))
    run.run()
    assert run.federation.late == 0
    assert run.federation.post.busy == set()
    assert any("slow" in report.outcome.results for report in run.told.reports)


def test_elapsed_is_the_time_to_the_end_of_the_training(crew: Callable[..., Crew]) -> None:
    run = crew(clients=1, cohort=1, rounds=4, eval_every=2)
    run.join(2, "a", train=1.0, evaluate=5.0)
    run.run()
    elapsed = [report.elapsed for report in run.told.reports]
    seconds = [report.seconds for report in run.told.reports]
    assert elapsed == pytest.approx([1, 2, 8, 9], abs=0.5)
    assert seconds == pytest.approx([1, 6, 1, 6], abs=0.3)
    run.told.reports.clear()
    run.run(done=replace(NOTHING_DONE, round=3, elapsed=8.0))  # as after a checkpoint
    assert [report.elapsed for report in run.told.reports] == pytest.approx([9], abs=0.5)


# ---------------------------------------------------------------------- too few replies


@pytest.mark.parametrize(("share", "counts"), [(0.0, True), (0.5, True), (0.75, True), (0.76, False), (1.0, False)])
def test_a_round_counts_if_the_fraction_of_those_asked_answered_in_time(
    crew: Callable[..., Crew], share: float, counts: bool
) -> None:
    run = everyone(crew(clients=4, cohort=4, rounds=1, round_timeout_s=1.0, min_replies=share, **HYPERNETWORK), *"abc")
    run.join(5, "d", train=math.inf)
    play, before = run.algorithm.round, {}

    def remember(turn: Any) -> Any:
        before.update(run.state())
        return play(turn)

    run.algorithm.round = remember
    run.run()
    (report,) = run.told.reports
    if counts:
        assert list(report.outcome.results) == ["a", "b", "c"] and len(run.learned) == 3
        assert all(why.reason is Reason.BUSY for why in report.outcome.refused.values())
    else:
        assert (report.outcome.results, run.learned) == ({}, [])
        assert {name: why for name, why in report.outcome.refused.items() if name != "d"} == dict.fromkeys(
            "abc", Failure(Reason.DROPPED, "dropped: only 3 of 4 answered")
        )
        assert "d" in report.outcome.refused
    same = all(torch.equal(tensor, before[name]) for name, tensor in run.state().items())
    assert same != counts
    assert report.outcome.evaluation is not None and list(report.outcome.evaluation.scores) == ["a", "b", "c"]


@pytest.mark.parametrize(("rounds", "last"), [(100, 10), (3, 3)])
def test_ten_dropped_rounds_in_a_row_end_the_run(crew: Callable[..., Crew], rounds: int, last: int) -> None:
    """A run of fewer ends in the same way, and does not hand out what nobody has trained."""
    run = everyone(crew(clients=3, cohort=3, rounds=rounds, eval_every=rounds, min_replies=0.5), *"abc")
    run.answer |= dict.fromkeys("bc", lambda message: app_error("ValueError: no"))
    reasons = r"\(b: ValueError: no; c: ValueError: no; a: dropped: only 1 of 3 answered\)"
    with pytest.raises(
        CohortError, match=rf"^no usable reply in {last} rounds, giving up after round {last} {reasons}$"
    ) as error:
        run.run()
    assert error.value.exit_code == 4
    assert len(run.told.reports) == last and run.learned == []


def test_one_round_that_counts_starts_the_count_anew(crew: Callable[..., Crew]) -> None:
    run = everyone(crew(clients=2, cohort=2, rounds=19, eval_every=19, min_replies=1.0), *"ab")

    def all_but_the_tenth(message: Any) -> Any:
        if message.metadata.message_type == "train" and len(run.told.reports) != 9:
            return app_error("ValueError: no")
        return run.sound("b", message)

    run.answer["b"] = all_but_the_tenth
    run.run()
    assert [bool(report.outcome.results) for report in run.told.reports] == [number == 10 for number in range(1, 20)]
    assert len(run.learned) == 2


# ---------------------------------------------------------------------- rounds of several exchanges


@pytest.fixture
def twice(crew: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Crew]:
    """Return how to make a run of rounds with two exchanges, of training and of evaluation."""
    monkeypatch.setitem(STRATEGIES, "local", Twice)
    return crew


def asked(run: Crew, kind: str = "train") -> list[list[str]]:
    """Return the names of those who were asked, exchange by exchange."""
    names: list[list[str]] = [[]]
    for entry in run.entries(kind):
        if entry.what == "order" and entry.client in names[-1]:
            names.append([])
        names[-1] += [entry.client] if entry.what == "order" else []
    return names


def test_who_misses_an_exchange_is_out_of_the_next(twice: Callable[..., Crew], clock: Clock) -> None:
    run = everyone(twice(clients=4, cohort=4, rounds=1, round_timeout_s=1.0), *"ab")
    run.join(4, "slow", train=math.inf)
    run.join(5, "wrong")
    run.answer["wrong"] = lambda message: app_error("ValueError: no")
    run.run()
    (report,) = run.told.reports
    assert asked(run) == [["a", "b", "slow", "wrong"], ["a", "b"]]
    assert len(run.learned) == 2 and list(report.outcome.results) == ["a", "b"]
    assert report.outcome.refused["wrong"] == Failure(Reason.FAILED, "ValueError: no")
    assert "slow" in report.outcome.refused
    assert asked(run, "evaluate") == [["a", "b", "wrong"], ["a", "b"]]
    assert report.outcome.evaluation is not None and list(report.outcome.evaluation.scores) == ["a", "b"]


def test_a_late_reply_to_a_first_exchange_is_counted_and_dropped(twice: Callable[..., Crew], clock: Clock) -> None:
    run = everyone(twice(clients=2, cohort=2, rounds=30, eval_every=30, round_timeout_s=1.0), "a")
    run.join(3, "slow", train=2.0)
    clock.after(2.5, lambda: run.set_pace("slow", "train", 0.1))
    run.run()
    assert run.federation.late == 1
    first = run.entries("train", "slow")[1]
    assert first.what == "answer" and float(first.id[1:]) not in run.learned
    assert asked(run)[:2] == [["a", "slow"], ["a"]] and asked(run)[-2:] == [["a", "slow"]] * 2


@pytest.mark.parametrize(("share", "exchanges"), [(0.5, [["a", "b", "c"], ["a", "b"]]), (0.7, [["a", "b", "c"]])])
def test_too_few_in_an_exchange_end_the_round(
    twice: Callable[..., Crew], share: float, exchanges: list[list[str]]
) -> None:
    run = everyone(twice(clients=3, cohort=3, rounds=1, min_replies=share), *"abc")
    run.answer["c"] = lambda message: app_error("ValueError: no")
    run.run()
    (report,) = run.told.reports
    assert asked(run) == exchanges
    dropped = Failure(Reason.DROPPED, "dropped: only 2 of 3 answered")
    assert list(report.outcome.results) == (["a", "b"] if len(exchanges) == 2 else [])
    assert report.outcome.refused.get("a") == (None if len(exchanges) == 2 else dropped)


def test_who_leaves_between_two_exchanges_is_named(twice: Callable[..., Crew], clock: Clock) -> None:
    run = everyone(twice(clients=2, cohort=2, rounds=1), "a")
    run.join(3, "b", train=2.0)
    clock.after(1.0, lambda: run.grid.leave(2))  # a has answered its first order by then
    run.run()
    (report,) = run.told.reports
    assert report.outcome.refused == {"a": Failure(Reason.LEFT, "left before it was asked")}
    assert list(report.outcome.results) == ["b"]


def test_every_exchange_is_sent_slice_by_slice(twice: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MOST_AT_ONCE", 2)
    run = everyone(twice(clients=3, cohort=3, rounds=1), *"abc")
    written: list[list[str]] = []

    def watched(clients: Sequence[Client]) -> Sequence[Weights] | None:
        written.append([client.client_id for client in clients])
        return None

    run.algorithm.weights = watched
    run.run()
    assert written == [["a", "b"], ["c"]] * 4


@pytest.mark.parametrize(("strategy", "told"), [("fedavg", True), ("fedavg-ft", False), ("fedper", False)])
def test_only_a_model_that_is_scored_as_newcomers_get_it_tells_what_they_may_expect(
    strategy: str, told: bool, crew: Callable[..., Crew]
) -> None:
    """After fine-tuning a score says nothing of a machine without labels."""
    run = everyone(crew(strategy=strategy, clients=4, cohort=2, novel=25), *"abcd")
    assert (run.run().newcomers is not None) == told
