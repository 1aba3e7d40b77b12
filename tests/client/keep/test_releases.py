"""What is made of training examples leaves so often and no more, whatever servers order, and however they lie."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from figures.pfl_client import ErrorsOrder, MomentsOrder, TryOrder
from hyperbloom.client.keep.releases import MOST_CHANGES, Releases
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work import evaluation, training
from hyperbloom.common.errors import ConfigError, HyperbloomError, WireError, attempt
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.methods import FedRep
from hyperbloom.common.models import ModelSpec, build, full_layout
from hyperbloom.common.secrecy.sums import pack_places
from hyperbloom.common.wire.exchanges import (
    BackpropOrder,
    DescribeOrder,
    Fit,
    FitOrder,
    RepresentOrder,
)
from hyperbloom.common.wire.masks import MaskedOrder, SharesResult
from hyperbloom.common.wire.orders import EvaluateOrder, Noise, Refinement

from ..conftest import SHARE
from ..orders import FULL, Worker, change, evaluate_order, initial, train_order, values_of
from ..work.test_masks import Four, in_place

BIAS = FULL.shapes[-1][0]
NO_SCORES = r"^the client tells no scores that are made of its training examples \(--max-scores\)$"


def make(folder: Path, **demands: Any) -> Worker:
    return Worker(ClientSettings("a", SHARE, "cpu", state_dir=folder / "a", **demands))


def score(worker: Worker, bias: np.ndarray[Any, Any], refinement: Refinement | None = None) -> float:
    """Return the validation loss of a network that says the same of every input: what its last bias says."""
    weights = Weights(FULL, torch.zeros(FULL.numel))
    FULL.views(weights.values)[BIAS].copy_(torch.from_numpy(bias))
    return worker.answer(evaluate_order(weights=weights, refinement=refinement)).val.loss


def read_label_shares(worker: Worker) -> np.ndarray[Any, Any]:
    """Read the shares of the training labels off losses: a lying server's way.

    A step of rate r moves the bias by r (shares - p), p what the network says. So the validation loss, of which plain
    evaluations tell the validation shares v, changes by r (p - v) (shares - p): one linear equation for each p.
    """
    rate, basis = 0.05, np.eye(10) * 2
    plain = np.array([score(worker, bias) for bias in basis])
    entropies = np.log(np.exp(basis).sum(1))
    v = (entropies - plain) / 2
    said = np.exp(basis) / np.exp(basis).sum(1, keepdims=True)
    refine = Refinement(1, rate, 10**6, "all")
    moved = (np.array([score(worker, bias, refine) for bias in basis]) - plain) / rate
    known = moved + ((said - v) * said).sum(1)
    return np.asarray(np.linalg.lstsq(np.vstack([said - v, np.ones(10)]), np.append(known, 1.0))[0])


def test_labels_are_read_off_the_losses_of_refined_models_unless_the_client_insists(tmp_path: Path) -> None:
    worker = make(tmp_path)
    shares = torch.bincount(worker.train_data.labels, minlength=10) / len(worker.train_data)
    assert np.abs(read_label_shares(worker) - shares.numpy()).max() < 0.05
    for demands in ({"min_noise": 2.0}, {"min_masked": 4}, {"max_scores": 0}):
        with pytest.raises(HyperbloomError, match=NO_SCORES):
            read_label_shares(make(tmp_path, **demands))
    with pytest.raises(HyperbloomError, match=r"^the client has sent 3 scores .*; its user allows 3 \(--max-scores\)$"):
        read_label_shares(make(tmp_path, min_noise=2.0, max_scores=3))


def scores() -> dict[str, Callable[[Worker], object]]:
    """Return all ways to ask for a score of what training examples have shaped here."""
    personal, norms = evaluate_order("all"), evaluate_order(model="plain-4", weights=_initial("plain-4"))
    return {
        "refined": lambda w: w.answer(evaluate_order(refinement=Refinement(1, 0.1, 8))),
        "personal": lambda w: w.answer(personal),
        "personal head": lambda w: w.answer(evaluate_order("head")),
        "copy": lambda w: w.answer(evaluate_order("copy")),
        "many": lambda w: w.answer(TryOrder(**vars(_many(evaluate_order("head"))), together=False)),
        "errors": lambda w: w.answer(ErrorsOrder(**vars(evaluate_order("head")), sign=1, classifiers=_initial("mlp"))),
        "norms": lambda w: w.answer(norms),
    }


def _many(order: EvaluateOrder) -> EvaluateOrder:
    assert order.weights is not None
    numel = order.weights.layout.numel
    return replace(order, weights=Weights(Layout((("models", (1, numel)),)), order.weights.values))


def _initial(model: str) -> Weights:
    spec = ModelSpec(model, "M", (1, 8, 8), 10)
    return Weights(full_layout(spec), full_layout(spec).flatten(dict(build(spec).named_parameters())))


def test_a_model_whose_score_is_refused_is_its_users_and_how_it_went_is_told_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make(tmp_path, min_masked=4)
    with pytest.raises(HyperbloomError, match=NO_SCORES):
        worker.answer(evaluate_order("head"))
    assert list((tmp_path / "a" / "scored").glob("*.safetensors"))
    monkeypatch.setattr(evaluation, "evaluate", lambda *arguments: 1 // 0)
    with pytest.raises(HyperbloomError, match=NO_SCORES):
        worker.answer(evaluate_order("head"))
    assert "the model cannot be scored here: ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("way", scores())
def test_every_score_that_tells_of_training_examples_counts(way: str, tmp_path: Path) -> None:
    with pytest.raises(HyperbloomError, match=NO_SCORES):
        scores()[way](make(tmp_path, min_masked=4))
    assert not (tmp_path / "a" / "releases.json").exists()
    worker = make(tmp_path, max_scores=1)
    with suppress(WireError):  # some need more than this client has; what is refused later has been counted
        scores()[way](worker)
    with pytest.raises(HyperbloomError, match="the client has sent 1 scores"):
        scores()[way](worker)


def test_scores_of_what_the_server_has_sent_are_told_for_ever(tmp_path: Path) -> None:
    worker = make(tmp_path, min_noise=1.0, min_masked=3)
    for _ in range(3):
        assert worker.answer(evaluate_order()).val.total > 0


def test_changes_are_counted_over_restarts_runs_and_rewinds(tmp_path: Path) -> None:
    noisy = {"noise": Noise(1.0, 2.0)}
    make(tmp_path, min_noise=2.0, max_changes=3).answer(train_order(**noisy))
    worker = make(tmp_path, min_noise=2.0, max_changes=3)
    worker.answer(train_order(run_id="run-2", **noisy))
    worker.answer(train_order(run_id="run-2", round=1, rewound=(0,), **noisy))
    for order in (train_order(**noisy), train_order(run_id="run-3", rewound=(0,), **noisy)):
        with pytest.raises(HyperbloomError, match=r"has sent 3 changes .*; its user allows 3 \(--max-changes\)$"):
            worker.answer(order)
    assert json.loads((tmp_path / "a" / "releases.json").read_text()) == {"changes": 3, "scores": 0}
    assert (tmp_path / "a" / "releases.json").stat().st_mode & 0o777 == 0o600


def test_a_change_of_the_weights_and_one_of_the_encoder_are_two(tmp_path: Path) -> None:
    fit = Fit("deepset", "v", initial(), initial(), 1, 0.1)
    with suppress(HyperbloomError):  # of another encoder; what is refused later has been counted
        make(tmp_path, max_changes=3).answer(FitOrder(**vars(train_order()), fit=fit))
    assert json.loads((tmp_path / "a" / "releases.json").read_text())["changes"] == 2


def test_what_is_refused_and_what_sends_nothing_is_not_counted(tmp_path: Path) -> None:
    worker = make(tmp_path, min_noise=2.0)
    unfit = FedRep(head_share=0.5)  # of a personal head, where there is none
    for wrong in (
        {"noise": Noise(1.0, 1.0)},
        {"noise": Noise(0.0, 1.0)},
        {"noise": Noise(1.0, 2.0), "steps": 0},
        {"noise": Noise(1.0, 2.0), "method": unfit},
    ):
        with pytest.raises(HyperbloomError):
            worker.answer(train_order(**wrong))
    assert worker.answer(train_order("all", "nothing")).loss is None
    assert make(tmp_path, max_scores=5).answer(train_order("all", "nothing")).loss is None
    assert not (tmp_path / "a" / "releases.json").exists()


def test_who_insists_on_nothing_counts_nothing_and_who_does_has_a_bound(tmp_path: Path) -> None:
    make(tmp_path).answer(train_order())
    assert not (tmp_path / "a" / "releases.json").exists()
    (tmp_path / "a").mkdir(exist_ok=True)
    (tmp_path / "a" / "releases.json").write_text(json.dumps({"changes": MOST_CHANGES, "scores": 0}))
    with pytest.raises(HyperbloomError, match=f"its user allows {MOST_CHANGES} "):
        make(tmp_path, min_noise=2.0).answer(train_order(noise=Noise(1.0, 2.0)))
    make(tmp_path, min_noise=2.0, max_changes=MOST_CHANGES + 1).answer(train_order(noise=Noise(1.0, 2.0)))


def bounded(folder: Path) -> ClientSettings:
    return ClientSettings("a", SHARE, state_dir=folder, max_changes=5, max_scores=5)


DAMAGED = ["", "{", "[]", '["changes", "scores"]', '{"changes": 1}', '{"changes": -1, "scores": 0}', '{"a": 1}', "7"]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_ledger_lets_nothing_leave(content: str, tmp_path: Path) -> None:
    ledger = Releases(bounded(tmp_path))
    ledger.path.write_text(content)
    with pytest.raises(HyperbloomError, match=r"^releases\.json in the client's state folder is damaged") as caught:
        ledger.spend("changes")
    assert str(tmp_path) not in str(caught.value), "the server reads this"
    assert ledger.path.read_text() == content


def test_a_ledger_that_cannot_be_written_lets_nothing_leave(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--state-dir: cannot count what leaves: "):
        Releases(bounded(tmp_path / "file" / "a")).spend("changes")


def spend(folder: Path) -> None:
    for _ in range(20):
        Releases(ClientSettings("a", SHARE, state_dir=folder, max_changes=1000)).spend("changes")


def test_processes_that_spend_at_once_lose_no_count(tmp_path: Path) -> None:
    context = get_context("fork")
    processes = [context.Process(target=spend, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert json.loads((tmp_path / "releases.json").read_text())["changes"] == 60


@pytest.mark.parametrize("flag", ["changes", "scores"])
def test_a_bound_below_zero_is_none(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--max-{flag}: expected a number from 0, found -1"):
        ClientSettings("a", **{f"max_{flag}": -1})  # type: ignore[arg-type]


# ---------------------------------------------------------------------- --min-noise


@pytest.fixture
def worker(tmp_path: Any) -> Worker:
    """Return a worker that wants twice its norm."""
    return Worker(ClientSettings("a", SHARE, "cpu", state_dir=tmp_path / "a", min_noise=2.0))


@pytest.mark.parametrize("noise", [None, 0.5, 1.999])
def test_an_order_with_less_noise_is_refused_before_any_work(worker: Worker, noise: float | None) -> None:
    order = train_order(noise=None if noise is None else Noise(1.0, noise))
    with pytest.raises(HyperbloomError, match=r"noise below 2 times its norm \(--min-noise\)"):
        worker.answer(order)


def test_with_enough_noise_it_trains_and_with_nothing_to_send_too(worker: Worker) -> None:
    result = worker.answer(train_order(noise=Noise(0.1, 2.0)))
    change = values_of(result.weights)
    assert result.loss is None
    assert float(change.norm()) == pytest.approx(0.2 * change.numel() ** 0.5, rel=0.05)
    assert worker.answer(train_order("all", "nothing")).weights is None
    assert worker.answer(evaluate_order()).test.total > 0


def test_nothing_else_that_is_made_of_training_examples_leaves(worker: Worker) -> None:
    fit = FitOrder(**vars(train_order(noise=Noise(1.0, 50.0))), fit=Fit("deepset", "v", initial(), initial(), 1, 0.1))
    described = DescribeOrder("r", "deepset", 4, "v", False, initial())
    order = evaluate_order()
    for call in (
        lambda: worker.answer(described),
        lambda: worker.answer(BackpropOrder("r", "deepset", 4, "v", initial())),
        lambda: worker.answer(fit),
        lambda: worker.answer(MomentsOrder(**vars(order))),
        lambda: worker.answer(RepresentOrder(order.scope, order.target, "d", 1, 0)),
    ):
        with pytest.raises(HyperbloomError, match="--min-noise"):
            call()


def test_no_loss_of_training_examples_leaves_in_any_answer(worker: Worker) -> None:
    assert worker.answer(train_order("all", "nothing")).loss is None
    diverging = train_order("head", run_id="run-2", noise=Noise(1.0, 8.0), learning_rate=1e38, weight_decay=1e30)
    result = worker.answer(diverging)  # the noise alone, as if nothing had changed
    change = values_of(result.weights)
    assert result.loss is None and float(change.norm()) == pytest.approx(8.0 * change.numel() ** 0.5, rel=0.05)


@pytest.mark.parametrize("limits", [{"min_noise": 8.0}, {"max_changes": 0, "max_scores": 0}, {"min_masked": 4}])
def test_labels_cannot_be_read_off_which_trainings_diverge(tmp_path: Path, limits: dict[str, Any]) -> None:
    """A label that is as the weights say has no gradient, with which the step of a huge rate is none, either."""
    told = {True: set[object](), False: set[object]()}
    for careful, answers in told.items():
        folder = tmp_path / str(careful)
        worker = Worker(ClientSettings("a", SHARE, "cpu", state_dir=folder, **(limits if careful else {})))
        for label in range(10):
            sent = Weights(FULL, torch.zeros(FULL.numel))
            bias = FULL.views(sent.values)[BIAS].fill_(-1e4)
            bias[label] = 1e4
            order = train_order(
                "none", "nothing", weights=sent, learning_rate=1e20, weight_decay=0.0, steps=1, batch_size=1
            )
            answer = attempt(worker.answer, order)
            answers.add(type(answer) if isinstance(answer, Exception) else answer.weights)
    assert told[True] == {None}
    assert told[False] == {None, HyperbloomError}, "a client without limits says so"


@pytest.mark.parametrize("wrong", [Noise(0.0, 1.0), Noise(1.0, 0.0), Noise(-1.0, 1.0)])
def test_impossible_noise_is_refused(worker: Worker, wrong: Noise) -> None:
    with pytest.raises(WireError, match="expected noise with clip and scale above 0"):
        worker.answer(train_order(noise=wrong))


@pytest.mark.parametrize("least", [0.0, -1.0, float("nan")])
def test_no_noise_is_no_demand(least: float) -> None:
    with pytest.raises(ConfigError, match="--min-noise: expected a number above 0"):
        ClientSettings("a", min_noise=least)


def test_the_private_head_is_trained_without_noise(worker: Worker) -> None:
    """It never leaves, so it learns as always."""
    worker.answer(train_order("head", noise=Noise(0.1, 2.0)))
    plain = Worker(ClientSettings("a", SHARE, "cpu", state_dir=worker.state.folder.parent / "b"))
    plain.answer(train_order("head"))
    heads = [(each.state.folder / "personal" / "run-1.safetensors").read_bytes() for each in (worker, plain)]
    assert heads[0] == heads[1]


# ---------------------------------------------------------------------- --min-masked


def insisting(folder: Path, least: int | None) -> Worker:
    return Worker(ClientSettings("a", SHARE, "cpu", state_dir=folder / "a", min_masked=least))


def begun(worker: Worker, threshold: int = 4) -> tuple[Four, list[SharesResult]]:
    """Take the worker, in the first place of four, to the point where it is to train."""
    four = Four(threshold=threshold)
    first = worker.answer(in_place(four, worker))
    return four, [first, *(each.share(four.shares_order(place)) for place, each in enumerate(four.rounds) if place)]


def masked_order(four: Four, dealt: list[SharesResult], **changes: Any) -> MaskedOrder:
    """Return what an honest server orders then, for a network that this client has."""
    order = train_order("none", "weights", run_id="run")
    assert order.weights is not None
    four.dealt = dealt
    return four.masked_order(0, **vars(order) | changes)


def test_a_change_by_itself_and_whatever_else_is_made_of_examples_is_refused(tmp_path: Path) -> None:
    worker = insisting(tmp_path, 4)
    order, fit = evaluate_order(), Fit("deepset", "v", initial(), initial(), 1, 0.1)
    for call in (
        lambda: worker.answer(train_order()),
        lambda: worker.answer(train_order(noise=Noise(1.0, 50.0))),
        lambda: worker.answer(DescribeOrder("r", "deepset", 4, "v", False, initial())),
        lambda: worker.answer(BackpropOrder("r", "deepset", 4, "v", initial())),
        lambda: worker.answer(FitOrder(**vars(train_order()), fit=fit)),
        lambda: worker.answer(MomentsOrder(**vars(order))),
        lambda: worker.answer(RepresentOrder(order.scope, order.target, "d", 1, 0)),
    ):
        with pytest.raises(
            HyperbloomError, match=r"at least 4 clients alone \(--min-masked\), found a change by itself"
        ):
            call()


def test_what_sends_nothing_trains_and_tells_no_loss(tmp_path: Path) -> None:
    worker = insisting(tmp_path, 4)
    result = worker.answer(train_order("all", "nothing"))
    assert (result.weights, result.loss) == (None, None)
    assert worker.answer(evaluate_order()).test.total > 0
    result = worker.answer(train_order("all", "nothing", run_id="run-2", learning_rate=1e38, weight_decay=1e30))
    assert (result.weights, result.loss) == (None, None)
    assert not (worker.state.folder / "personal" / "run-2.safetensors").exists(), "what has diverged is not kept"


@pytest.mark.parametrize("least", [None, 4])
def test_in_a_sum_of_so_many_it_is_the_same_change_as_ever(tmp_path: Path, least: int | None) -> None:
    worker = insisting(tmp_path, least)
    four, dealt = begun(worker)
    order = masked_order(four, dealt)
    assert len(worker.answer(order).masked) == 4 * sum(order.masking.lengths)


def test_a_sum_that_may_become_smaller_is_refused_before_shares_are_dealt(tmp_path: Path) -> None:
    """Later is too late: the others would take its mask off without it."""
    with pytest.raises(HyperbloomError, match=r"of at least 4 .* \(--min-masked\), found sums of 3 or more$"):
        begun(insisting(tmp_path, 4), threshold=3)
    begun(insisting(tmp_path / "others", 3), threshold=3)


def test_a_part_that_fewer_train_is_refused_before_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = insisting(tmp_path, 4)
    four, dealt = begun(worker)
    order = masked_order(four, dealt)
    three = (pack_places((0, 1, 2), 4),)
    monkeypatch.setattr(training, "load", lambda *_: pytest.fail("it trains"))
    with pytest.raises(
        HyperbloomError, match=r"\(--min-masked\), found a sum in which only 3 may train the same weights$"
    ):
        worker.answer(change(order, owners=order.masking.owners[:-1] + three))


@pytest.mark.parametrize("least", [None, 4])
def test_under_masks_no_loss_is_told(least: int | None, tmp_path: Path) -> None:
    """Weights can make a loss one of two values, and numbers of examples tell who of a sum has which."""
    worker = insisting(tmp_path, least)
    assert training.train(worker, masked_order(*begun(worker))).loss is None


def test_a_training_that_diverges_adds_nothing_to_a_sum(tmp_path: Path) -> None:
    worker = insisting(tmp_path, None)
    order = change(masked_order(*begun(worker)), learning_rate=1e38, weight_decay=1e30)
    result = training.train(worker, order)
    assert order.weights is not None and torch.equal(values_of(result.weights), order.weights.values)
    assert result.loss is None


@pytest.mark.parametrize("least", [0, 2, -1])
def test_a_sum_of_fewer_than_three_is_no_demand(least: int) -> None:
    with pytest.raises(ConfigError, match="--min-masked: expected 3 clients or more, found"):
        ClientSettings("a", min_masked=least)
