"""Federations in this process, and algorithms without any: clients train for real or say what a test tells them to."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from hyperbloom.client.app import app as real_app
from hyperbloom.client.app import serve
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import LocalConfig, RunConfig
from hyperbloom.common.data import DataSpec
from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.wire.orders import EvaluateResult, Failed, Greeting, Introduction, Order, Scope, TrainResult
from hyperbloom.common.wire.pack import unpack, unpack_answer
from hyperbloom.server.grids.inline import InlineGrid
from hyperbloom.server.loop.admission import Admission
from hyperbloom.server.loop.asynchronous import run_asynchronously
from hyperbloom.server.loop.exchange import Outcome
from hyperbloom.server.loop.federation import Federation
from hyperbloom.server.loop.listener import Listener, RoundReport, Selection
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.loop.rounds import Run, run_rounds
from hyperbloom.server.loop.session import greeting_of
from hyperbloom.strategies import find_strategy, make_algorithm
from hyperbloom.strategies.exchange import Client, Exchanges, Train, Update
from hyperbloom.strategies.turn import Turn

from ..scores import right

RUN_ID = "run-of-a-test"
BRIEF = LocalConfig(steps=4, batch_size=16, learning_rate=0.05, schedule="constant")

OrderT = TypeVar("OrderT", bound=Order)
ReturnT = TypeVar("ReturnT")
GridT = TypeVar("GridT", bound="RecordingGrid")
Answer = Callable[[str, Any], Any]
"""What the client of a name answers to an order."""


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: the tensors here are too small for more, and sums have one order on every machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def forgetful_process() -> Iterator[None]:
    """Let no test see what another one's clients had loaded."""
    client_for.cache_clear()
    yield
    client_for.cache_clear()


# ---------------------------------------------------------------------- algorithms without a federation


def introduction(name: str, **changes: Any) -> Introduction:
    """Return what a scripted client says of itself: four features, three classes."""
    values: dict[str, Any] = {
        "client_id": name,
        "token": f"secret of {name}",
        "version": "0",
        "size": "S",
        "input_shape": (4,),
        "num_classes": 3,
        "train_examples": 10,
        "val_examples": 100,
        "test_examples": 100,
        "class_shares": (),
    }
    return Introduction(**(values | changes))


def joined(config: RunConfig, *abouts: Introduction, checkpoint: Mapping[str, Tensor] | None = None) -> Any:
    """Return an algorithm whose clients have joined, in this order; they are its `clients`."""
    algorithm = make_algorithm(config)
    for row, about in enumerate(abouts):
        algorithm.serves(about, abouts[:row])
        if row == 0:
            algorithm.build(algorithm.settle(about))
        algorithm.join(Client(about.client_id, row, about), True)
    if checkpoint is not None:
        algorithm.restore(checkpoint)
    return algorithm


def turn(algorithm: Any, number: int = 1, cohort: Sequence[Client] | None = None) -> Turn:
    """Return a round of an algorithm; by default all its clients that train take part."""
    candidates = [c for c in algorithm.clients.values() if algorithm.trains(c) and not algorithm.config.is_novel(c.row)]
    scope = Scope(RUN_ID, number, algorithm.config.seed)
    return Turn(algorithm, scope, candidates if cohort is None else cohort, candidates)


def play(exchanges: Exchanges[ReturnT], answer: Answer, refused: dict[str, str] | None = None) -> ReturnT:
    """Play an algorithm's exchanges; clients are a function, and nothing is sent.

    Args:
        exchanges: of the algorithm.
        answer: returns a client's answer to an order; a `Failed` leaves the client out.
        refused: told why clients were left out, by name.
    """
    answers: list[Any] | None = None
    while True:
        try:
            wanted = exchanges.send(answers)
        except StopIteration as over:
            return over.value  # type: ignore[no-any-return]
        answers = []
        for client, order in zip(wanted.clients, wanted.orders(wanted.clients), strict=True):
            found = answer(client.client_id, order)
            try:
                if isinstance(found, Failed):
                    raise WireError(found.text)
                wanted.check(client, found)
            except WireError as error:
                (refused if refused is not None else {})[client.client_id] = str(error)
                continue
            made = update_of(client, found, order, wanted.layout(client)) if isinstance(wanted, Train) else found
            answers.append(made if isinstance(wanted, Train) else (client, made))


