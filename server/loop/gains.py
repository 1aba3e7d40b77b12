"""Does the federation pay? Each client compares its model with one that it trains alone."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hyperbloom.common.errors import WireError
from hyperbloom.common.gains import Gain
from hyperbloom.common.layout import Weights
from hyperbloom.common.metrics import scale_of
from hyperbloom.common.wire.orders import LARGEST_LOSS, CompareOrder, CompareResult, EvaluateOrder, Order
from hyperbloom.server.loop.exchange import Director, Outcome
from hyperbloom.server.loop.rounds import Run
from hyperbloom.strategies.exchange import Ask, Client, Exchanges, through


def check_gain(gain: Gain, metric: str) -> None:
    """Raise a WireError if what a client says that it gains cannot be."""
    scale, test = scale_of(metric), dict(zip(gain.models, gain.test, strict=True))
    most, near = 1.0 if scale.percent else LARGEST_LOSS, 1e-5 * max(1.0, abs(gain.value))  # it computes in float32
    near += gain.high - gain.low  # a bootstrap of few examples may leave out the value itself
    value = (test[gain.chosen] - test["alone"]) * scale.sign
    within = gain.low - near <= gain.value <= gain.high + near
    if max(map(abs, (gain.low, gain.high, *gain.test))) > most or not within or not math.isclose(gain.value, value):
        raise WireError(f"gain: expected a difference of two values of {metric} up to {most:g}, found {gain}")


PATIENCE = 10  # training alone takes as long as all rounds of a client; in units of `round_timeout_s`


def rounds_alone(run: Run, done: int) -> int:
    """Return how often a client has trained in the `done` rounds of a run, on average."""
    trained = sum(map(run.may_train, run.federation.roster))  # here now, or not
    return math.ceil(done * min(1.0, run.config.cohort / max(1, trained)))


def ask_gains(run: Run, number: int, rounds: int) -> None:
    """Let idle clients that are not novel compare their models of round `number`; tell the listeners what they gain.

    Each trains `rounds` rounds alone. Only some disclose what they gain.
    """
    config, gains, metric = run.config, dict[str, Gain](), run.algorithm.metrics[0]
    commons: dict[str, Weights | None] = {}  # by size
    sgd, decays = run.turn(1).sgd, config.local.schedule == "cosine"
    clients = [client for client in run.federation.idle if not config.is_novel(client.row)]

    def compared(client: Client, order: Order) -> Order:
        if type(order) is not EvaluateOrder:
            return order
        common, size = None, client.about.size
        if order.target.private == "none":
            common = commons[size] = commons[size] if size in commons else run.algorithm.common(client)
        if common and order.weights and torch.equal(common.values, order.weights.values):
            common = None  # the client has it
        return CompareOrder(**vars(order), sgd=sgd, decays=decays, rounds=rounds, common=common)

    def play(wanted: Ask[Any]) -> Exchanges[Any]:
        def orders(some: Sequence[Client]) -> list[Order]:
            return [compared(client, order) for client, order in zip(some, wanted.orders(some), strict=True)]

        def check(client: Client, answer: Any) -> None:
            wanted.check(client, answer)
            if isinstance(answer, CompareResult) and answer.gain is not None:
                check_gain(answer.gain, metric)

        answers = yield replace(wanted, orders=orders, check=check, size=2 * wanted.size)
        told = [(client.client_id, answer.gain) for client, answer in answers if isinstance(answer, CompareResult)]
        gains.update((name, gain) for name, gain in told if gain is not None)
        return answers

    for listener in run.listeners:
        listener.event(
            "each client now trains alone, to compare, which may take longer than the run; gains: false leaves it out"
        )
    outcome, most = Outcome(), PATIENCE * config.round_timeout_s
    director = Director(run.federation, config.model_copy(update={"round_timeout_s": most}))
    director.play(through(run.algorithm.evaluate(run.turn(number), clients), play, Ask), outcome)
    for listener in run.listeners:
        for name, why in outcome.refused.items():
            listener.event(f"{name} has not compared its model with training alone: {why}")
        listener.gained(dict(sorted(gains.items())), metric, number)
