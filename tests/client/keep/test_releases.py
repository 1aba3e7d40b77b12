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

from hyperbloom.client.keep.releases import MOST_CHANGES, Releases
from hyperbloom.client.settings import ClientSettings
from hyperbloom.common.errors import ConfigError, HyperbloomError, WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.methods import FedRep
from hyperbloom.common.models import ModelSpec, build, full_layout
from hyperbloom.common.wire.exchanges import ErrorsOrder, TryOrder
from hyperbloom.common.wire.orders import EvaluateOrder, Noise, Refinement
from hyperbloom.common.wire.weights import Weights

from ..conftest import SHARE
from ..orders import FULL, Worker, evaluate_order, train_order

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
        "distilled": lambda w: w.answer(evaluate_order(refinement=Refinement(1, 0.1, 8, distil_temperature=1.0))),
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


@pytest.mark.parametrize("content", ["", "{", "[]", '{"changes": 1}', '{"changes": -1, "scores": 0}', '{"a": 1}', "7"])
def test_a_damaged_ledger_lets_nothing_leave(content: str, tmp_path: Path) -> None:
    ledger = Releases(tmp_path, 5, 5)
    ledger.path.write_text(content)
    with pytest.raises(HyperbloomError, match=r"^releases\.json in the client's state folder is damaged") as caught:
        ledger.spend("changes")
    assert str(tmp_path) not in str(caught.value), "the server reads this"
    assert ledger.path.read_text() == content


def test_a_ledger_that_cannot_be_written_lets_nothing_leave(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--state-dir: cannot count what leaves: "):
        Releases(tmp_path / "file" / "a", 5, 5).spend("changes")


def spend(folder: Path) -> None:
    for _ in range(20):
        Releases(folder, 1000, None).spend("changes")


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