def update_of(
    client: Client,
    returned: TrainResult | Tensor,
    order: Any = None,
    layout: Layout | None = None,
    **changes: Any,
) -> Update:
    """Return what a client's answer to an order to train, or the vector in it, brings an algorithm."""
    result = returned if isinstance(returned, TrainResult) else TrainResult(0.0)
    values = returned if isinstance(returned, Tensor) else returned.weights and returned.weights.values
    sent = order.weights.part(layout) if order is not None and order.weights and layout is not None else None
    found: dict[str, Any] = {
        "sent": sent,
        "returned": values,
        "layout": layout,
        "examples": client.about.train_examples,
    }
    return Update(client, result, **(found | changes))


# ---------------------------------------------------------------------- a grid whose messages can be read


class RecordingGrid(InlineGrid):
    """Keeps every message that passes, in either direction.

    Attributes:
        passed: type of the message, whether it is an order, and what is in it.
    """

    def __init__(self, app: ClientApp, node_configs: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(app, node_configs)
        self.passed: list[tuple[str, bool, RecordDict]] = []

    def restart(self, node_configs: Sequence[Mapping[str, Any]]) -> None:
        """Put clients on new nodes in place of those that are here."""
        nodes = enumerate(node_configs, start=max(self._contexts) + 1)
        self._contexts = {node: Context(1, node, dict(config), RecordDict(), {}) for node, config in nodes}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        outgoing = list(messages)
        self.passed += [(message.metadata.message_type, True, message.content) for message in outgoing]
        return super().push_messages(outgoing)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        incoming = list(super().pull_messages(message_ids))
        self.passed += [(m.metadata.message_type, False, m.content) for m in incoming if m.has_content()]
        return incoming

    def sent(self, kind: type[OrderT]) -> list[OrderT]:
        """Return the orders of a kind that were sent."""
        return [unpack(kind, c) for name, is_order, c in self.passed if is_order and name == kind.message_type]

    def answers(self, kind: type[Order]) -> list[Any]:
        """Return the answers to orders of a kind, `Failed` ones included."""
        mine = [c for name, is_order, c in self.passed if not is_order and name == kind.message_type]
        return [unpack_answer(kind.answer, content) for content in mine]

    def fields(self, kind: type[Order], orders: bool | None = None) -> list[dict[str, Any]]:
        """Return the fields of all messages of a kind as they travel: of orders, of answers, or of both."""
        found = []
        for name, is_order, content in self.passed:
            # The walk is complete only while nothing but such records travels.
            assert all(isinstance(record, ConfigRecord) for record in content.values())
            if name == kind.message_type and orders in (None, is_order):
                found.append({key: value for record in content.values() for key, value in dict(record).items()})
        return found

    def everything(self) -> list[bytes]:
        """Return every field of every message as bytes."""
        values = (v for _, _, content in self.passed for record in content.values() for v in dict(record).values())
        return [value if isinstance(value, bytes) else str(value).encode() for value in values]


def scripted_grid(
    abouts: Sequence[Introduction],
    answers: Mapping[type[Order], Answer],
    kind: Callable[[ClientApp, Sequence[Mapping[str, Any]]], GridT] = RecordingGrid,  # type: ignore[assignment]
) -> GridT:
    """Return a grid, of the class `kind`, of clients that answer each kind of order with a function."""
    app, said = ClientApp(), {about.client_id: about for about in abouts}

    def handler(answer: Answer) -> Callable[[Context, Any], Any]:
        return lambda context, order: answer(str(context.node_config["client-id"]), order)

    greet: dict[type[Order], Answer] = {Greeting: lambda name, order: said[name]}
    for order, answer in (greet | dict(answers)).items():
        serve(app, order, handler(answer))
    return kind(app, [{"client-id": name} for name in said])


# ---------------------------------------------------------------------- federations in this process


class Spending(Listener):
    """Adds whose noise is spent to `names`."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def released(self, names: Sequence[str]) -> None:
        """Add the names."""
        self.names += names


@dataclass
class History(Listener):
    """Every round's outcome, and the server's state after it; `after_round` is called when a round is over."""

    federation: "Inline"
    after_round: Callable[[int], None] = lambda number: None
    rounds: list[Outcome] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)

    def round_done(self, report: RoundReport) -> None:
        self.rounds.append(report.outcome)
        self.states.append(self.federation.state())
        self.after_round(report.number)

    @property
    def cohorts(self) -> list[list[str]]:
        """Names of the clients whose replies each round learned from."""
        return [list(outcome.results) for outcome in self.rounds]


class Inline:
    """An algorithm with its clients, all in this process.

    Args:
        config: the run.
        grid: its clients.
        roster: who is known already.
        initial: the state of another run to start from.

    Attributes:
        released: names of the clients whose changes with noise were asked for.
    """

    def __init__(
        self,
        config: RunConfig,
        grid: RecordingGrid,
        roster: Roster | None = None,
        initial: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.config, self.grid, self.roster = config, grid, roster or Roster()
        self.known = len(self.roster)
        self.events: list[str] = []
        self.released: list[str] = []
        self.federation = Federation(grid, self.roster, self.events.append)
        self.take(make_algorithm(config), initial)

    def take(self, algorithm: Any, initial: Mapping[str, Tensor] | None = None) -> None:
        """Run this algorithm from now on."""
        self.algorithm: Any = algorithm
        self.federation.admission = Admission(algorithm.config, algorithm, initial)
        self.federation.greeting = greeting_of(algorithm)

    def join(self, wanted: int | None = None) -> "Inline":
        """Admit the clients, as a session does before the first round."""
        self.federation.gather(wanted or self.config.clients, 10.0)
        self.roster.sort(self.known)
        self.federation.admission.begin(self.roster, self.known)
        return self

    def come_back(self, settings: Sequence[ClientSettings]) -> None:
        """Restart all clients, and wait until those of these settings are back."""
        wanted = sum("is back" in event for event in self.events) + len(settings)
        self.grid.restart([each.to_node_config() for each in settings])
        while sum("is back" in event for event in self.events) < wanted:
            self.federation.poll()

    def loop(self, *listeners: Listener) -> Run:
        """Return what plays the algorithm's rounds."""
        scope = Scope(RUN_ID, 0, self.config.seed)
        return Run(self.config, self.algorithm, self.federation, [*listeners, Spending(self.released)], scope)

    def run(self, after_round: Callable[[int], None] = lambda number: None) -> tuple[History, Selection]:
        """Run all rounds."""
        history = History(self, after_round)
        run = run_asynchronously if self.config.asynchronous else run_rounds
        return history, run(self.loop(history))

    def train(self, number: int = 1) -> Outcome:
        """Play the training of one round."""
        outcome, self.federation.round = Outcome(), number
        self.loop().train(number, outcome)
        return outcome

    def evaluate(self, number: int = 1) -> Outcome:
        """Play one evaluation."""
        outcome, self.federation.round = Outcome(), number
        self.loop().evaluate(number, outcome)
        return outcome

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the server's state."""
        return {name: tensor.clone() for name, tensor in self.algorithm.state().items()}


def texts(outcome: Outcome) -> dict[str, str]:
    """Return why clients were left out of a round, by name, in words."""
    return {name: refused.text for name, refused in outcome.refused.items()}


def scored(val: tuple[int, int, float], test: tuple[int, int, float]) -> EvaluateResult:
    """Return a client's scores: correct, total, loss."""
    return EvaluateResult(right(*val), right(*test))


def digits_config(**changes: Any) -> RunConfig:
    """Return a small run on handwritten digits."""
    values: dict[str, Any] = {
        "clients": 3,
        "rounds": 4,
        "eval_every": 2,
        "sizes": ("S",),
        "local": BRIEF,
        "options": {"hidden_dim": 16},
    }
    return RunConfig(**(values | changes))


def digits_settings(config: RunConfig, folder: Path, names: Sequence[str] | None = None) -> list[ClientSettings]:
    """Return the settings of clients that share the digits; which ones does not depend on the run's seed."""
    names = names or [f"client-{index}" for index in range(config.clients)]
    return [
        ClientSettings(
            client_id=name,
            data=DataSpec(partition=index, partitions=len(names), classes_per_client=3, backbone=config.backbone),
            device="cpu",
            size=config.sizes[index % len(config.sizes)],
            state_dir=folder / name,
            disclose_class_shares=config.options.get("descriptor") == "class-shares",
            model=config.models[index % len(config.models)] if config.models else None,
            disclose="graph" if find_strategy(config.strategy).asks == "graph" else "types",
        )
        for index, name in enumerate(names)
    ]


def digits_grid(settings: Sequence[ClientSettings]) -> RecordingGrid:
    """Return a grid of real clients."""
    return RecordingGrid(real_app, [each.to_node_config() for each in settings])


def digits_federation(config: RunConfig, folder: Path) -> Inline:
    """Return a federation on the digits whose clients have joined."""
    return Inline(config, digits_grid(digits_settings(config, folder))).join()


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Demand the same tensors, to the bit."""
    assert list(one) == list(other)
    for name in one:
        assert torch.equal(one[name], other[name]), name
