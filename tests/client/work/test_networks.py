"""Networks are shared by all clients of a process; each one's personal part is its own, and on its disk."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from figures.pfedme import Moreau
from hyperbloom.client.work import networks
from hyperbloom.common import models
from hyperbloom.common.errors import ModelError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.models import MODELS, ModelInfo, ModelSpec, build, head_layout
from hyperbloom.common.wire.orders import Scope

from ..conftest import SHARE
from ..orders import BODY, FULL, SPEC, Worker, evaluate_order, initial, train_order, values_of

MakeWorker = Callable[..., Worker]


def forget_personal(worker: Worker) -> None:
    """Delete what run-1 left on the disk, so that the next process of this client starts afresh."""
    (worker.state.folder / "personal" / "run-1.safetensors").unlink(missing_ok=True)


HEADS = head_layout(SPEC)
SMALL = Layout((("head.weight", (10, 5)), ("head.bias", (10,))))


COPY = Moreau(lamda=3.0, inner_steps=2, inner_rate=0.1)


def test_a_body_starts_from_what_is_sent_with_the_first_order_and_then_is_its_own(make_worker: MakeWorker) -> None:
    """Against a client without anything private: the same training, of which the head alone goes back."""
    whole = initial(seed=3)
    expected = values_of(make_worker("client-0").answer(train_order("none", "weights", weights=whole)).weights)
    worker = make_worker("client-0")
    result = worker.answer(train_order("body", "weights", weights=whole))
    assert result.weights is not None and result.weights.layout == HEADS
    assert torch.equal(result.weights.values, Weights(FULL, expected).part(HEADS))
    body = worker.state.load_personal(Scope("run-1", 1, 5), BODY)
    assert body is not None
    assert torch.equal(body[0], Weights(FULL, expected).part(BODY))
    kept = worker.answer(evaluate_order("body", weights=result.weights))
    assert worker.answer(evaluate_order("body", weights=Weights(FULL, initial(seed=9).values))) != kept  # its head
    again = Weights(FULL, FULL.flatten({**FULL.views(initial(seed=9).values), **HEADS.views(result.weights.values)}))
    assert worker.answer(evaluate_order("body", weights=again)) == kept  # but not its body


def test_without_a_body_from_anywhere_it_starts_from_a_seed_of_its_own(make_worker: MakeWorker) -> None:
    heads = initial(HEADS)
    one, other = (make_worker(name).answer(evaluate_order("body", weights=heads)) for name in ("a", "b"))
    assert one != other
    assert make_worker("a").answer(evaluate_order("body", weights=heads)) == one


def test_a_delta_of_the_head_is_against_the_head_that_was_sent(make_worker: MakeWorker) -> None:
    whole = initial(seed=3)
    delta = make_worker("client-0").answer(train_order("body", "delta", weights=whole))
    worker = make_worker("client-0")
    forget_personal(worker)
    trained = worker.answer(train_order("body", "weights", weights=whole))
    assert torch.equal(values_of(delta.weights), values_of(trained.weights) - whole.part(HEADS))


def test_a_network_beyond_all_messages_is_refused_before_memory_is_taken(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "MOST_PARAMETERS", FULL.numel)
    made = []
    monkeypatch.setattr(networks, "FlatPart", lambda module, layout: made.append(module))
    with pytest.raises(ModelError, match=r"^expected a network of at most [\d,]+ parameters, found [\d,]+$"):
        make_worker("client-0").answer(evaluate_order(adapt="generated:k=9,h=9"))
    assert made == []


class Projected(nn.Module):
    """A head on a fixed random projection."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("projection", torch.randn(inputs, 5))
        self.head = nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1) @ self.projection)
        return logits


