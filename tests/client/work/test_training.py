"""One client's work: which orders it takes, what it sends back, what it keeps."""

import contextlib
import dataclasses
import errno
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyperbloom.client.work import methods, sgd
from hyperbloom.client.work.sgd import draw_batches
from hyperbloom.common.compression import Codec
from hyperbloom.common.data import load_client_data
from hyperbloom.common.errors import DiskError, HyperbloomError, ModelError, WireError
from hyperbloom.common.layout import Weights
from hyperbloom.common.models import MODELS, build
from hyperbloom.common.seeds import derive
from hyperbloom.common.wire.exchanges import Fit, FitOrder
from hyperbloom.common.wire.orders import EvaluateOrder, TrainOrder

from ..conftest import SHARE
from ..orders import BODY, FULL, LAYOUTS, SPEC, Worker, evaluate_order, initial, train_order, values_of

MakeWorker = Callable[..., Worker]
REPLY = "order: expected reply in ('delta', 'weights', 'nothing'), 1 to 100000 steps, found "


def forget_personal(worker: Worker) -> None:
    """Delete what run-1 left on the disk, so that the next process of this client starts afresh."""
    (worker.state.folder / "personal" / "run-1.safetensors").unlink(missing_ok=True)


# ---------------------------------------------------------------------- what it says of itself


# ---------------------------------------------------------------------- refused orders


@pytest.mark.parametrize(
    ("order", "error", "message"),
    [
        (train_order(num_classes=9), WireError, "order: 9 classes, but this client's data have 10"),
        (evaluate_order(num_classes=11), WireError, "order: 11 classes, but this client's data have 10"),
        (
            train_order("neck"),
            WireError,
            "order: expected private to be one of ('none', 'head', 'body', 'all', 'copy'), found 'neck'",
        ),
        (train_order("copy"), WireError, "order: expected a method that trains the client's copy, found none"),
        (
            train_order("body", weights=initial(BODY)),
            WireError,
            "tensor head.weight: expected with shape (10, 100), but it is missing",
        ),
        (
            evaluate_order(epochs=1, rate=0.1, batch=8, part="body"),
            WireError,
            "order: expected to refine one of ('head', 'all'), found 'body'",
        ),
        (
            train_order(reply="gradient"),
            WireError,
            f"{REPLY}'gradient', (4,)",
        ),
        (
            train_order(steps=0),
            WireError,
            f"{REPLY}'delta', (0,)",
        ),
        (
            train_order(steps=100_001),
            WireError,
            f"{REPLY}'delta', (100001,)",
        ),
        (
            FitOrder(**vars(train_order()), fit=Fit("deepset", "v", initial(), initial(), 100_001, 0.1)),
            WireError,
            f"{REPLY}'delta', (4, 100001)",
        ),
        (
            train_order(batch_size=0),
            WireError,
            f"{REPLY}'delta', (4,)",
        ),
        (train_order(weights=None), WireError, "order: expected weights, found none"),
        (evaluate_order("head", weights=None), WireError, "order: expected weights, found none"),
        (
            train_order(weights=initial(BODY)),
            WireError,
            "tensor head.weight: expected with shape (10, 100), but it is missing",
        ),
        (
            train_order("head", weights=initial(FULL)),
            WireError,
            "tensor head.weight: not expected; expected fc1.weight, fc1.bias",
        ),
        (
            train_order(weights=Weights(FULL, initial().values.double())),
            WireError,
            "tensor fc1.weight: expected torch.float32, found torch.float64",
        ),
        (
            train_order(weights=Weights(FULL, torch.full((FULL.numel,), torch.nan))),
            WireError,
            f"tensor fc1.weight: {FULL.numel} values are not finite",
        ),
        (
            train_order(model="resnet"),
            ModelError,
            f"model: expected one of {', '.join(sorted(MODELS))}, found 'resnet'",
        ),
        (
            train_order(model="lenet"),
            ModelError,
            "lenet: expected images (channels, height, width) of at least 16 x 16, found (1, 8, 8); use model: mlp",
        ),
    ],
)
def test_an_order_that_does_not_fit_is_refused(
    make_worker: MakeWorker, order: TrainOrder | EvaluateOrder, error: type[HyperbloomError], message: str
) -> None:
    worker = make_worker()
    with pytest.raises(error) as caught:
        worker.answer(order)
    assert str(caught.value) == message


def test_weights_of_another_size_of_the_network_are_refused(make_worker: MakeWorker) -> None:
    with pytest.raises(WireError, match=r"tensor fc1\.weight: expected shape \(50, 64\), found \(100, 64\)"):
        make_worker(size="S").answer(train_order())


