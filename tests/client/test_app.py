"""The app: each order reaches its handler, and what goes wrong becomes an answer with a reason."""

import errno
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from hyperbloom.client import app as module
from hyperbloom.client.app import HANDLERS, app, serve, train_all
from hyperbloom.client.settings import ClientSettings
from hyperbloom.common.data import DataSpec
from hyperbloom.common.errors import HyperbloomError
from hyperbloom.common.layout import Weights
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.newcomers import Delivery
from hyperbloom.common.wire.orders import Failed, Greeting, Introduction, Notice, Order, TrainResult
from hyperbloom.common.wire.pack import pack, unpack_answer

from .newcomer.offers import offer
from .orders import FULL, Worker, change, evaluate_order, train_order

NODE = 5
MakeWorker = Callable[..., Worker]


@pytest.fixture(autouse=True)
def identity() -> None:
    """Give this process the identity that Flower's messages ask for."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


def context(settings: ClientSettings) -> Context:
    return Context(1, NODE, settings.to_node_config(), RecordDict(), {})


def message(order: Order) -> Message:
    return Message(pack(order), NODE, order.message_type)


def ask(worker: Worker, order: Order) -> object:
    """Return what the app answers to an order."""
    return unpack_answer(order.answer, app(message(order), context(worker.settings)).content)


def subclasses(kind: type) -> set[type]:
    return {kind, *(found for each in kind.__subclasses__() for found in subclasses(each))}


def test_there_is_a_handler_for_every_order() -> None:
    """What is delivered to newcomers is for another app."""
    kinds = {kind for kind in subclasses(Order) - {Order} if kind.__module__.startswith(("hyperbloom.", "figures."))}
    assert kinds == {*HANDLERS, Delivery}
    assert len({kind.message_type for kind in HANDLERS}) == len(HANDLERS)


def test_an_order_gets_its_answer(make_worker: MakeWorker) -> None:
    worker = make_worker("ward-7")
    introduction = ask(worker, Greeting("0.1.0"))
    assert isinstance(introduction, Introduction) and introduction.client_id == "ward-7"
    result = ask(worker, train_order(reply="weights"))
    assert isinstance(result, TrainResult) and result.weights is not None
    assert torch.equal(result.weights.values, worker.answer(train_order(reply="weights")).weights.values)
    assert ask(worker, Notice("finished", "done")) == Notice("finished", "done")


def test_an_order_that_is_not_finite_is_told_as_the_orders_fault(make_worker: MakeWorker) -> None:
    order = train_order()
    assert order.weights is not None
    order.weights.values.fill_(torch.nan)
    answer = ask(make_worker("ward-7"), order)
    assert isinstance(answer, Failed) and answer.text.startswith("order: tensor ")


def test_what_is_wrong_with_the_data_stays_in_the_clients_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A SuperNode reads its data when it is asked who it is, and the line that names a cell went to the server."""
    (tmp_path / "t.csv").write_text("age,ill\n" + "50,no\n60,yes\n" * 9 + "70,\n")
    settings = ClientSettings("ward-7", DataSpec(str(tmp_path / "t.csv"), label="ill"), state_dir=tmp_path)
    with caplog.at_level(logging.ERROR):
        answer = unpack_answer(Greeting.answer, app(message(Greeting("0.1.0")), context(settings)).content)
    assert answer == Failed(Reason.FAILED, "its data or settings cannot be used; its own log says why")
    assert "row 20, column 'ill': expected a label" in caplog.text


def test_a_servers_line_names_no_file_of_the_machine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = ClientSettings("ward-7", DataSpec("digits"), state_dir=tmp_path, key=tmp_path / "ward.pem")
    with caplog.at_level(logging.ERROR):
        answer = unpack_answer(Greeting.answer, app(message(Greeting("0.1.0")), context(settings)).content)
    assert answer == Failed(Reason.FAILED, "its data or settings cannot be used; its own log says why")
    assert "ward.pem" in caplog.text


def test_a_client_at_a_server_of_models_on_demand_is_told_what_to_run(make_worker: MakeWorker) -> None:
    answer = ask(make_worker("ward-7"), offer())
    assert answer == Failed(Reason.FAILED, "this server gives models on demand: flower-client join")


