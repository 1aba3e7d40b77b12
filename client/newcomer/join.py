"""A newcomer over Flower: a `ClientApp` that only answers an offer and receives a delivery."""

from flwr.app import Context
from flwr.clientapp import ClientApp

from hyperbloom.client.app import serve
from hyperbloom.client.link.runtime import run_client
from hyperbloom.client.link.server import Link
from hyperbloom.client.newcomer.newcomer import DECLINED, Newcomer
from hyperbloom.common.errors import RefusedError
from hyperbloom.common.wire.newcomers import Delivery, Offer
from hyperbloom.common.wire.orders import Failed, Greeting, Notice


def newcomer_app(newcomer: Newcomer) -> ClientApp:
    """Return the app of one newcomer."""

    def decline(_: Context, __: Greeting) -> Failed:
        newcomer.failure = newcomer.failure or RefusedError(
            "this server trains a federation; models on demand are given by `flower-server serve`"
        )
        return DECLINED

    def receive(_: Context, delivery: Delivery) -> Notice:
        newcomer.receive(delivery)
        return Notice("received", "")

    app = ClientApp()
    serve(app, Greeting, decline)
    serve(app, Offer, lambda _, offer: newcomer.describe(offer))
    serve(app, Delivery, receive)
    serve(app, Notice, lambda _, notice: notice)
    return app


def join(link: Link, newcomer: Newcomer) -> None:
    """Stay connected until the newcomer has its weights.

    Raises:
        HyperbloomError: the newcomer's data or settings do not fit.
        RefusedError: the server gives no weights.
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
