"""What an algorithm wants to know of clients: it yields asks, and gets the sound answers back.

A round is a generator. It yields an `Ask`; whoever runs the rounds sends the orders, checks the answers, and resumes
the generator with those that passed. What one exchange brings for the next is a local variable:

    described = yield from ask(Ask(cohort, self._describe_orders, ...))
    updates = yield from train(self.training(turn, cohort))
    self.learn(updates)

Who has not answered an exchange as it should is not among the answers, and must be left out of the later ones.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hyperbloom.common.compression import Codec
from hyperbloom.common.layout import Layout
from hyperbloom.common.reasons import Reason
from hyperbloom.common.seeds import derive
from hyperbloom.common.wire import Introduction, Order, TrainOrder, TrainResult

__all__ = ["Answers", "Ask", "Client", "Exchanges", "Train", "Update", "ask", "draw", "through", "train"]

AnswerT = TypeVar("AnswerT")
ReturnT = TypeVar("ReturnT")


@dataclass(frozen=True)
class Client:
    """One client as algorithms know it; `row` is its place in the embedding table, for ever."""

    client_id: str
    row: int
    about: Introduction


Answers = Sequence[tuple[Client, AnswerT]]
"""Sound answers, in order of rows."""


@dataclass(frozen=True)
class Ask(Generic[AnswerT]):
    """One exchange: whom to ask what, and which answers are sound.

    Attributes:
        clients: who is asked, if it is still there when its turn comes.
        orders: writes the orders of some of `clients`, one each, in their order. It is called with as many clients at a
            time as memory allows.
        check: raises a WireError for an answer that cannot be what its client was asked for.
        size: numbers in the largest of the orders.
        quorum: whether nobody's answer counts if fewer than `min_replies` of the cohort have answered.
        in_turns: whether some clients are asked when others have answered, for the sake of memory.
        failed: told of each client that could not do what it was asked for, and why.
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
        result: without what `returned` is made of.
        sent: `(P,)`, if the algorithm wants it, else None.
        returned: `(P,)`, trained or trained - sent as the order says; None where nothing travels.
        layout: of both.
        examples: by how many it counts in an average. Nobody can check what clients say, so it is capped.
        staleness: asynchronous: replies that were learned from since its order was written.
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
    """An exchange in which clients train; `train` returns what came back as `Update`s.

    Attributes:
        layout: returns how what a client sends back lies in a flat vector.
        keep_sent: whether updates have `sent`; a large cohort's weights fill the memory.
        codec: of what clients send back; None: it travels as it is.
    """

    orders: Callable[[Sequence[Client]], Sequence[TrainOrder]]
    layout: Callable[[Client], Layout] = lambda client: Layout(())
    keep_sent: bool = True
    codec: Codec | None = None


Exchanges = Generator[Ask[Any], Any, ReturnT]
"""A generator of exchanges, resumed with the answers to each."""


def draw(seed: int, number: int, size: int, among: Iterable[Client]) -> list[Client]:
    """Draw clients uniformly without replacement, in order of rows.

    Args:
        seed: of the run.
        number: of the draw; decides it together with the seed.
        size: clients to draw; fewer if fewer are there.
        among: the candidates, in order of rows.
    """
    candidates = list(among)
    generator = torch.Generator().manual_seed(derive(seed, "cohort", number))
    chosen = torch.randperm(len(candidates), generator=generator)[:size].sort().values
    return [candidates[int(index)] for index in chosen]


def ask(wanted: Ask[AnswerT]) -> Exchanges[Answers[AnswerT]]:
    """Yield an exchange and return the sound answers."""
    answers: Answers[AnswerT] = yield wanted
    return answers


def train(wanted: Train) -> Exchanges[Sequence[Update]]:
    """Yield an exchange in which clients train, and return what they made of it, in order of rows."""
    updates: Sequence[Update] = yield wanted
    return updates


def through(
    exchanges: Exchanges[ReturnT], training: Callable[[Train], Exchanges[Sequence[Update]]]
) -> Exchanges[ReturnT]:
    """Play exchanges, with those of `training` in place of each one that trains; return what they return."""
    answers: Any = None
    while True:
        try:
            wanted = exchanges.send(answers)
        except StopIteration as over:
            return over.value  # type: ignore[no-any-return]
        answers = (yield from training(wanted)) if isinstance(wanted, Train) else (yield wanted)