def test_a_refused_order_leaves_no_trace(make_worker: MakeWorker) -> None:
    undisturbed = make_worker("client-0")
    expected = [undisturbed.answer(train_order("head", round=number)) for number in (1, 3)]
    forget_personal(undisturbed)
    worker = make_worker("client-0")
    first = worker.answer(train_order("head", round=1))
    with pytest.raises(WireError):
        worker.answer(train_order("head", round=2, weights=initial(FULL)))
    third = worker.answer(train_order("head", round=3))
    for got, want in zip((first, third), expected, strict=True):
        assert torch.equal(values_of(got.weights), values_of(want.weights))


# ---------------------------------------------------------------------- replies


@pytest.mark.parametrize("private", ["none", "head"])
def test_a_delta_is_what_was_trained_less_what_was_sent(make_worker: MakeWorker, private: str) -> None:
    sent = initial(LAYOUTS[private])
    first = make_worker("client-0")
    delta = first.answer(train_order(private, "delta", weights=sent))
    forget_personal(first)
    trained = make_worker("client-0").answer(train_order(private, "weights", weights=sent))
    assert delta.weights is not None
    assert delta.weights.layout == LAYOUTS[private]
    assert torch.equal(values_of(delta.weights), values_of(trained.weights) - sent.values)
    assert values_of(delta.weights).abs().max() > 1e-3
    assert torch.equal(sent.values, initial(LAYOUTS[private]).values)  # the order is as it was


@pytest.mark.parametrize("private", ["none", "head", "all"])
def test_a_client_that_is_to_send_nothing_sends_its_loss_only(make_worker: MakeWorker, private: str) -> None:
    result = make_worker().answer(train_order(private, "nothing"))
    assert result.weights is None
    assert 0 < result.loss < 10
    assert 0 < result.seconds < 60


def test_where_nothing_is_sent_nothing_comes_back(make_worker: MakeWorker) -> None:
    assert make_worker().answer(train_order("all", "delta")).weights is None


def test_the_reply_keeps_its_values_when_the_next_order_comes(make_worker: MakeWorker) -> None:
    worker = make_worker()
    first = values_of(worker.answer(train_order(reply="weights")).weights)
    before = first.clone()
    worker.answer(train_order(reply="weights", round=2, weights=initial(seed=1)))
    assert torch.equal(first, before)


@pytest.mark.parametrize("reply", ["delta", "weights"])
@pytest.mark.parametrize("private", ["none", "head"])
def test_a_compressed_reply_is_the_change_and_later_ones_bring_what_it_left_out(
    make_worker: MakeWorker, private: str, reply: str
) -> None:
    codec, layout = Codec("top-k:0.02+int8", "int8", 0.02), LAYOUTS[private]
    plain, owed = make_worker("client-0"), torch.zeros(layout.numel)
    deltas = [values_of(plain.answer(train_order(private, round=number)).weights) for number in (1, 2, 3)]
    forget_personal(plain)
    for number, delta in enumerate(deltas, start=1):
        # A new worker each time: a stock SuperNode starts a process for every order.
        result = make_worker("client-0").answer(train_order(private, reply, round=number, codec=codec))
        assert result.weights is None and result.encoded is not None
        assert result.encoded == codec.encode(delta + owed, layout)
        owed = delta + owed - codec.decode(result.encoded, layout)
        if reply == "delta":  # a hypernetwork follows in part only
            owed = owed * min(1.0, float(delta.double().norm() / owed.double().norm()))
    assert bool(owed.norm() > deltas[-1].norm() * 1.1) == (reply == "weights")


@pytest.mark.parametrize(("private", "reply"), [("none", "nothing"), ("all", "delta")])
def test_where_nothing_is_to_be_sent_nothing_is_compressed(make_worker: MakeWorker, private: str, reply: str) -> None:
    worker = make_worker()
    result = worker.answer(train_order(private, reply, codec=Codec.parse("int8")))
    assert (result.weights, result.encoded) == (None, None)
    assert not (worker.state.folder / "residual.safetensors").exists()


def test_training_is_local_sgd_on_this_clients_data(make_worker: MakeWorker) -> None:
    data = load_client_data(SHARE).train
    torch.manual_seed(0)
    module = build(SPEC)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    losses = []
    for batch in draw_batches(40, 8, 4, derive(5, "client-0", 1)):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(module(data.inputs[batch]), data.labels[batch])
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 50.0)
        optimiser.step()
        losses.append(loss.item())
    result = make_worker("client-0").answer(train_order(reply="weights"))
    assert result.loss == pytest.approx(sum(losses) / 4, rel=1e-5)
    assert torch.allclose(values_of(result.weights), FULL.flatten(dict(module.named_parameters())), atol=1e-5)