def test_random_numbers_of_a_network_that_do_not_travel_are_the_same_in_every_process(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = lambda shape, classes, width: Projected(math.prod(shape), classes)  # noqa: E731
    monkeypatch.setitem(MODELS, "projected", ModelInfo(make, {"M": 0}, "for this test"))
    worker, scores = make_worker("client-0"), []
    for seed in (1, 2):
        networks._network.cache_clear()
        torch.manual_seed(seed)
        scores.append(worker.answer(evaluate_order(model="projected", weights=Weights(SMALL, torch.ones(SMALL.numel)))))
    assert scores[0] == scores[1]


def test_of_large_networks_one_process_keeps_one(make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker("client-0")
    for factor in (2, 3):
        worker.answer(evaluate_order(adapt=f"generated:k=1,h={factor}", private="all"))
    assert networks._network.cache_info().currsize >= 2
    monkeypatch.setattr(networks, "LARGE_NETWORK", FULL.numel)
    for factor in (4, 5, 6):  # a server that lies can name a thousand
        worker.answer(evaluate_order(adapt=f"generated:k=1,h={factor}", private="all"))
        assert networks._network.cache_info().currsize == 1


def test_a_copy_is_what_is_evaluated_once_there_is_one(make_worker: MakeWorker) -> None:
    worker = make_worker("client-0")
    first, second = initial(seed=1), initial(seed=2)
    before = [worker.answer(evaluate_order("copy", weights=weights)) for weights in (first, second, first)]
    assert before == [make_worker("client-1").answer(evaluate_order(weights=w)) for w in (first, second, first)]
    result = worker.answer(train_order("copy", "weights", weights=first, method=COPY))
    assert result.weights is not None and result.weights.layout == FULL
    after = [make_worker("client-0").answer(evaluate_order("copy", weights=weights)) for weights in (first, second)]
    assert after[0] == after[1] != before[0]
    assert worker.answer(evaluate_order(weights=result.weights)) != after[0]


def test_the_copy_trains_from_what_was_sent_and_not_from_what_was_kept(make_worker: MakeWorker) -> None:
    order = train_order("copy", "weights", weights=initial(seed=1), method=COPY)
    worker = make_worker("client-0")
    first = values_of(worker.answer(order).weights)
    assert torch.equal(values_of(worker.answer(order).weights), first)
    assert torch.equal(values_of(make_worker("client-0").answer(order).weights), first)


@pytest.mark.parametrize("private", ["head", "all"])
def test_training_goes_on_where_it_stopped_also_after_a_restart(make_worker: MakeWorker, private: str) -> None:
    steady = make_worker("client-0", data=SHARE)
    results = [steady.answer(train_order(private, round=number)) for number in (1, 2, 3)]
    final = steady.answer(evaluate_order(private))
    forget_personal(steady)
    restarted = [make_worker("client-0").answer(train_order(private, round=number)) for number in (1, 2, 3)]
    assert [result.loss for result in restarted] == [result.loss for result in results]
    assert make_worker("client-0").answer(evaluate_order(private)) == final
    assert results[2].loss < results[0].loss
    if private == "head":
        assert torch.equal(values_of(restarted[2].weights), values_of(results[2].weights))


def test_what_is_private_is_on_the_disk_before_the_result_leaves(make_worker: MakeWorker) -> None:
    worker = make_worker()
    path = worker.state.folder / "personal" / "run-1.safetensors"
    worker.answer(evaluate_order("head"))
    assert not path.exists()
    worker.answer(train_order("head"))
    first = path.read_bytes()
    worker.answer(train_order("head", round=2))
    assert path.read_bytes() != first
    make_worker("client-1").answer(train_order("none"))
    assert not (worker.state.folder.parent / "client-1").exists()


def test_the_personal_part_is_read_once_and_stays_in_memory(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker()
    reads: list[str] = []
    load = worker.state.load_personal

    def noted(scope: Scope, layout: Layout) -> Any:
        reads.append(scope.run_id)
        return load(scope, layout)

    monkeypatch.setattr(worker.state, "load_personal", noted)
    for number in (1, 2):
        worker.answer(train_order("head", round=number))
        worker.answer(evaluate_order("head"))
    worker.answer(train_order("none"))  # another network
    worker.answer(evaluate_order("head"))
    assert reads == ["run-1"]
    worker.answer(evaluate_order("head", run_id="run-2"))
    worker.answer(evaluate_order("head"))
    assert reads == ["run-1", "run-2", "run-1"]


def test_what_another_process_learned_meanwhile_is_read_again(make_worker: MakeWorker) -> None:
    steady = make_worker("client-0")
    path = steady.state.folder / "personal" / "run-1.safetensors"
    expected, files = [], []
    for number in (1, 2, 3):
        expected.append(steady.answer(train_order("head", round=number)))
        files.append(path.read_bytes())
    forget_personal(steady)
    worker = make_worker("client-0")
    worker.answer(train_order("head", round=1))
    path.write_bytes(files[1])  # round 2 was another process's
    third = worker.answer(train_order("head", round=3))
    assert torch.equal(values_of(third.weights), values_of(expected[2].weights))
    assert path.read_bytes() == files[2]


@pytest.mark.parametrize("private", ["head", "all"])
def test_clients_that_take_turns_in_one_process_share_networks_and_nothing_else(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, private: str
) -> None:
    names, rounds = ("client-0", "client-1", "client-2"), (1, 2, 3)
    alone = {}
    for name in names:
        worker = make_worker(name)
        alone[name] = [worker.answer(train_order(private, round=number)) for number in rounds]
        forget_personal(worker)
    built: list[ModelSpec] = []
    counting = {name: lambda spec: built.append(spec) or build(spec) for name in ("build", "blank")}
    monkeypatch.setattr(networks, "models", SimpleNamespace(**vars(networks.models) | counting))
    networks._network.cache_clear()
    workers = {name: make_worker(name) for name in names}
    for number in rounds:
        for name, worker in workers.items():
            result = worker.answer(train_order(private, round=number))
            assert result.loss == alone[name][number - 1].loss
            if private == "head":
                assert torch.equal(values_of(result.weights), values_of(alone[name][number - 1].weights))
    # One for all; the others are the initial values of each client's personal part.
    assert len(built) == 1 + len(names)


def test_the_head_starts_from_this_clients_own_seed(make_worker: MakeWorker) -> None:
    scores = {}
    for name in ("client-0", "client-1", "client-2"):
        scores[name] = make_worker(name).answer(evaluate_order("head"))
        assert make_worker(name).answer(evaluate_order("head")) == scores[name]
    assert len({score.val.loss for score in scores.values()}) == 3
    assert make_worker("client-0").answer(evaluate_order("head", seed=6)) != scores["client-0"]


def test_initialising_the_head_leaves_the_global_generator_alone(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.answer(evaluate_order("head"))  # builds the network
    order = evaluate_order("head", run_id="run-2")
    before = torch.random.get_rng_state()
    worker.answer(order)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_server_that_goes_back_too_far_is_told_of(make_worker: MakeWorker, caplog: pytest.LogCaptureFixture) -> None:
    worker = make_worker()
    fresh = worker.answer(evaluate_order("head"))
    worker.answer(train_order("head", round=9))
    assert worker.answer(evaluate_order("head", round=4, rewound=(3,))) == fresh
    assert "no own part is kept here: it begins anew" in caplog.text


def test_each_run_starts_with_a_fresh_head_and_finds_its_own_again(make_worker: MakeWorker) -> None:
    worker = make_worker()
    fresh = worker.answer(evaluate_order("head"))
    worker.answer(train_order("head"))
    trained = worker.answer(evaluate_order("head"))
    assert trained != fresh
    assert worker.answer(evaluate_order("head", run_id="run-2")) == fresh
    assert worker.answer(evaluate_order("head")) == trained
