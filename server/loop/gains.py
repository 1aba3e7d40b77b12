"""Does the federation pay? After the last round each client compares its model with one that it trains alone."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hyperbloom.common.gains import Gain
from hyperbloom.common.wire.orders import CompareOrder, CompareResult, EvaluateOrder, Order
from hyperbloom.server.loop.exchange import Director, Outcome
from hyperbloom.server.loop.rounds import Run
from hyperbloom.strategies.exchange import Ask, Client, Exchanges, through

PATIENCE = 10  # training alone takes as long as all rounds of a client; in units of `round_timeout_s`


def ask_gains(run: Run, number: int) -> dict[str, Gain]:
    """Let every client that may train compare after round `number`; return the gains of those that disclose theirs."""
    config, sgd, gains = run.config, run.turn(1).sgd, dict[str, Gain]()
    clients = [client for client in run.federation.idle if not config.is_novel(client.row)]
    rounds = math.ceil(number * min(1.0, config.cohort / max(1, len(run.candidates()))))

    def play(wanted: Ask[Any]) -> Exchanges[Any]:
        def orders(some: Sequence[Client]) -> list[Order]:
            return [
                CompareOrder(**vars(order), sgd=sgd, rounds=rounds) if type(order) is EvaluateOrder else order
                for order in wanted.orders(some)
            ]

        answers = yield replace(wanted, orders=orders)
        told = [(client.client_id, answer.gain) for client, answer in answers if isinstance(answer, CompareResult)]
        gains.update((name, gain) for name, gain in told if gain is not None)
        return answers

    outcome, most = Outcome(), PATIENCE * config.round_timeout_s
    director = Director(run.federation, config.model_copy(update={"round_timeout_s": most}))
    director.play(through(run.algorithm.evaluate(run.turn(number), clients), play, Ask), outcome)
    for listener in run.listeners:
        for name, why in outcome.refused.items():
            listener.event(f"{name} has not compared its model with training alone: {why}")
    return dict(sorted(gains.items()))
