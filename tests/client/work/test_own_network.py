"""A client's own model: what is told of it, which orders it takes, and how it is trained, scored and refined."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from figures.pfl_client import ErrorsOrder, MomentsOrder, TryOrder
from hyperbloom import __version__
from hyperbloom.client.keep.state import ClientState
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work import networks
from hyperbloom.client.work.own_network import make_network, own_graph
from hyperbloom.client.work.scoring import settle_norms
from hyperbloom.client.work.sgd import draw_batches
from hyperbloom.common.alignment import digest_of, reference_weights
from hyperbloom.common.data import DataSpec, Examples
from hyperbloom.common.errors import HyperbloomError, ModelError, WireError
from hyperbloom.common.graphs import LayerType, Settings
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.models import ModelSpec, build_own
from hyperbloom.common.seeds import derive
from hyperbloom.common.wire.exchanges import ReferenceOrder, RepresentOrder
from hyperbloom.common.wire.orders import EvaluateOrder, Greeting, Order, TrainOrder

from ..conftest import SHARE
from ..orders import Worker, arrange, train_order
from .own import GRAPH, SPEC, hypernetwork, ordered, parts, to_evaluate


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    """Return a client with a model of its own."""
    return Worker(ClientSettings("ward-7", SHARE, "cpu", "S", tmp_path / "ward-7", model="plain-4"))


@pytest.fixture
def disclosing(worker: Worker) -> Worker:
    """Return one whose server may know the graph."""
    return Worker(dataclasses.replace(worker.settings, disclose="graph"))


def to_train(**changes: Any) -> TrainOrder:
    """Return the order of strategy `ghn`."""
    steps = {"learning_rate": 0.05, "weight_decay": 1e-2, "clip": 1e9, "reply": "weights"}
    return train_order(**ordered(**steps | changes))


# ---------------------------------------------------------------------- what is told


def test_a_model_that_cannot_be_represented_ends_the_start(tmp_path: Path) -> None:
    settings = ClientSettings("a", SHARE, "cpu", "S", tmp_path, model="lenet")
    with pytest.raises(ModelError):
        Worker(settings)


def test_a_model_for_other_labels_ends_the_start(tmp_path: Path) -> None:
    message = r"^unet: expected outputs \(10,\) of an input for classification, found \(10, 8, 8\)$"
    with pytest.raises(ModelError, match=message):
        Worker(ClientSettings("a", SHARE, "cpu", "S", tmp_path, model="unet"))


def test_why_an_own_model_cannot_be_used_is_logged_in_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = DataSpec(split="iid", partitions=6, max_train=40)
    worker = Worker(ClientSettings("a", data, "cpu", "S", tmp_path, model="tests.client.work.test_own_network:hooked"))
    caplog.clear()
    with pytest.raises(HyperbloomError, match=r"^the client's own model fails; .* server.log in the run folder$"):
        worker.answer(Greeting(__version__, "types"))
    (record,) = caplog.records
    assert record.getMessage() == (
        "the own model cannot be used here: 1: cannot represent ParametrizedLinear with parameters bias, "
        "parametrizations.weight.original0, parametrizations.weight.original1"
    )
    assert record.exc_info is None


def hooked(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a network without a graph."""
    return nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(64, num_classes)))


def test_looking_at_an_own_model_draws_no_random_numbers() -> None:
    own_graph.cache_clear()
    state = torch.random.get_rng_state()
    own_graph(SPEC)
    assert torch.equal(torch.random.get_rng_state(), state)


# ---------------------------------------------------------------------- refused orders


def renamed(weights: Weights, old: str, new: str) -> Weights:
    """Return weights with another name in their layout."""
    return Weights(Layout(tuple((n.replace(old, new), s) for n, s in weights.layout.shapes)), weights.values)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (to_train(weights=None), "order: expected parts of the hypernetwork, found none"),
        (to_train(hypernetwork="[]"), "order: hypernetwork: Input should be an object"),
        (to_train(hypernetwork=Settings(layers=2, latent=8, hidden=4096).model_dump_json()), "expected at most"),
        (
            to_train(hypernetwork=Settings(layers=3, latent=8, hidden=4).model_dump_json()),
            "expected at most|is missing",
        ),
        (
            to_train(weights=parts(hypernetwork(types=GRAPH.types[1:]))),
            "expected at most|is missing",
        ),
        (
            to_train(weights=parts(hypernetwork(types=(*GRAPH.types, LayerType.parse("linear 9,9 wb"))))),
            "is missing|not",
        ),
        (to_train(weights=renamed(parts(hypernetwork()), "types.input", "types.inputs")), "it is missing"),
        (
            to_evaluate(epochs=101, rate=0.1, batch=8),
            "1 to 100 epochs with a rate and batches",
        ),
        (to_evaluate(epochs=0, rate=0.1, batch=8), "1 to 100 epochs with a rate and batches"),
        (to_evaluate(epochs=1, rate=0.1, batch=0), "1 to 100 epochs"),
    ],
)
def test_orders_that_do_not_fit_are_refused(worker: Worker, order: TrainOrder | EvaluateOrder, message: str) -> None:
    with pytest.raises((WireError, HyperbloomError), match=message):
        worker.answer(order)


