"""The `ClientApp`: unpack, work, pack. The same under `flower-client`, a stock SuperNode and in one process."""

from collections.abc import Sequence

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.vectorised import train_together
from hyperbloom.client.worker import Worker, worker_for
from hyperbloom.common.attempt import attempt
from hyperbloom.common.messages import (
    BackpropOrder,
    ConfirmOrder,
    DescribeOrder,
    ErrorsOrder,
    EvaluateOrder,
    FitOrder,
    Greeting,
    KeysOrder,
    MaskedOrder,
    MomentsOrder,
    Notice,
    ReferenceOrder,
    RepresentOrder,
    SharesOrder,
    TrainOrder,
    TryOrder,
    UnmaskOrder,
)

__all__ = ["app", "train_all"]

app = ClientApp()


@app.query("greet")
def greet(message: Message, context: Context) -> Message:
    """Tell the server who this client is."""
    greeting = Greeting.unpack(message.content)
    return Message(
        _worker(context).introduce(greeting.asks, greeting.norms, greeting.reference).pack(), reply_to=message
    )


@app.query("notice")
def notice(message: Message, context: Context) -> Message:
    """Take note that the server refuses this client, or that the run is over; the live client acts on it."""
    notice = Notice.unpack(message.content)
    if notice.complete is not None:
        _worker(context).state.forget_earlier(notice.complete)
    return Message(notice.pack(), reply_to=message)


@app.query("reference")
def reference(message: Message, context: Context) -> Message:
    """Keep the inputs on which networks are compared."""
    order = ReferenceOrder.unpack(message.content)
    return Message(_worker(context).keep_reference(order).pack(), reply_to=message)


@app.query("represent")
def represent(message: Message, context: Context) -> Message:
    """Tell what this client's network makes of them."""
    order = RepresentOrder.unpack(message.content)
    return Message(_worker(context).represent(order).pack(), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on this client's data."""
    order = TrainOrder.unpack(message.content)
    return Message(_worker(context).train(order).pack(), reply_to=message)


@app.train("describe")
def describe(message: Message, context: Context) -> Message:
    """Encode this client's examples."""
    order = DescribeOrder.unpack(message.content)
    return Message(_worker(context).describe(order).pack(), reply_to=message)


@app.train("backprop")
def backprop(message: Message, context: Context) -> Message:
    """Take a gradient back through the encoder."""
    order = BackpropOrder.unpack(message.content)
    return Message(_worker(context).backprop(order).pack(), reply_to=message)


@app.train("fit")
def fit(message: Message, context: Context) -> Message:
    """Train on this client's data, and fit the encoder to it."""
    order = FitOrder.unpack(message.content)
    return Message(_worker(context).fit(order).pack(), reply_to=message)


@app.train("keys")
def keys(message: Message, context: Context) -> Message:
    """Begin a round of secure aggregation."""
    order = KeysOrder.unpack(message.content)
    return Message(_worker(context).make_keys(order).pack(), reply_to=message)


@app.train("shares")
def shares(message: Message, context: Context) -> Message:
    """Deal shares of the secrets of this round."""
    order = SharesOrder.unpack(message.content)
    return Message(_worker(context).deal_shares(order).pack(), reply_to=message)


@app.train("masked")
def masked(message: Message, context: Context) -> Message:
    """Train on this client's data, and mask what leaves it."""
    order = MaskedOrder.unpack(message.content)
    return Message(_worker(context).train_masked(order).pack(), reply_to=message)


@app.train("confirm")
def confirm(message: Message, context: Context) -> Message:
    """Sign whose changes are in the sum."""
    order = ConfirmOrder.unpack(message.content)
    return Message(_worker(context).confirm(order).pack(), reply_to=message)


@app.train("unmask")
def unmask(message: Message, context: Context) -> Message:
    """Reveal what takes the masks off the sum."""
    order = UnmaskOrder.unpack(message.content)
    return Message(_worker(context).unmask(order).pack(), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate on this client's validation and test data."""
    order = EvaluateOrder.unpack(message.content)
    return Message(_worker(context).evaluate(order).pack(), reply_to=message)


@app.evaluate("many")
def try_many(message: Message, context: Context) -> Message:
    """Evaluate many models on this client's validation and test data."""
    order = TryOrder.unpack(message.content)
    return Message(_worker(context).try_many(order).pack(), reply_to=message)


@app.evaluate("moments")
def moments(message: Message, context: Context) -> Message:
    """Describe this client's examples by the moments of a network's features."""
    order = MomentsOrder.unpack(message.content)
    return Message(_worker(context).moments(order).pack(), reply_to=message)


@app.evaluate("errors")
def errors(message: Message, context: Context) -> Message:
    """Say how often classifiers take this client's examples for somebody else's."""
    order = ErrorsOrder.unpack(message.content)
    return Message(_worker(context).errors(order).pack(), reply_to=message)


def train_all(messages: Sequence[tuple[Message, Context]]) -> list[Message | Exception]:
    """Return what `train` answers to each message, or raises, for virtual clients that train at once."""
    tasks = [attempt(lambda m, c: (_worker(c), TrainOrder.unpack(m.content)), *each) for each in messages]
    results = iter(train_together([task for task in tasks if not isinstance(task, Exception)]))
    outcomes = [task if isinstance(task, Exception) else next(results) for task in tasks]
    return [
        outcome if isinstance(outcome, Exception) else Message(outcome.pack(), reply_to=message)
        for outcome, (message, _) in zip(outcomes, messages, strict=True)
    ]


def _worker(context: Context) -> Worker:
    return worker_for(ClientSettings.from_node_config(context.node_config))