def test_an_order_that_cannot_be_carried_out_is_answered_with_a_reason(
    make_worker: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker("ward-7")
    with caplog.at_level(logging.ERROR, "hyperbloom.client"):
        unfit = ask(worker, train_order(num_classes=9))
    assert unfit == Failed(Reason.UNFIT, "order: 9 classes, but this client's data have 10")
    (record,) = caplog.records
    assert record.getMessage() == "train failed: order: 9 classes, but this client's data have 10"
    assert record.exc_info is None
    diverged = ask(worker, train_order(learning_rate=1e30))
    assert isinstance(diverged, Failed) and diverged.reason is Reason.DIVERGED
    strict = Worker(replace(worker.settings, min_noise=1.0))
    forbidden = ask(strict, train_order())
    assert isinstance(forbidden, Failed) and forbidden.reason is Reason.FORBIDDEN


def test_a_score_that_no_server_takes_is_a_model_that_has_diverged(make_worker: MakeWorker) -> None:
    """Else the server would take it for a lie, and the client into quarantine."""
    huge = Weights(FULL, torch.full((FULL.numel,), 1e30))
    answer = ask(make_worker("ward-7"), evaluate_order(weights=huge))
    assert isinstance(answer, Failed) and answer.reason is Reason.DIVERGED
    assert "expected a loss of at most 1e+30" in answer.text and "scale the inputs" in answer.text


def test_content_that_is_no_order_is_answered_with_a_reason(make_worker: MakeWorker) -> None:
    order = Message(pack(Notice("a", "b")), NODE, "train")
    answer = unpack_answer(TrainResult, app(order, context(make_worker().settings)).content)
    assert isinstance(answer, Failed) and answer.reason is Reason.UNFIT
    assert answer.text.startswith("order: TrainOrder.scope.run_id is missing")


def test_a_full_disk_is_told_without_its_path(make_worker: MakeWorker) -> None:
    def full(_: Context, __: Greeting) -> Introduction:
        raise OSError(errno.ENOSPC, "No space left on device", "/home/somebody/schema.json")

    own = ClientApp()
    serve(own, Greeting, full)
    greeted = own(message(Greeting("1")), context(make_worker("ward-7").settings))
    told = Failed(Reason.FAILED, "the client cannot write its state: No space left on device")
    assert unpack_answer(Introduction, greeted.content) == told


def test_a_defect_goes_on_to_flower() -> None:
    def defect(_: Context, __: Greeting) -> Introduction:
        raise ZeroDivisionError

    own = ClientApp()
    serve(own, Greeting, defect)
    with pytest.raises(ZeroDivisionError):
        own(message(Greeting("0")), context(ClientSettings("a")))


def test_virtual_clients_that_train_at_once_answer_as_the_app_does(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [make_worker(name) for name in ("a", "b", "c")]
    orders = [train_order(), train_order(), train_order(num_classes=9)]
    messages = [(message(order), context(worker.settings)) for order, worker in zip(orders, workers, strict=True)]
    replies = train_all(messages)
    answers = [unpack_answer(TrainResult, reply.content) for reply in replies if isinstance(reply, Message)]
    assert [type(answer) for answer in answers] == [TrainResult, TrainResult, Failed]
    for reply, (asked, _) in zip(replies, messages, strict=True):
        assert isinstance(reply, Message)
        assert reply.metadata.reply_to_message_id == asked.metadata.message_id
    monkeypatch.setattr(module, "train_together", lambda tasks: [ZeroDivisionError() for _ in tasks])
    assert [type(reply) for reply in train_all(messages[:2])] == [ZeroDivisionError] * 2


def test_errors_have_the_reason_of_their_class_unless_they_say_another(make_worker: MakeWorker) -> None:
    worker = make_worker()
    order = change(train_order(), model="lenet")
    with pytest.raises(HyperbloomError) as caught:
        worker.answer(order)
    assert ask(worker, order) == Failed(Reason.UNFIT, str(caught.value))