def test_a_client_without_a_model_of_its_own_says_so(make_worker: Callable[..., Worker]) -> None:
    with pytest.raises(WireError, match="for the client's own model, but this client has none; join with --model"):
        make_worker().answer(to_train())


WRONG = Weights(Layout((("x", (3,)),)), torch.zeros(3))
ONE_NAME_OFF = Weights(Layout((*GRAPH.layout.shapes[:-1], ("zzz", (10,)))), torch.zeros(GRAPH.layout.numel))
EXACT = Weights(GRAPH.layout, torch.zeros(GRAPH.layout.numel))
FEATURES = dict(GRAPH.layout.shapes)["head.weight"][1]
TOO_MANY = Weights(
    Layout((*parts(hypernetwork()).layout.shapes, ("x", (1,)))),
    torch.cat([parts(hypernetwork()).values, torch.ones(1)]),
)
GUESSES: list[dict[str, Any]] = [
    {"hypernetwork": None, "weights": WRONG},
    {"hypernetwork": None, "weights": ONE_NAME_OFF},
    {"hypernetwork": None, "weights": EXACT},
    *({"hypernetwork": None, "weights": WRONG, "private": private} for private in ("head", "body", "all", "copy")),
    {"weights": TOO_MANY, "private": "body"},
    {"private": "copy"},
]


@pytest.mark.parametrize("guess", GUESSES, ids=map(str, range(len(GUESSES))))
def test_no_order_finds_out_names_and_shapes_that_a_client_does_not_disclose(
    guess: dict[str, Any], worker: Worker
) -> None:
    reference = reference_weights(torch.zeros(4, 1, 8, 8))
    worker.answer(ReferenceOrder(digest_of(reference), reference))
    more: dict[type[Order], dict[str, Any]] = {
        TrainOrder: vars(to_train().sgd) | {"reply": "weights"},
        EvaluateOrder: {},
        RepresentOrder: {"reference": digest_of(reference), "rows": 4, "draw": 0},
        TryOrder: {"together": False},
        MomentsOrder: {},
        ErrorsOrder: {"sign": 1, "classifiers": WRONG},
    }
    for kind, values in more.items():
        about = {"run_id": "run-1", "seed": 5, "num_classes": 10} | ordered(**guess)
        if kind is RepresentOrder:
            del about["weights"]
        order = arrange(kind, **about | values)
        with pytest.raises(HyperbloomError) as refused:
            worker.answer(order)
        said = str(refused.value)
        told = [name for name, _ in GRAPH.layout.shapes if name in said]
        assert not told and "tensor " not in said and str(FEATURES) not in said, said


def test_what_depends_on_the_sizes_of_layers_is_not_computed_with_a_model_that_stays_at_home(worker: Worker) -> None:
    values = vars(to_evaluate(model="mlp", private="all", weights=None))
    for order in (
        MomentsOrder(**values),
        ErrorsOrder(**values, sign=1, classifiers=WRONG),
        TryOrder(**values, together=False),
    ):
        with pytest.raises(WireError, match="expected a model that the server chose, found the client's own"):
            worker.answer(order)


def test_an_own_model_that_stays_at_home_takes_no_weights_however_they_are_named(worker: Worker) -> None:
    full = Layout.of(build_own(SPEC))  # a dictionary with all names in it would tell that they are among them
    guess = Weights(full, torch.zeros(full.numel))
    loss = [
        worker.answer(to_evaluate(run_id=run, model="mlp", private="all", weights=weights)).test.loss
        for run, weights in (("run-1", None), ("run-2", guess))
    ]
    assert loss[0] == loss[1] != pytest.approx(math.log(10), abs=1e-4)


@pytest.mark.parametrize("pattern", ["head", "zzz", "*"])
def test_whether_a_pattern_matches_names_of_an_own_model_is_not_told(worker: Worker, pattern: str) -> None:
    changes = {"model": "mlp", "private": "all", "weights": None, "adapt": f"lora:r=1,targets={pattern}"}
    with pytest.raises(
        WireError, match=r"^order: expected no layers' names for the client's own model, found a pattern"
    ):
        worker.answer(to_evaluate(**changes))


