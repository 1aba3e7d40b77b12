"""Asynchronous mode over a scripted grid: staleness, places, deadlines, and evaluation while training goes on."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from flwr.app import Error
from safetensors.torch import load_file

from hyperbloom.common.errors import CohortError, ConfigError
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import EvaluateResult, TrainOrder
from hyperbloom.server.cli import main
from hyperbloom.server.loop import asynchronous
from hyperbloom.server.loop.listener import RoundReport
from hyperbloom.server.loop.post import UNREADABLE, Failure
from hyperbloom.server.runs.folder import RunFolder
from hyperbloom.strategies import STRATEGIES
from hyperbloom.strategies.exchange import Exchanges
from hyperbloom.strategies.turn import Evaluation, Turn

from ...scores import right
from ..conftest import Clock, app_error
from .crew import Crew, Entry, LoggingGrid, Twice

HYPERNETWORK = {"strategy": "pfedhn", "options": {"hidden_dim": 4, "embedding_dim": 2, "learning_rate": 0.2}}


@pytest.fixture
def crew(clock: Clock) -> Callable[..., Crew]:
    """Return how to make an asynchronous run."""
    return lambda **config: Crew(LoggingGrid(clock), clock, asynchronous=True, **config)


def assert_places(log: list[Entry], cohort: int) -> None:
    """Demand that no more than `cohort` clients train at a time, and none of them on two orders."""
    training: set[str] = set()
    for entry in log:
        if entry.what == "order":
            assert entry.client not in training, entry
            training.add(entry.client)
            assert len(training) <= cohort, entry
        else:
            training.discard(entry.client)


def staleness_of(log: list[Entry], applied: int) -> list[int]:
    """Count, for each of the first replies, those that came between its order and itself."""
    seen: dict[str, int] = {}
    found: list[int] = []
    for entry in log:
        if entry.what == "order":
            seen[entry.id] = len(found)
        elif len(found) < applied:
            found.append(len(found) - seen[entry.id])
    return found


# ---------------------------------------------------------------------- staleness


@pytest.mark.parametrize(("clients", "cohort", "seed"), [(3, 3, 0), (5, 2, 1), (6, 4, 2), (4, 1, 3)])
def test_staleness_is_what_a_walk_through_the_log_counts(
    crew: Callable[..., Crew], clients: int, cohort: int, seed: int
) -> None:
    run = crew(clients=clients, cohort=cohort, rounds=12, eval_every=12, max_staleness=1000, seed=seed)
    for index in range(clients):
        run.join(
            index + 2, f"client-{index}", train=lambda identity: Random(f"{seed} {identity}").choice([0.05, 0.5, 4.0])
        )
    run.run()
    log = run.entries("train")
    assert run.told.staleness == staleness_of(log, 12 * cohort)
    assert run.learned == [float(entry.id[1:]) for entry in log if entry.what == "answer"][: 12 * cohort]
    assert max(run.told.staleness) > 2 * cohort if cohort > 1 else set(run.told.staleness) == {0}
    assert_places(log, cohort)
    assert run.told.refused == [(12, name, "dropped: the last round was over") for _, name, _ in run.told.refused]


def slow_one(run: Crew, others: int) -> None:
    """Let client c answer each order when the others have answered so many since."""

    def pace(identity: str) -> float:
        log = run.entries("train")
        order = next(i for i, entry in enumerate(log) if entry.id == identity)
        since = sum(entry.what == "answer" for entry in log[order + 1 :])
        return 0.0 if since >= others else math.inf

    # Its node comes first in every poll, so that it answers right after the reply that it waited for.
    run.join(2, "c", train=pace)
    run.join(3, "a", train=0.1)


@pytest.mark.parametrize("others", [1, 3, 7])
def test_a_client_that_answers_after_others_is_as_stale_as_they_are_many(
    crew: Callable[..., Crew], others: int
) -> None:
    run = crew(clients=2, cohort=2, rounds=2 * (others + 1), eval_every=2 * (others + 1))
    slow_one(run, others)
    run.run()
    # a trains without a break; c's order is written when its reply before was applied.
    expected = {"a": [0], "c": [others]}
    found: dict[str, list[int]] = {"a": [], "c": []}
    answers = [entry.client for entry in run.entries("train") if entry.what == "answer"]
    for name, staleness in zip(answers, run.told.staleness, strict=False):
        found[name].append(staleness)
    assert set(found["c"]) == set(expected["c"]) and len(found["c"]) >= 3
    assert set(found["a"]) <= {0, 1} and found["a"].count(1) <= len(found["c"])


@pytest.mark.parametrize(("others", "limit"), [(3, 3), (4, 3), (9, 3), (2, 1)])
def test_beyond_the_limit_a_reply_is_dropped_named_and_its_client_gets_new_work_at_once(
    crew: Callable[..., Crew], others: int, limit: int
) -> None:
    run = crew(clients=2, cohort=2, rounds=12, eval_every=12, max_staleness=limit)
    slow_one(run, others)
    run.run()
    log = run.entries("train")
    answers = [i for i, entry in enumerate(log) if entry.client == "c" and entry.what == "answer"]
    learned = {f"m{int(loss)}" for loss in run.learned}
    assert [log[i].id in learned for i in answers] == [others <= limit] * len(answers)
    why = f"staleness {others} is over the limit of {limit}"
    assert bool([name for _, name, reason in run.told.refused if (name, reason) == ("c", why)]) == (others > limit)
    for i in answers[:-1]:
        assert next(entry.what for entry in log[i + 1 :] if entry.client == "c") == "order"
        assert not [entry for entry in log[i + 1 : i + 3] if entry.what == "answer" and entry.client == "a"][1:]
    assert max(run.told.staleness) <= limit
    assert len(run.learned) == 24
    assert_places(log, 2)


def test_the_limit_is_twenty_cohorts_if_none_is_set(crew: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch) -> None:
    assert asynchronous.STALENESS_PER_COHORT == 20
    monkeypatch.setattr(asynchronous, "STALENESS_PER_COHORT", 4)  # twenty take long to be reached
    for others, dropped in ((8, False), (9, True)):
        run = crew(clients=2, cohort=2, rounds=12, eval_every=12)
        slow_one(run, others)
        run.run()
        assert bool([1 for _, _, why in run.told.refused if "staleness" in why]) == dropped


def test_a_run_applies_as_many_replies_as_one_by_rounds_and_reports_them_all(crew: Callable[..., Crew]) -> None:
    """All answer in the same poll, and more of them than the last round has places for."""
    run = crew(clients=5, cohort=5, rounds=3, eval_every=1, **HYPERNETWORK)
    states = []
    run.told.hears = lambda report: states.append(run.state())
    for index in range(5):
        run.join(index + 2, f"client-{index}", train=0.1 if index < 3 else 0.15)
    run.run()
    assert (len(run.learned), len(run.told.staleness)) == (15, 15)
    assert [report.outcome.evaluation is not None for report in run.told.reports].count(True) == 3
    last = next(i for i, r in enumerate(run.told.reports) if r.number == 3 and r.outcome.results)
    for name, tensor in run.state().items():
        assert torch.equal(tensor, states[last][name]), name


# ---------------------------------------------------------------------- places


def test_the_place_of_a_client_that_leaves_is_filled(crew: Callable[..., Crew], clock: Clock) -> None:
    run = crew(clients=3, cohort=2, rounds=6, eval_every=6)
    for node, name in ((2, "a"), (3, "b"), (4, "c")):
        run.join(node, name, train=0.5)
    run.set_pace("a", "train", math.inf)
    clock.after(3.0, lambda: run.grid.leave(2))
    run.run()
    log = run.entries("train")
    (order,) = [entry for entry in log if entry.client == "a"]  # it had one, as it never answered it
    assert order.what == "order"
    assert [(name, why) for _, name, why in run.told.refused if name == "a"] == [("a", "no reply")]
    assert "a left" in run.events
    # While a was there it held a place; afterwards two train at a time again.
    both = [log[i : i + 2] for i in range(len(log) - 1) if log[i].what == log[i + 1].what == "order"]
    assert [entry.client for entry in both[-1]] in (["b", "c"], ["c", "b"])
    assert len(run.learned) == 12
    assert_places([entry for entry in log if entry.client != "a"], 2)


def test_a_client_that_comes_late_gets_a_free_place(crew: Callable[..., Crew], clock: Clock) -> None:
    run = crew(clients=1, cohort=2, rounds=10, eval_every=10)
    run.join(2, "a", train=0.2)
    clock.after(1.5, lambda: run.join(3, "b", train=0.2))
    run.run()
    learned = [entry.client for entry in run.entries("train") if entry.what == "answer"]
    assert set(learned[:4]) == {"a"} and learned.count("b") >= 5
    assert_places(run.entries("train"), 2)


def test_an_overdue_order_is_given_up_and_its_late_reply_is_counted_and_dropped(
    crew: Callable[..., Crew], clock: Clock, tmp_path: Path
) -> None:
    run = crew(clients=3, cohort=2, rounds=40, eval_every=40, round_timeout_s=2.0)
    for node, name in ((2, "a"), (3, "b"), (4, "slow")):
        run.join(node, name, train=0.2)
    run.set_pace("slow", "train", 5.0)
    clock.after(9.0, lambda: run.set_pace("slow", "train", 0.2))
    run.run(RunFolder(tmp_path, run.config, "run-1"))
    log = run.entries("train")
    assert_places([entry for entry in log if entry.client == "slow"], 1)  # never asked while it works
    others = [entry for entry in log if entry.client != "slow"]
    assert_places(others, 2)
    assert [1 for a, b in itertools.pairwise(others) if a.what == b.what == "order"]  # its place was filled
    late = [
        entry.id for entry in log if entry.client == "slow" and entry.what == "answer" and _took(run, entry.id) > 2.0
    ]
    assert len(late) == 2
    assert not {float(identity[1:]) for identity in late} & set(run.learned)
    assert [report.late for report in run.told.reports if report.late] == [1, 1]
    assert run.events.count("slow answered after the deadline; its reply is dropped") == 2
    assert [(name, why) for _, name, why in run.told.refused][:2] == [("slow", "no reply")] * 2
    prompt = [entry.id for entry in log if entry.client == "slow" and entry.what == "answer" and entry.id not in late]
    assert prompt and float(prompt[0][1:]) in run.learned  # and it takes part again
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("late", 0) for line in lines) == 2
    assert all("staleness_mean" in line and "staleness_max" in line for line in lines if line["clients"])


def _took(run: Crew, identity: str) -> float:
    """Return the seconds between an order and its answer, by the clock of the test."""
    sent = next(moment for moment, message in run.grid.sent if message.metadata.message_id == identity)
    return run.grid.answered[identity] - sent


def test_lies_that_come_late_are_reported_and_lead_to_quarantine(crew: Callable[..., Crew]) -> None:
    run = crew(clients=2, cohort=2, rounds=40, eval_every=40, round_timeout_s=1.0)
    run.join(2, "a", train=0.2)
    run.join(3, "liar", train=2.0)
    run.answer["liar"] = lambda message: Error(UNREADABLE, "it was never uploaded")
    run.run()
    lies = [r for r in run.told.reports if r.outcome.lied]
    assert len(lies) >= 3 and run.federation.late == 0
    assert all(r.outcome.refused["liar"] == Failure(Reason.CONTENT, "it was never uploaded") for r in lies)
    last = lies[2]
    assert last.outcome.quarantined == {"liar": last.number + 10}
    why = "another reply was refused for its content (it was never uploaded)"
    assert run.events[0] == f"liar is in quarantine until after round {last.number + 10}: {why}"
    after = [r for r in run.told.reports if last.number < r.number <= last.number + 10]
    assert not any("liar" in r.outcome.refused for r in after)


def test_replies_without_use_in_a_row_end_the_run(crew: Callable[..., Crew]) -> None:
    run = crew(clients=2, cohort=2, rounds=100, eval_every=100)
    for node, name in ((2, "a"), (3, "b")):
        run.join(node, name)
        run.answer[name] = lambda message: app_error("ValueError: the disk is full")
    with pytest.raises(CohortError, match=r"no usable reply among the last 20 .*a: ValueError: the disk is full") as e:
        run.run()
    assert e.value.exit_code == 4
    assert sum(entry.what == "answer" for entry in run.entries("train")) == 20


def test_one_client_that_always_fails_at_once_does_not_end_the_run(crew: Callable[..., Crew]) -> None:
    """Its place goes back to nobody else, as all others are busy: it waits for one of them before it is asked again."""
    run = crew(clients=4, cohort=4, rounds=3, eval_every=3)
    run.join(2, "bad", train=0.01)
    run.answer["bad"] = lambda message: app_error("RuntimeError: its own model fails")
    for node, name, seconds in ((3, "a", 3.0), (4, "b", 3.7), (5, "c", 4.3)):
        run.join(node, name, train=seconds)
    run.run()
    assert len(run.learned) == 12
    answers = [entry.client for entry in run.entries("train") if entry.what == "answer"]
    assert "bad" in answers[5:] and answers.count("bad") <= 12


def test_a_useful_reply_now_and_then_is_enough(crew: Callable[..., Crew]) -> None:
    run = crew(clients=1, cohort=1, rounds=3, eval_every=3)
    run.join(2, "a")
    count = iter(range(1000))
    broken = app_error("ValueError: no")
    run.answer["a"] = lambda message: run.sound("a", message) if next(count) % 10 == 9 else broken
    run.accuracy = lambda name, number: 5
    with pytest.raises(CohortError, match="no round can be selected: in none was the selecting metric known"):
        run.run()  # its scores are errors, too; but all rounds were
    assert len(run.learned) == 3


def test_a_node_that_cannot_be_reached_any_more_is_not_asked_again_and_again(
    crew: Callable[..., Crew], clock: Clock
) -> None:
    """It is gone, and the next look at who is there is half a second away: the others are waited for."""
    run = crew(clients=2, cohort=2, rounds=4, eval_every=4)
    run.join(2, "a", train=0.3)
    run.join(3, "b", train=0.3)

    def vanish() -> None:
        run.grid.unreachable.add(3)
        run.grid.leave(3)

    orders = iter(range(100))
    push = run.grid.push_messages

    def push_and_vanish(messages: Any) -> Any:
        # Just before the second hand-out, so that the order to b cannot be pushed.
        if [m for m in messages if m.metadata.message_type == "train"] and next(orders) == 1:
            vanish()
        return push(messages)

    run.grid.push_messages = push_and_vanish  # type: ignore[method-assign]
    run.run()
    tried = [m for _, m in run.grid.sent if m.metadata.message_type == "train" and m.metadata.dst_node_id == 3]
    assert len(tried) == 2  # one that it answered, one that it could not get
    assert len(run.learned) == 8


def test_an_order_that_is_open_at_the_end_is_nobody_elses(crew: Callable[..., Crew]) -> None:
    """A baseline would learn from its answer, as if it had asked."""
    run = crew(clients=2, cohort=2, rounds=40, eval_every=1, patience=1, gains=False)
    run.join(2, "a", train=3.0)
    run.join(3, "b", train=2.0)
    run.run()
    assert run.federation.post.busy and not run.federation.post.open(TrainOrder)
    run.clock.sleep(30.0)
    assert run.federation.poll() == [] and run.federation.late > 0


def test_clients_that_have_nothing_to_learn_are_not_waited_for_for_ever(
    crew: Callable[..., Crew], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = crew(clients=2, cohort=1, rounds=4, eval_every=4, join_timeout_s=30.0)
    run.join(2, "old", train=100.0)
    # As with a frozen hypernetwork that knows who is on the first row.
    monkeypatch.setattr(run.algorithm, "trains", lambda client: client.client_id != "old")
    clock.after(20.0, lambda: run.join(3, "novel", train=1.0))
    clock.after(22.5, lambda: run.grid.leave(3))
    with pytest.raises(CohortError, match="too few of the clients that are here can be trained, and no other"):
        run.run()
    assert len(run.learned) == 2
    assert 52 < clock.passed < 53


# ---------------------------------------------------------------------- evaluation


def test_training_goes_on_while_an_evaluation_waits_and_the_state_of_the_asking_is_selected(
    crew: Callable[..., Crew], tmp_path: Path
) -> None:
    run = crew(clients=3, cohort=2, rounds=40, eval_every=20, **HYPERNETWORK)
    for node, name in ((2, "a"), (3, "b"), (4, "slow")):
        run.join(node, name, train=0.1)
    run.set_pace("slow", "evaluate", 1.0)
    run.accuracy = lambda name, number: 9 if number == 20 else 3
    states: dict[int, dict[str, torch.Tensor]] = {}
    at_conclusion: list[dict[str, torch.Tensor]] = []

    def hears(report: RoundReport) -> None:
        if report.outcome.evaluation:
            at_conclusion.append(run.state())
        else:
            states[report.number] = run.state()

    run.told.hears = hears
    selection = run.run(RunFolder(tmp_path, run.config, "run-1"))
    numbers = [(report.number, report.outcome.evaluation is not None) for report in run.told.reports]
    assert numbers.index((20, True)) > numbers.index((22, False))  # rounds came in between
    evaluation = next(r.outcome.evaluation for r in run.told.reports if r.number == 20 and r.outcome.evaluation)
    assert evaluation is not None and list(evaluation.scores) == ["a", "b", "slow"]
    assert selection.round == 20 and selection.metrics["test_mean"] == 90

    asked = next(i for i, entry in enumerate(run.grid.log) if entry.kind == "evaluate")
    done = next(i for i, e in enumerate(run.grid.log) if (e.what, e.kind, e.client) == ("answer", "evaluate", "slow"))
    meanwhile = [e for e in run.grid.log[asked:done] if (e.what, e.kind) == ("answer", "train")]
    assert len(meanwhile) >= 4 and {float(e.id[1:]) for e in meanwhile} < set(run.learned)

    ((number, selected),) = run.told.selections
    stored = load_file(tmp_path / "hypernetwork.safetensors")
    assert number == 20 and selected.keys() == stored.keys() == states[20].keys()
    for name, tensor in states[20].items():
        assert torch.equal(tensor, selected[name]) and torch.equal(tensor, stored[name]), name
    assert not torch.equal(at_conclusion[0]["embeddings"], stored["embeddings"])
    for name, tensor in run.state().items():
        assert torch.equal(tensor, states[40][name]), name


def test_what_is_evaluated_was_generated_when_it_was_asked_for(crew: Callable[..., Crew]) -> None:
    run = crew(clients=3, cohort=1, rounds=4, eval_every=2, **HYPERNETWORK)
    generated: dict[int, torch.Tensor] = {}

    def hears(report: RoundReport) -> None:
        models = run.algorithm.personal(list(run.roster))
        generated.setdefault(report.number, torch.stack([weights.values for weights in models]))

    run.told.hears = hears
    for node, name in ((2, "a"), (3, "b"), (4, "c")):
        run.join(node, name, evaluate=1.0)
    run.run()
    sent = [message for _, message in run.grid.sent if message.metadata.message_type == "evaluate"]
    values = [dict(message.content["hyperbloom"])["values"] for message in sent]
    assert values == [row.numpy().tobytes() for number in (2, 4) for row in generated[number]]


def test_scores_that_everyone_works_on_are_waited_for_not_lost(crew: Callable[..., Crew]) -> None:
    """Nobody trains, as all are at their evaluation; that is no reason to wait for others to join."""
    run = crew(clients=3, cohort=1, rounds=4, eval_every=1)
    for node, name in ((2, "a"), (3, "b"), (4, "c")):
        run.join(node, name, evaluate=0.5)
    run.run()
    scores = {r.number: list(r.outcome.evaluation.scores) for r in run.told.reports if r.outcome.evaluation}
    assert scores == {number: ["a", "b", "c"] for number in range(1, 5)}
    assert run.told.refused == [] and run.events == []


def test_an_evaluation_that_is_due_waits_for_the_one_before(crew: Callable[..., Crew]) -> None:
    run = crew(clients=3, cohort=2, rounds=6, eval_every=1)
    for node, name in ((2, "a"), (3, "b"), (4, "slow")):
        run.join(node, name, train=0.1)
    run.set_pace("slow", "evaluate", 3.0)
    run.run()
    log = run.entries("evaluate")
    assert [entry.what for entry in log] == (["order"] * 3 + ["answer"] * 3) * 6
    evaluated = [r.number for r in run.told.reports if r.outcome.evaluation]
    assert evaluated == [1, 2, 3, 4, 5, 6]
    # What came while it was waited for is in the reports, too.
    assert len(run.told.staleness) == len(run.learned) == 12


def test_who_could_not_be_evaluated_is_named_with_that_evaluation(crew: Callable[..., Crew], clock: Clock) -> None:
    run = crew(clients=4, cohort=1, rounds=2, eval_every=2, round_timeout_s=5.0)
    for node, name in ((2, "a"), (3, "bad"), (4, "gone"), (5, "slow")):
        run.join(node, name)
    run.set_pace("gone", "evaluate", math.inf)
    run.set_pace("slow", "evaluate", 50.0)
    run.told.hears = lambda report: None if report.outcome.evaluation else ready(report.number)

    def ready(number: int) -> None:
        if number == 2:
            run.answer["bad"] = lambda message: app_error("ValueError: no")
            clock.after(2.0, lambda: run.grid.leave(4))

    run.run()
    report = run.told.reports[-1]
    assert report.number == 2 and report.outcome.evaluation is not None
    assert list(report.outcome.evaluation.scores) == ["a"]
    assert report.outcome.refused == {
        "bad": Failure(Reason.FAILED, "ValueError: no"),
        "gone": Failure(Reason.NO_REPLY, "no reply"),
        "slow": Failure(Reason.NO_REPLY, "no reply"),
    }


def test_an_evaluation_may_have_several_exchanges_and_who_leaves_between_them_is_named(
    crew: Callable[..., Crew], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STRATEGIES, "local", Twice)
    run = crew(clients=3, cohort=1, rounds=2, eval_every=2)
    run.join(2, "a", evaluate=1.0)
    run.join(3, "b")
    run.join(4, "goes", train=math.inf)
    run.told.hears = lambda report: None if report.outcome.evaluation else leave(report.number)

    def leave(number: int) -> None:
        if number == 2:
            run.set_pace("goes", "train", 0.0)  # it has answered when it leaves, and a has not
            clock.after(0.5, lambda: run.grid.leave(4))

    run.run()
    report = run.told.reports[-1]
    assert report.outcome.evaluation is not None and list(report.outcome.evaluation.scores) == ["a", "b"]
    assert report.outcome.refused == {"goes": Failure(Reason.LEFT, "left before it was asked")}
    assert [entry.client for entry in run.entries("evaluate") if entry.what == "order"] == ["a", "b", "goes", "a", "b"]


def test_an_evaluation_that_asks_nobody_is_over_at_once(
    crew: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = crew(clients=1, cohort=1, rounds=2, eval_every=1)
    run.join(2, "a")
    scores = {"a": EvaluateResult(right(5, 10, 1.0), right(5, 10, 1.0))}

    def known(turn: Turn, clients: object) -> Exchanges[Evaluation]:
        return Evaluation(scores)
        yield

    monkeypatch.setattr(run.algorithm, "evaluate", known)
    assert run.run().metrics["test_mean"] == 50
    assert [r.number for r in run.told.reports if r.outcome.evaluation] == [1, 2]


def test_an_evaluation_that_nobody_answers_is_reported_and_at_last_ends_the_run(crew: Callable[..., Crew]) -> None:
    run = crew(clients=2, cohort=1, rounds=4, eval_every=2)
    for node, name in ((2, "a"), (3, "b")):
        run.join(node, name)

    def no_scores(name: str) -> Any:
        error = app_error("ValueError: no scores")
        return lambda message: run.sound(name, message) if message.metadata.message_type == "train" else error

    run.answer |= {name: no_scores(name) for name in "ab"}
    with pytest.raises(CohortError, match="no round can be selected: in none was the selecting metric known"):
        run.run()
    expected = [(number, name, "ValueError: no scores") for number in (2, 4) for name in "ab"]
    assert sorted(run.told.refused) == expected


# ---------------------------------------------------------------------- baselines, settings


def test_a_baseline_that_learns_from_whole_rounds_goes_by_rounds(tmp_path: Path) -> None:
    brief = ["--set", "local.steps=3", "--set", "data.max_train=60", "--set", "hidden_dim=8", "--cohort", "2"]
    brief += ["--engine", "inline", "--clients", "3", "--rounds", "4", "--eval-every", "2", "--baselines"]
    brief += ["fedavg,local", "--set", "local.schedule=constant"]
    for mode in ("false", "true"):
        assert main([*brief, "--set", f"asynchronous={mode}", "--run-dir", str(tmp_path / mode)]) == 0
    name = "baselines/fedavg/hypernetwork-last.safetensors"
    assert (tmp_path / "true" / name).read_bytes() == (tmp_path / "false" / name).read_bytes()
    for folder, stale in (("", True), ("baselines/local", True), ("baselines/fedavg", False)):
        lines = [json.loads(line) for line in (tmp_path / "true" / folder / "metrics.jsonl").read_text().splitlines()]
        assert any("staleness_mean" in line for line in lines) == stale, folder
        assert [line["round"] for line in lines if "test_mean" in line] == [2, 4]


def test_fedavg_is_refused_in_one_line_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--engine", "inline", "--strategy", "fedavg", "--set", "asynchronous=true"]
    assert main([*flags, "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "asynchronous: fedavg learns from whole rounds; set it to false" in said[0]
    assert not (tmp_path / "run").exists()


def test_quarantines_of_all_clients_end(crew: Callable[..., Crew]) -> None:
    run = crew(clients=2, cohort=2, rounds=3, eval_every=3, join_timeout_s=60.0)
    for node, name in ((2, "a"), (3, "b")):
        run.join(node, name)
        count = iter(range(1000))

        def answer(message: Any, count: Any = count, name: str = name) -> Any:
            return Error(UNREADABLE, "never uploaded") if next(count) < 3 else run.sound(name, message)

        run.answer[name] = answer
    run.run()
    assert len(run.learned) == 6


def test_who_always_lies_ends_it(crew: Callable[..., Crew]) -> None:
    run = crew(clients=2, cohort=2, rounds=3, eval_every=3, join_timeout_s=60.0)
    for node, name in ((2, "a"), (3, "b")):
        run.join(node, name)
        run.answer[name] = lambda message: Error(UNREADABLE, "never uploaded")
    with pytest.raises(CohortError, match="no usable reply among the last 20"):
        run.run()


def test_an_evaluation_that_is_no_exchange_is_told_to_the_strategys_author(crew: Callable[..., Crew]) -> None:
    run = crew(clients=1, cohort=1, rounds=1)
    run.join(2, "a", train=0.1)
    run.algorithm.evaluate = lambda turn, clients: None
    with pytest.raises(ConfigError, match="expected a strategy's exchanges"):
        run.run()
