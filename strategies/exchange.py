"""Exchanges between an algorithm and its clients: it yields asks and receives the sound answers.

A round is a generator. It yields an `Ask`. The round loop sends the orders, checks the answers, and resumes the
generator with those that passed. Local variables carry results from one exchange to the next:

    described = yield from ask(Ask(cohort, self._describe_orders, ...))
    updates = yield from train(turn.training(cohort))
    self.learn(updates)

A client without a sound answer is missing from the answers. The algorithm must leave it out of later exchanges.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hyperbloom.common.compression import Codec
from hyperbloom.common.errors import ConfigError, describe
from hyperbloom.common.layout import Layout
from hyperbloom.common.reasons import Reason
from hyperbloom.common.seeds import derive
from hyperbloom.common.wire.orders import Introduction, Order, TrainOrder, TrainResult

AnswerT = TypeVar("AnswerT")
ReturnT = TypeVar("ReturnT")


@dataclass(frozen=True)
class Client:
    """One client as algorithms know it; `row` is its permanent place in the embedding table."""

    client_id: str
    row: int
    about: Introduction


Answers = Sequence[tuple[Client, AnswerT]]
"""Sound answers by row."""


@dataclass(frozen=True)
class Ask(Generic[AnswerT]):
    """One exchange: the clients, their orders, and the check of their answers.

    Attributes:
        clients: the clients to ask; the loop skips those that have left.
        orders: writes one order for each of some `clients`, in their order. It is called for as many clients at a time
            as memory allows.
        check: raises a WireError for an answer that its client cannot honestly give.
        size: number of values in the largest order.
        quorum: whether all answers are dropped if fewer than `min_replies` of the cohort have answered.
        in_turns: whether to ask the next clients only after the others have answered, to save memory.
        failed: called for each client that could not do its order, with the reason.
    """

    clients: Sequence[Client]
    orders: Callable[[Sequence[Client]], Sequence[Order]]
    check: Callable[[Client, AnswerT], object] = lambda client, answer: None
    size: int = 0
    quorum: bool = True
    in_turns: bool = False
    failed: Callable[[Client, Reason], object] = lambda client, reason: None


@dataclass(frozen=True)
class Update:
    """A client's accepted answer to an order to train.

    Attributes:
        result: the answer without its weights.
        sent: `(P,)`, if the algorithm needs it, else None.
        returned: `(P,)`, trained or trained - sent, as the order asks; None if nothing travels.
        layout: of both vectors.
        examples: weight of the client in an average. Clients may lie about their examples, so this is capped.
        staleness: in asynchronous mode, the number of replies applied since the order was written.
    """

    client: Client
    result: TrainResult
    sent: Tensor | None
    returned: Tensor | None
    layout: Layout | None
    examples: int
    staleness: int = 0


@dataclass(frozen=True)
class Train(Ask[TrainResult]):
    """An exchange in which clients train. `train` returns the answers as `Update`s.

    Attributes:
        layout: returns the layout of what a client sends back.
        keep_sent: whether updates have `sent`. The weights of a large cohort fill the memory.
        codec: compresses what clients send back; None: no compression.
    """

    orders: Callable[[Sequence[Client]], Sequence[TrainOrder]]
    layout: Callable[[Client], Layout] = lambda client: Layout(())
    keep_sent: bool = True
    codec: Codec | None = None


Exchanges = Generator[Ask[Any], Any, ReturnT]
"""A generator of exchanges, resumed with the answers to each."""


def draw(seed: int, number: int, size: int, among: Iterable[Client]) -> list[Client]:
    """Draw `size` clients uniformly without replacement, or all if there are fewer; return them in order of rows.

    The run's seed and the number of the draw decide it, and `among` is in order of rows.
    """
    candidates = list(among)
    generator = torch.Generator().manual_seed(derive(seed, "cohort", number))
    chosen = torch.randperm(len(candidates), generator=generator)[:size].sort().values
    return [candidates[int(index)] for index in chosen]


def ask(wanted: Ask[AnswerT]) -> Exchanges[Answers[AnswerT]]:
    """Yield an exchange and return the sound answers."""
    return (yield wanted)


def train(wanted: Train) -> Exchanges[Sequence[Update]]:
    """Yield a training exchange and return the updates by row."""
    return (yield wanted)


def resume(exchanges: object, answers: Any) -> Ask[Any]:
    """Return the next exchange of a strategy, given the answers to the last; ConfigError if it is anything else."""
    found = exchanges.send(answers) if isinstance(exchanges, Generator) else exchanges
    if not isinstance(found, Ask):
        wanted = "a strategy's exchanges, such as `updates = yield from train(...)`"
        raise ConfigError(f"expected {wanted}, found {describe(found)}")
    return found


def through(
    exchanges: Exchanges[ReturnT], instead: Callable[[Any], Exchanges[Any]], kind: type[Ask[Any]] = Train
) -> Exchanges[ReturnT]:
    """Play exchanges, but replace each one of a `kind` by those of `instead`; return their return value."""
    answers: Any = None
    while True:
        try:
            wanted = resume(exchanges, answers)
        except StopIteration as over:
            return over.value
        answers = (yield from instead(wanted)) if isinstance(wanted, kind) else (yield wanted)
