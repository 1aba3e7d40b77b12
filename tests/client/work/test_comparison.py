"""A client compares its models with one that it trains alone, tells its user, and the server if the user wishes."""

import dataclasses
import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work import comparison
from hyperbloom.client.work.scoring import score_of
from hyperbloom.common.config import LocalConfig
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import HyperbloomError, WireError
from hyperbloom.common.gains import MIXTURES
from hyperbloom.common.layout import Weights
from hyperbloom.common.methods import Ditto
from hyperbloom.common.models import first_values, full_layout, head_layout
from hyperbloom.common.tasks import TaskSpec, make_task
from hyperbloom.common.wire.orders import SGD, CompareOrder, CompareResult, EvaluateOrder, TrainOrder

from ..conftest import SHARE
from ..orders import BODY, COMMON, FULL, SPEC, STEPS, Worker, arrange, change, train_order
from .own import ordered

SOUND = Weights(FULL, first_values(SPEC, FULL, 3))
USELESS = Weights(FULL, torch.zeros(FULL.numel))


def order(**changes: Any) -> CompareOrder:
    sgd = SGD(**{**STEPS, "learning_rate": 0.01})
    values = {**COMMON, "private": "none", "weights": SOUND, "metrics": ("accuracy",), "sgd": sgd, "rounds": 5}
    values |= {"decays": False}
    return arrange(CompareOrder, **(values | changes))


def disclosing(worker: Worker) -> Worker:
    return Worker(dataclasses.replace(worker.settings, disclose_gain=True))


@pytest.mark.parametrize("decays", [False, True])
def test_alone_is_what_the_strategy_local_trains_to_the_bit(make_worker: Callable[..., Worker], decays: bool) -> None:
    """No step of the server's useless model helps at a rate of 0.01; nor is it better than zeros to begin with."""
    worker, local = disclosing(make_worker("ward-7")), make_worker("ward-7")
    asked = order(weights=USELESS, rounds=30, decays=decays)
    schedule = LocalConfig(learning_rate=asked.sgd.learning_rate, schedule="cosine" if decays else "constant")
    result = worker.answer(asked)
    assert result.gain is not None and result.gain.chosen == "alone"
    assert (result.gain.value, result.gain.low, result.gain.high) == (0, 0, 0)
    values, facts = worker.state.load_scored("run-1")
    target = dataclasses.replace(asked.target, private="all")
    trained = []
    for number in range(1, 30 + 10 + 1):  # as often as in the run, and as long as a model is fine-tuned
        scope = dataclasses.replace(asked.scope, run_id="local", round=number)
        sgd = dataclasses.replace(asked.sgd, learning_rate=schedule.rate(number, 30 + 10))
        local.answer(TrainOrder(scope, target, sgd, "nothing"))
        trained.append(local.state.load_personal(scope, FULL)[0])  # type: ignore[index]
    kept = FULL.flatten(values)
    assert any(torch.equal(kept, each) for each in trained)
    assert facts.gain.startswith("ward-7: keep training alone") and facts.private == "all"


