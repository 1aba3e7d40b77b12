"""One client's work: which orders it takes, what it sends back, what it keeps."""

import contextlib
import dataclasses
import errno
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyperbloom import __version__
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work import evaluation, methods, networks, sgd
from hyperbloom.client.work.client import LOADED_CLIENTS, client_for
from hyperbloom.client.work.sgd import draw_batches
from hyperbloom.common.compression import Codec
from hyperbloom.common.data import DataSpec, load_client_data
from hyperbloom.common.errors import DataError, HyperbloomError, ModelError, WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.methods import PFedMe
from hyperbloom.common.models import MODELS, ModelSpec, build, head_layout
from hyperbloom.common.seeds import derive
from hyperbloom.common.wire.orders import EvaluateOrder, EvaluateResult, Greeting, Scope, TrainOrder
from hyperbloom.common.wire.weights import Weights

from ..conftest import SHARE
from ..orders import BODY, FULL, LAYOUTS, SPEC, Worker, answer, evaluate_order, initial, train_order, values_of

MakeWorker = Callable[..., Worker]
REPLY = "order: expected reply in ('delta', 'weights', 'nothing') and 1 to 100000 steps, found "


def forget_personal(worker: Worker) -> None:
    """Delete what run-1 left on the disk, so that the next process of this client starts afresh."""
    (worker.state.folder / "personal" / "run-1.safetensors").unlink(missing_ok=True)


# ---------------------------------------------------------------------- what it says of itself


def test_an_introduction_holds_sizes_and_no_data(make_worker: MakeWorker) -> None:
    worker = make_worker("ward-7", size="S")
    data = load_client_data(SHARE)
    about = worker.answer(Greeting(__version__))
    assert (about.client_id, about.version, about.size) == ("ward-7", __version__, "S")
    assert (about.input_shape, about.num_classes) == ((1, 8, 8), 10)
    assert (about.train_examples, about.val_examples, about.test_examples) == (40, len(data.val), len(data.test))
    assert about.class_shares == ()
    assert about.token == worker.state.token()


def test_class_shares_are_told_only_if_that_was_wished(make_worker: MakeWorker) -> None:
    shares = make_worker(disclose=True).answer(Greeting(__version__)).class_shares
    assert len(shares) == 10
    assert sum(shares) == pytest.approx(1)
    assert shares == pytest.approx(load_client_data(SHARE).class_shares.tolist())


def test_data_that_cannot_be_loaded_are_told_before_anything_else(make_worker: MakeWorker) -> None:
    with pytest.raises(DataError, match="found 'nowhere'"):
        make_worker(data=DataSpec("nowhere"))


def test_a_process_loads_the_data_of_the_same_settings_once() -> None:
    settings = ClientSettings("a", SHARE, "cpu")
    worker = client_for(settings)
    assert client_for(ClientSettings("a", SHARE, "cpu")) is worker
    assert client_for(ClientSettings("b", SHARE, "cpu")) is not worker


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
            f"{REPLY}'gradient', (4,) steps",
        ),
        (
            train_order(steps=0),
            WireError,
            f"{REPLY}'delta', (0,) steps",
        ),
        (
            train_order(steps=100_001),
            WireError,
            f"{REPLY}'delta', (100001,) steps",
        ),
        (
            train_order(batch_size=0),
            WireError,
            f"{REPLY}'delta', (4,) steps",
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

HEADS = head_layout(SPEC)
COPY = PFedMe(lamda=3.0, inner_steps=2, inner_rate=0.1)


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
    monkeypatch.setattr(networks, "build", lambda spec: built.append(spec) or build(spec))
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


def test_a_process_keeps_a_limited_number_of_clients_loaded(make_worker: MakeWorker) -> None:
    first = ClientSettings("client-0", SHARE, "cpu", state_dir=make_worker("client-0").state.folder)
    loaded = [client_for(first)]
    answer(loaded[0], train_order("head"))
    for index in range(LOADED_CLIENTS):
        client_for(ClientSettings(f"other-{index}", SHARE, "cpu"))
    loaded.append(client_for(first))
    assert loaded[0] is not loaded[1]
    assert answer(loaded[1], evaluate_order("head")) == answer(loaded[0], evaluate_order("head"))


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


def test_each_run_starts_with_a_fresh_head_and_finds_its_own_again(make_worker: MakeWorker) -> None:
    worker = make_worker()
    fresh = worker.answer(evaluate_order("head"))
    worker.answer(train_order("head"))
    trained = worker.answer(evaluate_order("head"))
    assert trained != fresh
    assert worker.answer(evaluate_order("head", run_id="run-2")) == fresh
    assert worker.answer(evaluate_order("head")) == trained


def test_evaluation_is_on_validation_and_test_examples_with_the_weights_sent(make_worker: MakeWorker) -> None:
    data = load_client_data(SHARE)
    torch.manual_seed(0)
    module = build(SPEC)
    counts = []
    for part in (data.val, data.test):
        logits = module(part.inputs)
        counts += [int((logits.argmax(1) == part.labels).sum()), len(part)]
    result = make_worker().answer(evaluate_order())
    assert isinstance(result, EvaluateResult)
    assert [result.val.correct, result.val.total, result.test.correct, result.test.total] == counts
    assert result.val.loss == pytest.approx(
        nn.functional.cross_entropy(module(data.val.inputs), data.val.labels).item(), rel=1e-5
    )
    assert result.test.loss == pytest.approx(
        nn.functional.cross_entropy(module(data.test.inputs), data.test.labels).item(), rel=1e-5
    )


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


# ---------------------------------------------------------------------- what a machine can be short of


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_is_told_and_the_client_lives_on(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    worker = make_worker()
    twin = Worker(dataclasses.replace(worker.settings, state_dir=worker.state.folder.with_name("twin")))
    expected = twin.answer(train_order("head"))

    def starved(*arguments: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(methods, "train", starved)
        patch.setattr(evaluation, "evaluate", starved)
        with pytest.raises(HyperbloomError, match=r"memory is not enough; lower local\.batch_size"):
            worker.answer(train_order("head"))
        with pytest.raises(HyperbloomError, match="memory is not enough"):
            worker.answer(evaluate_order("head"))
    result = worker.answer(train_order("head"))
    assert result.loss == expected.loss and result.weights is not None and expected.weights is not None
    assert torch.equal(result.weights.values, expected.weights.values)


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
        with pytest.raises(HyperbloomError) as caught:
            worker.answer(train_order("head", round=2))
    assert str(caught.value) == "the client cannot write its state: No space left on device"
    assert list(folder.iterdir()) == [before] and before.read_bytes() == content
    # What was learned and not kept has not happened: the next round goes on from the disk.
    results = [each.answer(train_order("head", round=3)) for each in (worker, twin)]
    assert results[0].loss == results[1].loss
