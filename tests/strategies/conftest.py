"""Federations in this process, with clients that train for real or say what a test tells them to."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from hyperbloom.client.app import app as real_app
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import LocalConfig, RunConfig
from hyperbloom.common.data import DataSpec
from hyperbloom.common.messages import EvaluateOrder, EvaluateResult, Introduction, TrainOrder, TrainResult
from hyperbloom.server.asynchronous import run_asynchronously
from hyperbloom.server.federation import Federation
from hyperbloom.server.inline import InlineGrid
from hyperbloom.server.listener import Listener, RoundReport, Selection
from hyperbloom.server.rounds import run_rounds
from hyperbloom.strategies import STRATEGIES, make_strategy
from hyperbloom.strategies.personalised import Round
from hyperbloom.strategies.roster import Roster

RUN_ID = "run-of-a-test"
BRIEF = LocalConfig(steps=4, batch_size=16, learning_rate=0.05)


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


class RecordingGrid(InlineGrid):
    """Keeps the content of every message that passes, in either direction."""

    def __init__(self, app: ClientApp, node_configs: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(app, node_configs)
        self.passed: list[tuple[str, RecordDict]] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        outgoing = list(messages)
        self.passed += [(message.metadata.message_type, message.content) for message in outgoing]
        return super().push_messages(outgoing)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        incoming = list(super().pull_messages(message_ids))
        self.passed += [(m.metadata.message_type, m.content) for m in incoming if m.has_content()]
        return incoming

    def fields(self, message_type: str) -> list[dict[str, Any]]:
        """Return all fields of all messages of a type, orders and replies alike."""
        found = []
        for kind, content in self.passed:
            # The walk is complete only while nothing but such records travels.
            assert all(isinstance(record, ConfigRecord) for record in content.values())
            if kind == message_type:
                found.append({key: value for record in content.values() for key, value in dict(record).items()})
        return found


@dataclass
class History(Listener):
    """Every round's outcome, and the server's state after it; `after_round` is called when a round is over."""

    federation: "Inline"
    after_round: Callable[[int], None] = lambda number: None
    rounds: list[Round] = field(default_factory=list)
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
    """A strategy with its clients, all in this process.

    Args:
        config: the run.
        grid: its clients.
        roster: who is known already.
    """

    def __init__(self, config: RunConfig, grid: RecordingGrid, roster: Roster | None = None) -> None:
        self.config = config
        self.grid = grid
        self.roster = roster or Roster(config.seed)
        self.known = len(self.roster)
        self.events: list[str] = []
        self.strategy: Any = make_strategy(config, RUN_ID, self.roster)
        self.federation = Federation(grid, self.roster, self.events.append)

    def join(self, wanted: int | None = None, initial: Mapping[str, Tensor] | None = None) -> "Inline":
        """Admit the clients, as a session does before the first round."""
        if initial is not None:
            self.strategy.check_initial(initial)
        self.federation.gather(self.strategy, wanted or self.config.clients, 10.0)
        self.roster.sort(self.known)
        if initial is not None:
            self.strategy.load(initial)
        self.federation.begin(self.strategy, self.known)
        return self

    def run(self, after_round: Callable[[int], None] = lambda number: None) -> tuple[History, Selection]:
        """Run all rounds."""
        history = History(self, after_round)
        run = run_asynchronously if self.config.asynchronous else run_rounds
        selection = run(self.strategy, self.federation, self.config, [history])
        return history, selection

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the server's state."""
        return {name: tensor.clone() for name, tensor in self.strategy.state().items()}


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
            data=DataSpec(partition=index, partitions=len(names), classes_per_client=3),
            device="cpu",
            size=config.sizes[index % len(config.sizes)],
            state_dir=folder / name,
            disclose_class_shares=config.options.get("descriptor") == "class-shares",
            model=config.models[index % len(config.models)] if config.models else None,
            disclose="graph" if STRATEGIES[config.strategy].asks == "graph" else "types",
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


# ---------------------------------------------------------------------- clients that say what a test tells them to

Train = Callable[[str, TrainOrder], TrainResult]
Evaluate = Callable[[str, EvaluateOrder], EvaluateResult]


def no_evaluation(name: str, order: EvaluateOrder) -> EvaluateResult:
    """Fail: the test does not evaluate."""
    raise NotImplementedError(name)


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


def scripted_grid(abouts: Sequence[Introduction], train: Train, evaluate: Evaluate = no_evaluation) -> RecordingGrid:
    """Return a grid of clients that answer orders with `train` and `evaluate`."""
    app = ClientApp()
    said = {about.client_id: about for about in abouts}

    def name_of(context: Context) -> str:
        return str(context.node_config["client-id"])

    @app.query("greet")
    def greet(message: Message, context: Context) -> Message:
        return Message(said[name_of(context)].pack(), reply_to=message)

    @app.train()
    def on_train(message: Message, context: Context) -> Message:
        return Message(train(name_of(context), TrainOrder.unpack(message.content)).pack(), reply_to=message)

    @app.evaluate()
    def on_evaluate(message: Message, context: Context) -> Message:
        return Message(evaluate(name_of(context), EvaluateOrder.unpack(message.content)).pack(), reply_to=message)

    return RecordingGrid(app, [{"client-id": name} for name in said])