def test_a_gain_is_told_to_the_user_and_to_the_server_only_if_the_user_wishes(
    make_worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    worker = make_worker("ward-7")
    silent = worker.answer(order())
    assert isinstance(silent, CompareResult) and silent.gain is None
    assert [line for line in caplog.messages if "train" in line and "ward-7" not in line]
    told = disclosing(worker).answer(order())
    mixed = {"personal+tuned:0.25", "personal+tuned:0.5", "personal+tuned:0.75"}
    assert told.gain is not None and set(told.gain.models) == {"personal", "tuned", "alone", *mixed}
    assert (told.val, told.test) == (silent.val, silent.test)
    told.check()
    for most, allowed in ((5, False), (6, True)):  # the scores of six models
        bounded = Worker(dataclasses.replace(disclosing(worker).settings, max_scores=most))
        with nullcontext() if allowed else pytest.raises(HyperbloomError, match=f"its user allows {most}"):
            bounded.answer(order())


def test_the_best_on_validation_examples_is_kept_and_its_gain_is_on_test_examples(
    make_worker: Callable[..., Worker],
) -> None:
    worker = disclosing(make_worker("ward-7"))
    trained = worker.answer(order(rounds=400, weights=USELESS))  # alone, for long
    assert trained.gain is not None and trained.gain.chosen == "alone"
    values, _ = worker.state.load_scored("run-1")
    good = Weights(FULL, FULL.flatten(values))
    found = worker.answer(order(weights=good, rounds=1))
    assert found.gain is not None and found.gain.chosen == "personal"
    of = dict(zip(found.gain.models, found.gain.test, strict=True))
    assert found.gain.value == pytest.approx(of["personal"] - of["alone"]) and found.gain.low <= found.gain.value
    assert found.gain.low > 0  # a digit is read by chance, or not
    kept, facts = worker.state.load_scored("run-1")
    assert torch.equal(FULL.flatten(kept), good.values) and "gains" in facts.gain


@pytest.mark.parametrize("decays", [False, True])
def test_runs_of_the_same_length_share_what_a_client_trains_alone(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, decays: bool
) -> None:
    """For a run of 9 rounds, then of 11, then its baseline: every answer is that of a process that was asked once."""
    worker, trained, train = disclosing(make_worker("ward-7")), list[int](), comparison.train
    monkeypatch.setattr(comparison, "train", lambda *args: trained.append(args[3]) or train(*args))
    for rounds, tuned, alone in ((9, 9, range(1, 19)), (11, 10, range(1, 22)), (11, 10, range(0))):
        asked = order(rounds=rounds, decays=decays)
        trained.clear()
        found = worker.answer(asked)
        assert len(trained) == tuned + len(alone)  # alone, no fewer steps in all than the model that is fine-tuned
        assert trained[tuned:] == [worker.seed(asked.scope, number) for number in alone]
        assert found == disclosing(make_worker("ward-7")).answer(asked)


def test_alone_the_first_rounds_are_scored_then_four_of_each_doubling_and_the_last(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, scored, evaluate = list[int](), list[int](), comparison.evaluate
    monkeypatch.setattr(comparison, "train", lambda *args: trained.append(1) or 1.0)
    monkeypatch.setattr(comparison, "evaluate", lambda *args: scored.append(len(trained)) or evaluate(*args))
    comparison._alone(make_worker("ward-7"), order(), 21)
    assert scored == [*range(8), 8, 10, 12, 14, 16, 20, 21]


@pytest.mark.parametrize(
    "changes",
    [{"seed": 6}, {"sgd": SGD(**STEPS)}, {"decays": True}, {"rounds": 6}, {"metrics": ("balanced-accuracy",)}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_run_of_another_kind_has_a_client_train_alone_anew(
    make_worker: Callable[..., Worker], changes: dict[str, Any]
) -> None:
    worker, fresh = disclosing(make_worker("ward-7")), disclosing(make_worker("ward-7"))
    worker.answer(order())
    assert worker.answer(order(**changes)) == fresh.answer(order(**changes))
    assert torch.equal(alone_of(worker), alone_of(fresh))


def test_who_trains_alone_does_not_refine(make_worker: Callable[..., Worker]) -> None:
    """Or it would be compared with more than training alone, of which no strategy is told."""
    refines, plain = (disclosing(make_worker("ward-7")) for _ in range(2))
    refines.answer(order(epochs=3, rate=0.1, batch=8, rounds=1))
    plain.answer(order(rounds=1))
    assert torch.equal(alone_of(refines), alone_of(plain))


def alone_of(worker: Worker) -> torch.Tensor:
    """Return the weights of the model that a client has trained alone."""
    assert worker.lone is not None
    return FULL.flatten(worker.lone[1].tensors)


@pytest.mark.parametrize("model", ["mlp", "hafl-1"])
def test_mixtures_lie_between_their_models(make_worker: Callable[..., Worker], model: str) -> None:
    """Their weights are interpolated, and scored as any others are, by running statistics of their own."""
    worker, spec = disclosing(make_worker("ward-7", size="S")), replace(SPEC, name=model, size="S")
    layout, named = full_layout(spec), COMMON | {"model": model}
    sound, common = (Weights(layout, first_values(spec, layout, seed)) for seed in (3, 4))
    trials = dict(comparison._trials(worker, order(model=model, weights=sound, common=common)))
    assert torch.equal(layout.flatten(trials["common"].tensors), common.values)
    for name, (first, second, share) in MIXTURES.items():
        ends = [layout.flatten(trials[end].tensors) for end in (first, second)]
        found = layout.flatten(trials[name].tensors)
        torch.testing.assert_close(found, (1 - share) * ends[0] + share * ends[1])
        scored = worker.answer(arrange(EvaluateOrder, **named, private="none", weights=Weights(layout, found)))
        assert (scored.val.loss, scored.test.values) == (trials[name].val.loss, trials[name].test.values)


def test_a_copy_is_tuned_from_its_own_values_and_the_model_for_all_from_those_that_were_sent(
    make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """As clients of Ditto have one. Each is tuned as weights are that a server sends to a client without a copy."""
    worker = make_worker("ward-7")
    plain = Worker(replace(worker.settings, state_dir=tmp_path / "plain"))
    worker.answer(train_order("copy", method=Ditto(lamda=1.0), weights=SOUND, steps=20))
    asked = order(rounds=2, sgd=SGD(**STEPS))
    kept = worker.state.load_personal(asked.scope, FULL)
    assert kept is not None and not torch.allclose(kept[0], SOUND.values, atol=1e-3)

    def weights(worker: Worker, asked: CompareOrder) -> dict[str, torch.Tensor]:
        return {name: FULL.flatten(each.tensors) for name, each in comparison._trials(worker, asked)}

    trials = weights(worker, change(asked, private="copy"))
    assert torch.equal(trials["personal"], kept[0]) and torch.equal(trials["common"], SOUND.values)
    for name, start in (("tuned", kept[0]), ("common-tuned", SOUND.values)):
        tuned = weights(plain, replace(asked, weights=Weights(FULL, start)))["tuned"]
        assert torch.equal(trials[name], tuned) and not torch.equal(tuned, start)


def test_what_python_says_of_a_failing_model_stays_on_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> float:
        raise RuntimeError("secret_layer is in training")

    monkeypatch.setattr(comparison, "train", fail)
    worker = Worker(ClientSettings("ward-7", SHARE, "cpu", "S", tmp_path / "ward-7", model="plain-4"))
    with pytest.raises(HyperbloomError, match=r"^the client's own model fails; .* server.log in the run folder$"):
        worker.answer(order(**ordered()))
    assert "secret_layer is in training" in caplog.text


@pytest.mark.parametrize(
    ("losses", "right", "chosen"),
    [
        ((0.5, 0.5), 6, "personal"),
        ((0.0, 1.3), 6, "personal"),  # smaller by 0.35, of standard error sqrt(0.65^2 / 11) = 0.196
        ((0.0, 1.39), 6, "alone"),  # by 0.305, of 0.21; divided by 12 in place of 11 it would be 0.201
        ((1.0, 1.0), 12, "alone"),  # no smaller loss
        ((0.5, 0.5), 5, "alone"),  # worse by the metric
    ],
)
def test_a_model_is_chosen_only_if_its_loss_is_surely_smaller_on_validation_examples_and_its_metric_no_worse(
    losses: tuple[float, float], right: int, chosen: str
) -> None:
    data = Examples(torch.zeros(12, 1), torch.zeros(12, dtype=torch.long))

    def trial(right: int, losses: tuple[float, float]) -> Any:
        answers = torch.tensor([[1.0, 0.0]] * right + [[0.0, 1.0]] * (12 - right))
        score = score_of(data, answers, 2, sum(losses) / 2, ("accuracy",), disclose=False)
        return SimpleNamespace(losses=torch.tensor(losses * 6).double(), val=score)

    trials = {"personal": trial(right, losses), "tuned": trial(12, (2.0, 2.0)), "alone": trial(6, (1.0, 1.0))}
    assert comparison._choose(trials, "accuracy") == chosen


@pytest.mark.parametrize(
    ("metric", "mine", "alone", "gains"),
    [
        ("rmse", (1.0, 1.0), (3.0, 3.0), 2.0),
        ("mae", (1.0, 2.0), (2.0, 4.0), 1.5),
        ("r2", (0.0, 0.0), (1.0, 1.0), 1.0),
        ("mae", (2.0, 2.0), (0.0, 3.5), None),  # its loss is surely smaller, and its error on average larger
    ],
)
def test_of_errors_less_is_a_gain(
    metric: str, mine: tuple[float, float], alone: tuple[float, float], gains: float | None
) -> None:
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0] * 60)
    data = Examples(torch.zeros(240, 1), signs, make_task(TaskSpec("regression")))

    def trial(errors: tuple[float, float]) -> Any:
        answers = signs[:, None] + torch.tensor(errors * 120)[:, None]
        losses = (answers - signs[:, None]).double().square().sum(1) / 2
        score = score_of(data, answers, 1, float(losses.mean()), (metric,), disclose=False)
        return SimpleNamespace(losses=losses, val=score, test=score, answers=[answers, answers], outputs=1)

    found = comparison._gain({"personal": trial(mine), "alone": trial(alone)}, data, metric)
    assert found is not None and found.models == ("personal", "alone")
    if gains is None:
        assert (found.chosen, found.value, found.low, found.high) == ("alone", 0, 0, 0)
    else:
        assert found.chosen == "personal" and found.value == pytest.approx(gains)
        assert 0 < found.low <= found.value + 1e-6 and found.value - 1e-6 <= found.high < 2 * gains


@pytest.mark.parametrize("metric", ["dice", "iou", "accuracy"])
def test_counts_of_single_masks_give_the_interval_of_all_pixels(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another way: `measure` on the pixels of each resample."""
    monkeypatch.setattr(comparison, "RESAMPLES", 50)
    draw = torch.Generator().manual_seed(0)
    masks, right, wrong = (torch.randint(0, 3, (9, 4, 5), generator=draw) for _ in range(3))
    data = Examples(torch.zeros(9, 1, 4, 5), masks, task := make_task(TaskSpec("segmentation")))
    assert metric in task.metrics
    trials = [SimpleNamespace(answers=[None, answers], outputs=3) for answers in (right, wrong)]
    counted = comparison._bounds(*trials, data, metric)

    def gained(rows: Any) -> float:
        some = torch.from_numpy(rows)
        values = [task.measure(each[some], masks[some], 3, (metric,)).values[metric] for each in (right, wrong)]
        return values[0] - values[1]

    assert counted == pytest.approx(comparison.interval(gained, 9, 50))


@pytest.mark.parametrize("metric", ["accuracy", "auroc"])
def test_rows_of_a_group_count_as_one(metric: str) -> None:
    """Each example four times, in any order, says as much as once."""
    draw = torch.Generator().manual_seed(0)
    labels, order = torch.arange(20) % 2, torch.randperm(80, generator=draw)
    mine, alone = (torch.randn(20, 2, generator=draw) for _ in range(2))
    once = Examples(torch.randn(20, 2, generator=draw), labels, groups=np.arange(20))
    of = torch.arange(20).repeat(4)[order]
    often = Examples(once.inputs[of], labels[of], groups=of.numpy() * 7 - 3)

    def bounds(data: Examples, rows: torch.Tensor) -> tuple[float, float]:
        both = (SimpleNamespace(answers=[None, answers[rows]], outputs=2) for answers in (mine, alone))
        return comparison._bounds(*both, data, metric)  # type: ignore[arg-type]

    assert bounds(often, of) == bounds(once, torch.arange(20)) != bounds(replace(often, groups=None), of)
    losses = [comparison._losses(nn.Identity(), data) for data in (often, once)]
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize(
    ("count", "low"),
    [(2, 0.5 - 1.959964 * math.sqrt(0.75 / 4)), (5, 0.0), (6, 0.75 - 1.959964 * math.sqrt(0.4375 / 8))],
)
def test_a_handful_of_examples_cannot_show_a_gain(count: int, low: float) -> None:
    data = Examples(torch.zeros(count, 1), torch.zeros(count, dtype=torch.long))
    right, wrong = (torch.eye(2)[[answer] * count] for answer in (0, 1))
    trials = [SimpleNamespace(answers=[None, answers], outputs=2) for answers in (right, wrong)]
    assert comparison._bounds(*trials, data, "accuracy") == pytest.approx((low, 1.0))  # type: ignore[arg-type]


def test_who_tells_no_scores_is_told_the_comparison_and_keeps_its_model(
    make_worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    worker = Worker(dataclasses.replace(make_worker("ward-7").settings, max_scores=0))
    asked = order(private="head", weights=Weights(BODY, BODY.flatten(FULL.views(SOUND.values))))
    with pytest.raises(HyperbloomError, match=r"^the client tells no scores .* \(--max-scores\)$"):
        worker.answer(asked)
    _, facts = worker.state.load_scored("run-1")
    assert facts.gain.startswith("ward-7: ") and any(facts.gain.split(": ", 1)[1] in line for line in caplog.messages)


def test_a_training_alone_that_diverges_is_no_comparison(
    make_worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """Else the site is told a gain over a network that has learned nothing."""
    caplog.set_level(logging.INFO)
    worker = disclosing(make_worker("ward-7"))
    diverging = order(sgd=SGD(**{**STEPS, "learning_rate": 1e30}))
    answer = worker.answer(diverging)
    assert answer.gain is None and answer.test is not None
    bounded = Worker(dataclasses.replace(worker.settings, max_scores=2))
    with pytest.raises(HyperbloomError, match="its user allows 2"):  # it tells a server that it diverges
        bounded.answer(diverging)
    assert "no comparison: training alone diverged [run run-1]" in caplog.messages
    kept, facts = worker.state.load_scored("run-1")
    assert torch.equal(FULL.flatten(kept), SOUND.values) and (facts.gain, facts.private) == ("", "none")


def test_fine_tuning_begins_without_the_momentum_of_the_last_training(make_worker: Callable[..., Worker]) -> None:
    head = head_layout(SPEC)
    values, tuned = torch.linspace(-0.1, 0.1, head.numel), list[torch.Tensor]()
    asked = order(private="head", weights=Weights(BODY, BODY.flatten(FULL.views(SOUND.values))))
    for momentum in (None, torch.ones(head.numel)):
        worker = make_worker("ward-7")
        worker.state.save_personal(asked.scope, head, values, momentum)
        trial = dict(comparison._trials(worker, asked))["tuned"]
        tuned.append(torch.cat([each.flatten() for each in trial.tensors.values()]))
    assert torch.equal(*tuned)


def test_a_model_trained_alone_is_a_whole_network_beside_a_generated_one(make_worker: Callable[..., Worker]) -> None:
    worker, made = disclosing(make_worker("ward-7")), "generated:k=2,h=3"
    written = full_layout(replace(SPEC, adapt=made))
    asked = order(adapt=made, weights=Weights(written, torch.zeros(written.numel)), rounds=30)
    assert worker.answer(asked).gain.chosen == "alone"
    kept, facts = worker.state.load_scored("run-1")
    assert facts.adapt == "all" and dict(FULL.shapes) == {name: tuple(values.shape) for name, values in kept.items()}


def test_a_training_alone_that_diverges_late_is_compared_as_it_was_at_its_best(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, train = disclosing(make_worker("ward-7")), comparison.train
    last = worker.seed(order().scope, 10)  # of ten rounds alone, five of them to match fine-tuning
    monkeypatch.setattr(comparison, "train", lambda *args: math.nan if args[3] == last else train(*args))
    assert worker.answer(order(weights=USELESS)).gain is not None


@pytest.mark.parametrize(("count", "labels", "metric"), [(1, [0, 1], "accuracy"), (6, [0], "auroc")])
def test_there_is_no_gain_on_one_example_or_by_a_metric_that_is_not_defined(
    count: int, labels: list[int], metric: str
) -> None:
    def examples(count: int) -> Examples:
        classes = torch.tensor(labels).repeat(count)[:count]
        return Examples(torch.zeros(count, 1), classes)

    def trial(loss: float) -> Any:
        answers = [torch.eye(2)[[0] * n] for n in (8, count)]
        val, test = (score_of(examples(len(a)), a, 2, loss, (metric,), disclose=False) for a in answers)
        return SimpleNamespace(losses=torch.full((8,), loss).double(), val=val, test=test, answers=answers, outputs=2)

    assert comparison._gain({"personal": trial(0.5), "alone": trial(1.0)}, examples(count), metric) is None


def test_the_losses_are_the_means_over_the_known_labels_of_each_example() -> None:
    labels = torch.tensor([[0.0, 1.0, math.nan], [math.nan] * 3, [1.0, 1.0, 0.0]])
    outputs = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    data = Examples(outputs, labels, make_task(TaskSpec("multilabel")))
    found = comparison._losses(nn.Identity(), data)
    known = [[(outputs[i, j], labels[i, j]) for j in range(3) if not labels[i, j].isnan()] for i in range(3)]
    expected = [sum(float(softplus(-x if y else x)) for x, y in each) / max(1, len(each)) for each in known]
    torch.testing.assert_close(found, torch.tensor(expected).double())


def test_a_model_for_all_of_another_shape_is_refused(make_worker: Callable[..., Worker]) -> None:
    with pytest.raises(WireError, match="tensor"):
        make_worker("ward-7").answer(order(common=Weights(BODY, torch.zeros(BODY.numel))))


@pytest.mark.parametrize("changes", [{"rounds": 0}, {"rounds": 10**6}])
def test_an_order_without_sound_numbers_is_refused(make_worker: Callable[..., Worker], changes: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="order: expected 1 to 1000000 steps, found"):
        make_worker("ward-7").answer(order(**changes))
