"""Our algorithms as Flower strategies: call `strategy.start(grid=grid, num_rounds=20)` in any ServerApp."""

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.server.loop.listener import Listener, RoundReport
from hyperbloom.server.loop.session import Session, check_run
from hyperbloom.strategies.algorithm import Algorithm

__all__ = ["FlowerStrategy"]


class FlowerStrategy(Strategy):
    """A Hyperbloom run behind Flower's strategy interface.

    Flower's own loop sends each node one message per round. Our rounds may have several exchanges, and clients
    introduce themselves before the first round. So `start` runs our loop over Flower's grid, and the methods that
    Flower's loop would call raise a NotImplementedError.

    Args:
        config: the run; `start` overrides its number of rounds.
        listeners: receive all events of the run.
    """

    def __init__(self, config: RunConfig, listeners: Sequence[Listener] = ()) -> None:
        """Check the run.

        Raises:
            ConfigError: the run cannot work.
        """
        check_run(config, uses_data_section=False)
        self.config, self.listeners = config, listeners

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run all rounds over Flower's grid, whose nodes run our `ClientApp`.

        Args:
            grid: Flower's grid.
            initial_arrays: must be empty: networks start from the run's seed. To start from another run, set
                `init_from`.
            num_rounds: replaces `config.rounds`.
            timeout: seconds for a round; replaces `config.round_timeout_s`.
            train_config: not used: `config.local` describes local training.
            evaluate_config: not used.
            evaluate_fn: called after each evaluation with the round's number and the server's state.

        Returns:
            the server's final state, and metrics of training and evaluation by round.

        Raises:
            HyperbloomError: initial arrays are given, too few clients joined, or none answers any more.
        """
        if initial_arrays is not None and len(initial_arrays):
            raise ConfigError("initial_arrays: networks start from the run's seed; set init_from to start from a run")
        changes = {"rounds": num_rounds, "round_timeout_s": timeout}
        config = self.config.model_copy(update={key: value for key, value in changes.items() if value is not None})
        results = _Results(evaluate_fn)
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
        Session(config, grid, run_id, (results, *self.listeners)).run()
        return results.result

    def summary(self) -> None:
        """Print nothing; listeners report the run."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse; see the class."""
        _refuse()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refuse; see the class."""
        _refuse()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse; see the class."""
        _refuse()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Refuse; see the class."""
        _refuse()


def _refuse() -> NoReturn:
    raise NotImplementedError("a round may have several exchanges with a client; call start(), which plays them all")


class _Results(Listener):
    """Collects Flower's `Result` for the run's strategy; baselines are only reported to listeners."""

    def __init__(self, evaluate: Callable[[int, ArrayRecord], MetricRecord | None] | None) -> None:
        self.result = Result()
        self._evaluate = evaluate
        self._algorithm: Algorithm | None = None
        self._over = False

    def phase(self, algorithm: Algorithm, name: str) -> None:
        """Remember the first strategy."""
        self._algorithm = self._algorithm or algorithm

    def round_done(self, report: RoundReport) -> None:
        """Store a round's metrics."""
        if self._over:
            return
        outcome = report.outcome
        losses = [result.loss for result in outcome.results.values() if result.loss is not None]
        metrics: dict[str, int | float] = {"clients": len(outcome.results)}
        if losses:
            metrics["loss"] = sum(losses) / len(losses)
        self.result.train_metrics_clientapp[report.number] = MetricRecord(dict(metrics))
        if outcome.evaluation:
            self.result.evaluate_metrics_clientapp[report.number] = MetricRecord(dict(outcome.evaluation.metrics()))
            if self._evaluate and (own := self._evaluate(report.number, self._arrays())) is not None:
                self.result.evaluate_metrics_serverapp[report.number] = own

    def phase_done(self, algorithm: Algorithm) -> None:
        """Store the server's state when the first strategy ends."""
        if not self._over:
            self.result.arrays, self._over = self._arrays(), True

    def _arrays(self) -> ArrayRecord:
        assert self._algorithm is not None
        return ArrayRecord({name: Array(tensor.cpu().numpy()) for name, tensor in self._algorithm.state().items()})
