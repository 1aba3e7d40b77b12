"""What the round loop reports to listeners such as the run folder and the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyperbloom.common.newcomers import Expectation

if TYPE_CHECKING:  # `flower-server watch` must start without these imports
    from torch import Tensor

    from hyperbloom.common.gains import Gain
    from hyperbloom.server.loop.exchange import Outcome
    from hyperbloom.server.loop.federation import Federation
    from hyperbloom.server.loop.roster import Roster
    from hyperbloom.strategies.algorithm import Algorithm


@dataclass(frozen=True)
class RoundReport:
    """A finished round; in asynchronous mode also a finished evaluation.

    Attributes:
        number: of the round, from 1; 0 is the evaluation of the initial state (`init_from`).
        seconds: duration, evaluation included.
        elapsed: seconds from the strategy's first round to the end of this round's training.
        late: replies dropped since the last report because they came after their deadline.
        bytes_down: sent to clients for training in this round, without evaluation.
        bytes_up: received from clients for training in this round.
        asked: clients that were asked to train, those that were left out included.
    """

    number: int
    outcome: "Outcome"
    seconds: float
    elapsed: float
    late: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    asked: int = 0


@dataclass(frozen=True)
class Selection:
    """The best round so far by the selecting metric on validation examples. Reports show that metric on test examples.

    Attributes:
        metrics: as `Evaluated.metrics` returns them.
        test_accuracy: the selecting metric of each client for which it is defined, shares in percent.
        rank: the value by which it was selected.
        counts: sums of the clients' counts on test examples, if all disclose them.
        newcomers: what novel clients say that newcomers may expect, of a strategy with models on demand.
    """

    round: int
    metrics: dict[str, float]
    test_accuracy: dict[str, float]
    rank: tuple[int, float] = (0, 0.0)
    metric: str = "accuracy"
    counts: tuple[float, ...] = ()
    newcomers: Expectation | None = None


@dataclass(frozen=True)
class Progress:
    """How far a strategy has come.

    Attributes:
        round: the last finished round; -1 before the first.
        fruitless: number of rounds in a row without a usable reply.
        orders: number of the last order that was written.
        applied: in asynchronous mode, the number of applied replies.
    """

    round: int = -1
    best: Selection | None = None
    fruitless: int = 0
    orders: int = 0
    applied: int = 0
    elapsed: float = 0.0


NOTHING_DONE = Progress()


@dataclass(frozen=True)
class Checkpoint:
    """All that a server needs to continue a run.

    Attributes:
        run_id: clients keep their personal state under this id.
        phase: 0 for the run's strategy, then 1, 2, ... for its baselines; one more when the run is over.
        results: selections of the finished phases, by name.
        here: number of clients that were present.
    """

    run_id: str
    phase: int
    progress: Progress
    results: Mapping[str, Selection]
    roster: Mapping[str, Any]
    here: int
    tensors: "Mapping[str, Tensor]"


@dataclass(frozen=True)
class Resume:
    """Where a run continues.

    Attributes:
        points: phase and last order of all existing checkpoints, oldest first.
        rewound: phase and last order of each checkpoint to which the run has gone back, including this time.
    """

    checkpoint: Checkpoint
    points: Sequence[tuple[int, int]]
    rewound: Sequence[tuple[int, int]]


class Joined(str):
    """An event for code that filters: a client has joined. Most receivers only show or write the text."""


class Refused(str):
    """An event for code that counts: a client was not admitted."""


class Listener:
    """Base class of listeners: does nothing. Override the methods of interest."""

    def gathering(self, federation: "Federation") -> None:
        """The run begins; `federation` knows the clients from now on."""

    def phase(self, algorithm: "Algorithm", name: str) -> None:
        """A strategy starts its rounds."""

    def event(self, text: str) -> None:
        """Something happened to a client: joined, left, refused."""

    def released(self, names: Sequence[str]) -> None:
        """Noisy changes of these clients are about to be requested. Their privacy budget is spent in any case."""

    def round_done(self, report: RoundReport) -> None:
        """A round is over. If it ended with an evaluation, `report.outcome.evaluation` is set."""

    def selected(self, selection: Selection, state: "Mapping[str, Tensor]", roster: "Roster") -> None:
        """The evaluation of this round is the best so far; `state` is the server state that was evaluated."""

    def gained(self, gains: "Mapping[str, Gain]", metric: str, number: int) -> None:
        """Clients have told what the federation's models of round `number` gain them over training alone."""

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is due. The next round changes its tensors in place, so store them now."""

    def phase_done(self, algorithm: "Algorithm") -> None:
        """A strategy has run all its rounds."""