# ---------------------------------------------------------------------- a private body, a private copy


# ---------------------------------------------------------------------- batches


def test_rounds_and_clients_draw_batches_of_their_own(make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Tensor] = []

    def keep(*arguments: int) -> Tensor:
        drawn.append(draw_batches(*arguments))
        return drawn[-1]

    monkeypatch.setattr(sgd, "draw_batches", keep)
    one, two = make_worker("client-0"), make_worker("client-1")
    one.answer(train_order(round=1))
    one.answer(train_order(round=2))
    two.answer(train_order(round=1))
    one.answer(train_order(round=1, seed=6))
    one.answer(train_order(round=1))
    assert len({str(batches.tolist()) for batches in drawn[:4]}) == 4
    assert torch.equal(drawn[4], drawn[0])
    assert torch.equal(drawn[0], draw_batches(40, 8, 4, derive(5, "client-0", 1)))


def test_the_same_order_twice_gives_the_same_bits(make_worker: MakeWorker) -> None:
    worker = make_worker()
    first = worker.answer(train_order())
    worker.answer(train_order(round=2, weights=initial(seed=1)))
    worker.answer(evaluate_order(weights=initial(seed=2)))
    worker.answer(train_order("head"))
    again = worker.answer(train_order())
    assert again.loss == first.loss
    assert values_of(again.weights).numpy().tobytes() == values_of(first.weights).numpy().tobytes()


# ---------------------------------------------------------------------- what stays here


def test_a_training_that_is_broken_off_leaves_the_personal_part_as_it_was(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker()
    worker.answer(train_order("head"))
    healthy = worker.answer(evaluate_order("head"))

    def broken_off(*arguments: Any) -> float:
        sgd.train(*arguments)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(methods, "train", broken_off)
    with pytest.raises(HyperbloomError, match="memory is not enough"):
        worker.answer(train_order("head", round=2))
    assert worker.answer(evaluate_order("head")) == healthy


def test_a_training_that_diverges_does_not_destroy_the_personal_part(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.answer(train_order("all"))
    healthy = worker.answer(evaluate_order("all"))
    with contextlib.suppress(HyperbloomError):  # to say so is allowed
        worker.answer(train_order("all", round=2, learning_rate=1e30))
    assert worker.answer(evaluate_order("all")) == healthy


def test_a_training_that_diverges_leaves_nothing_bad_for_the_next_reply(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.answer(train_order(codec=Codec.parse("top-k:0.1")))
    for steps in (4, 1):  # the loss says it after four, the change alone after one
        with pytest.raises(HyperbloomError, match="training diverged"):
            worker.answer(train_order(round=2, learning_rate=1e30, steps=steps, codec=Codec.parse("int8")))
    result = worker.answer(train_order(round=3, codec=Codec.parse("int8")))
    assert result.encoded is not None
    assert float(Codec("int8", "int8").decode(result.encoded, FULL).norm()) < 100


def test_weights_that_no_server_takes_are_a_training_that_diverged(make_worker: MakeWorker) -> None:
    """The loss of the only step is of the weights before it."""
    with pytest.raises(HyperbloomError, match="training diverged"):
        make_worker().answer(train_order(learning_rate=1e7, steps=1))


def test_an_order_for_more_batches_than_fit_into_memory_is_refused(make_worker: MakeWorker) -> None:
    with pytest.raises(WireError, match=r"order: expected at most 134217728 examples in all steps, found 100000 steps"):
        draw_batches(2000, 2000, 100_000, 0)


# ---------------------------------------------------------------------- what a machine can be short of


def test_a_full_disk_is_told_and_nothing_is_half_written(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker()
    twin = Worker(dataclasses.replace(worker.settings, state_dir=worker.state.folder.with_name("twin")))
    for each in (worker, twin):
        each.answer(train_order("head", round=1))
    folder = worker.state.folder / "personal"
    (before,) = folder.iterdir()
    content = before.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(DiskError) as caught:
            worker.answer(train_order("head", round=2))
    assert str(caught.value) == "the client cannot write its state: No space left on device"
    assert list(folder.iterdir()) == [before] and before.read_bytes() == content
    # What was learned and not kept has not happened: the next round goes on from the disk.
    results = [each.answer(train_order("head", round=3)) for each in (worker, twin)]
    assert results[0].loss == results[1].loss
