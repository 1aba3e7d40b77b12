"""A newcomer over Flower: the `ClientApp` that answers an offer and takes a delivery, and nothing else."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from hyperbloom.client.newcomer import Newcomer
from hyperbloom.client.runtime import Link, run_client
from hyperbloom.common.errors import RefusedError
from hyperbloom.common.messages import Delivery, Notice, Offer

__all__ = ["join", "newcomer_app"]


def newcomer_app(newcomer: Newcomer) -> ClientApp:
    """Return the app of one newcomer."""
    app = ClientApp()

    @app.query("greet")
    def greet(message: Message, context: Context) -> Message:
        newcomer.failure = newcomer.failure or RefusedError(
            "this server trains a federation; models on demand are given by `flower-server serve`"
        )
        return Message(Notice("declined", "").pack(), reply_to=message)

    @app.query("offer")
    def offer(message: Message, context: Context) -> Message:
        answer = newcomer.describe(Offer.unpack(message.content)) or Notice("declined", "")
        return Message(answer.pack(), reply_to=message)

    @app.query("deliver")
    def deliver(message: Message, context: Context) -> Message:
        newcomer.receive(Delivery.unpack(message.content))
        return Message(Notice("received", "").pack(), reply_to=message)

    @app.query("notice")
    def notice(message: Message, context: Context) -> Message:
        return Message(Notice.unpack(message.content).pack(), reply_to=message)

    return app


def join(link: Link, newcomer: Newcomer) -> None:
    """Stay until the newcomer has its weights.

    Raises:
        HyperbloomError: what was wrong with the newcomer's data or settings.
        RefusedError: the server gives it none.
        ConnectionFailed: the connection can never work.
    """
    try:
        run_client(link, newcomer_app(newcomer), {})
    except RefusedError:
        if newcomer.failure is None:
            raise
        raise newcomer.failure from None
    if newcomer.weights is None:
        raise RefusedError(f"{link.address} said goodbye before it gave a model; is it `flower-server serve`?")