def test_what_is_missing_for_a_way_to_adapt_an_own_model_is_not_told(tmp_path: Path) -> None:
    worker = Worker(ClientSettings("ward-7", SHARE, "cpu", "S", tmp_path, model="mlp"))
    with pytest.raises(HyperbloomError, match=r"^the client's own model fails; the client's log says how"):
        worker.answer(to_evaluate(model="mlp", private="all", weights=None, adapt="norms"))


def test_an_order_that_brings_the_wrong_weights_to_a_disclosed_graph_is_told_which(disclosing: Worker) -> None:
    with pytest.raises(WireError, match=r"^tensor .*weight: expected with shape"):
        disclosing.answer(to_train(hypernetwork=None, weights=WRONG))


def test_a_server_cannot_name_a_function_to_call(worker: Worker) -> None:
    with pytest.raises(ModelError, match="model: expected one of"):
        worker.answer(to_train(model="os:getcwd"))


# ---------------------------------------------------------------------- training


def batches(worker: Worker) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of `train_order`."""
    data = worker.train_data
    for rows in draw_batches(len(data), 8, 4, derive(5, "ward-7", 2)):
        yield data.inputs[rows], data.labels[rows]


def test_steps_are_those_of_torchs_sgd_on_the_hypernetwork(worker: Worker) -> None:
    result = worker.answer(to_train())
    network, target = hypernetwork(), build_own(SPEC)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    losses = []
    for inputs, labels in batches(worker):
        optimizer.zero_grad()
        weights = GRAPH.layout.views(network(GRAPH))
        loss = F.cross_entropy(torch.func.functional_call(target, weights, (inputs,)), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert result.loss == pytest.approx(sum(losses) / 4, rel=1e-5)
    assert result.weights is not None
    torch.testing.assert_close(result.weights.values, parts(network).values, rtol=0, atol=1e-5)
    assert result.weights.layout == Layout.of(network)


def test_steps_on_weights_that_arrive_are_those_of_torchs_sgd(disclosing: Worker) -> None:
    sent = hypernetwork()(GRAPH).detach()
    order = to_train(hypernetwork=None, weights=Weights(GRAPH.layout, sent), reply="delta")
    result = disclosing.answer(order)
    target = build_own(SPEC)
    target.load_state_dict({**target.state_dict(), **GRAPH.layout.views(sent)})
    optimizer = torch.optim.SGD(target.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    for inputs, labels in batches(disclosing):
        optimizer.zero_grad()
        F.cross_entropy(target(inputs), labels).backward()
        optimizer.step()
    assert result.weights is not None
    trained = GRAPH.layout.flatten(dict(target.named_parameters()))
    torch.testing.assert_close(result.weights.values, trained - sent, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- evaluation


def test_running_statistics_are_those_of_the_clients_examples() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2), nn.BatchNorm1d(2))
    inputs = torch.randn(50, 3)
    module(inputs * 9)  # statistics of something else
    settle_norms(module, Examples(inputs, torch.zeros(50, dtype=torch.long)))
    first = module[0](inputs)
    norm, last = module[1], module[4]
    torch.testing.assert_close(norm.running_mean, first.mean(0))
    torch.testing.assert_close(norm.running_var, first.var(0))
    then = module[3](F.batch_norm(first, None, None, norm.weight, norm.bias, training=True))  # no dropout
    torch.testing.assert_close(last.running_mean, then.mean(0))
    assert norm.momentum == last.momentum == 0.1


def test_a_score_does_not_depend_on_whom_the_process_served_before(worker: Worker, disclosing: Worker) -> None:
    fresh = worker.answer(to_evaluate())
    worker.answer(to_train(learning_rate=0.5))
    assert worker.answer(to_evaluate()) == fresh
    plain = to_evaluate(hypernetwork=None, weights=Weights(GRAPH.layout, hypernetwork()(GRAPH).detach()))
    assert disclosing.answer(plain) == fresh  # whoever generates the weights


def test_what_fails_while_a_scored_model_is_kept_is_not_told(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("tensors share memory: body.0.weight")

    monkeypatch.setattr(ClientState, "save_scored", fails)
    with pytest.raises(HyperbloomError, match=r"^the client's own model fails; .* server.log in the run folder$"):
        worker.answer(to_evaluate())


def fourier(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a network with a random buffer."""
    network = nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))
    network(torch.zeros(1, *input_shape))
    network.register_buffer("frequencies", torch.randn(8))
    return network


def test_random_buffers_of_an_own_model_are_alike_at_every_start() -> None:
    spec, device = ModelSpec(f"{__name__}:fourier", "S", (1, 8, 8), 10), torch.device("cpu")
    makers = (
        lambda: networks._private_network.__wrapped__(spec, device),
        lambda: make_network(spec, None, device),
    )
    for make in makers:
        first, second = (make().module.get_buffer("frequencies") for _ in range(2))
        assert torch.equal(first, second)
