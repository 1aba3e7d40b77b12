"""The `ClientApp` of all kinds of clients, which unpacks orders, calls their handlers and packs the answers."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from hyperbloom.client.keep.sent import Sent
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.client import Client, client_for
from hyperbloom.client.work.comparison import compare
from hyperbloom.client.work.encoding import backprop, describe
from hyperbloom.client.work.evaluation import evaluate_order
from hyperbloom.client.work.introduction import introduce, take_notice
from hyperbloom.client.work.masks import confirm, deal_shares, make_keys, train_masked, unmask
from hyperbloom.client.work.reference import keep_reference, represent
from hyperbloom.client.work.together import train_together
from hyperbloom.client.work.training import fit, train
from hyperbloom.common import errors
from hyperbloom.common.errors import FULL, DataError, DiskError, HyperbloomError, RefusedError, WireError, attempt
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire import exchanges, masks, orders
from hyperbloom.common.wire.newcomers import Offer
from hyperbloom.common.wire.orders import EvaluateResult, Failed, Order, TrainOrder, TrainResult
from hyperbloom.common.wire.pack import FAILED, pack, unpack, unpack_answer, weigh

log = logging.getLogger("hyperbloom.client")


def _decline(client: Client, offer: Offer) -> NoReturn:
    raise RefusedError("this server gives models on demand: flower-client join")


HANDLERS: dict[type[Order], Callable[[Client, Any], Any]] = {
    orders.Greeting: introduce,
    orders.Notice: take_notice,
    exchanges.ReferenceOrder: keep_reference,
    exchanges.RepresentOrder: represent,
    TrainOrder: train,
    exchanges.FitOrder: fit,
    exchanges.DescribeOrder: describe,
    exchanges.BackpropOrder: backprop,
    masks.KeysOrder: make_keys,
    masks.SharesOrder: deal_shares,
    masks.MaskedOrder: train_masked,
    masks.ConfirmOrder: confirm,
    masks.UnmaskOrder: unmask,
    orders.EvaluateOrder: evaluate_order,
    orders.CompareOrder: compare,
    Offer: _decline,
}
"""The handler of each kind of order, which returns the order's `answer`.

All of them raise a WireError if the order does not fit this client, and a HyperbloomError if its user does not allow
it, the own model fails, training diverges, or memory or disk are not enough.
"""


def serve(app: ClientApp, kind: type[Order], handler: Callable[[Context, Any], Any]) -> None:
    """Register a handler for a kind of order. A HyperbloomError becomes a `Failed`; Flower handles other errors."""

    def respond(message: Message, context: Context) -> Message:
        return _reply(message, attempt(lambda: handler(context, unpack(kind, message.content))))

    category, _, action = kind.message_type.partition(".")
    register = {"query": app.query, "train": app.train, "evaluate": app.evaluate}[category]
    (register(action) if action else register())(respond)


def take(kind: type[Order], handler: Callable[[Client, Any], Any]) -> None:
    """Let the clients of this process answer a kind of order."""
    HANDLERS[kind] = handler
    serve(app, kind, lambda context, order: handler(_client(context), order))


def train_all(messages: Sequence[tuple[Message, Context]]) -> list[Message | Exception]:
    """Return the app's answer to each training order, or its exception, for virtual clients that train at once."""
    tasks = [attempt(lambda m, c: (_client(c), unpack(TrainOrder, m.content)), *each) for each in messages]
    results = iter(train_together([task for task in tasks if not isinstance(task, Exception)]))
    outcomes = [task if isinstance(task, Exception) else next(results) for task in tasks]
    return [attempt(_reply, message, outcome) for outcome, (message, _) in zip(outcomes, messages, strict=True)]


def _reply(message: Message, outcome: object) -> Message:
    """Return the reply with an answer, or with a `Failed` for a HyperbloomError; raise any other exception."""
    kinds = TrainResult, EvaluateResult, exchanges.DescribeResult
    wrong = attempt(outcome.check) if isinstance(outcome, kinds) else None
    if isinstance(wrong, WireError):  # the server would take it for a lie
        outcome = HyperbloomError(
            f"{wrong}; scale the inputs and targets, or lower local.learning_rate", reason=Reason.DIVERGED
        )
    elif isinstance(outcome, OSError) and outcome.errno in FULL:
        outcome = DiskError(f"the client cannot write its state: {outcome.strerror}")
    if isinstance(outcome, HyperbloomError):
        log.error("%s failed: %s", message.metadata.message_type, outcome)
        private = isinstance(outcome, DataError | errors.ConfigError)  # it may quote a cell, or name a file
        text = "its data or settings cannot be used; its own log says why" if private else str(outcome)
        where = "order: " if isinstance(outcome, WireError) and not text.startswith("order") else ""
        outcome = Failed(outcome.reason, where + text)
    elif isinstance(outcome, Exception):
        raise outcome
    return Message(pack(outcome), reply_to=message)


def _client(context: Context) -> Client:
    return client_for(ClientSettings.from_node_config(context.node_config))


SCORED = {order.message_type: order.answer for order in (orders.EvaluateOrder, orders.CompareOrder)}


def counting(sent: Sent) -> Callable[[Message, Context], Message]:
    """Return the app of a live client, whose answers are counted before they leave."""

    def answer(message: Message, context: Context) -> Message:
        reply, kind = app(message, context), message.metadata.message_type
        outcome = attempt(unpack_answer, SCORED[kind], reply.content) if kind in SCORED else None
        score = None
        if isinstance(outcome, EvaluateResult):
            test = outcome.test
            score = {"total": test.total, "metrics": dict(zip(test.metrics, test.values, strict=True))}
        sent.add("failed" if FAILED in reply.content else kind, weigh(reply.content), score)
        return reply

    return answer


app = ClientApp()
for _kind, _handler in list(HANDLERS.items()):
    take(_kind, _handler)
