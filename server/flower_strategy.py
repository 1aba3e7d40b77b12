"""Our algorithms as Flower strategies: call `strategy.start(grid=grid, num_rounds=20)` in any ServerApp."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from rich.console import Console
from safetensors.torch import load_file

from hyperbloom.common.config import RunConfig, make_run_config
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.files.storage import write_bytes, write_tensors
from hyperbloom.server.grids.fleet import Machines
from hyperbloom.server.loop.federation import Federation
from hyperbloom.server.loop.listener import Listener, RoundReport
from hyperbloom.server.loop.session import check_run
from hyperbloom.server.runs.checkpoint import begun_as
from hyperbloom.server.runs.folder import LAST, new_run_folder
from hyperbloom.server.runs.lines import METRICS, read_lines
from hyperbloom.server.runs.running import run_federation
from hyperbloom.strategies import STRATEGIES
from hyperbloom.strategies.algorithm import Algorithm

ROSTER = "roster"
"""The array of a `Result` that says which client has which row of the embedding table: bytes of JSON."""


class FlowerStrategy(Strategy):
    """A Hyperbloom run behind Flower's strategy interface.

    Flower's own loop sends each node one message per round. Our rounds may have several exchanges, and clients
    introduce themselves before the first round. So `start` runs our loop over Flower's grid, and the methods that
    Flower's loop would call raise a NotImplementedError.

    Args:
        config: the run; `start` overrides its number of rounds.
        run_dir: folder for all output of the run (server/runs/folder.py), which `flower-server watch` and `report`
            read. If the run has begun there, it goes on from its last checkpoint. Default: `runs/DATE-STRATEGY`.
        listeners: receive all events of the run.
    """

    def __init__(
        self, config: RunConfig, run_dir: str | Path | None = None, listeners: Sequence[Listener] = ()
    ) -> None:
        self._given = config.model_dump(exclude_unset=True)
        self.config = make_run_config({}, self._given, "FlowerStrategy()")
        check_run(self.config, uses_data_section=False)
        self.run_dir, self.listeners = run_dir, listeners

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
            initial_arrays: `arrays` of an earlier `Result`, to start from its state with its clients. Empty or None:
                networks start from the run's seed.
            num_rounds: replaces `config.rounds`.
            timeout: seconds for a round; replaces `config.round_timeout_s`.
            train_config: not used: `config.local` describes local training.
            evaluate_config: not used.
            evaluate_fn: called after each evaluation with the round's number and the server's state.

        Returns:
            the server's final state, and metrics of training and evaluation by round.

        Raises:
            HyperbloomError: the initial arrays do not fit, too few clients joined, or none answers any more.
        """
        if grid is None:
            raise ConfigError("start: expected Flower's grid, found None")
        folder = Path(self.run_dir).resolve() if self.run_dir else new_run_folder(None, self.config.strategy).resolve()
        config, changes = self.config, dict[str, Any]()
        if num_rounds is not None:
            every = {"eval_every": min(config.eval_every, num_rounds)} if "eval_every" in self._given else {}
            changes = {"rounds": num_rounds, **every}
        changes |= {} if timeout is None else {"round_timeout_s": timeout}
        config = make_run_config(self._given, changes, "FlowerStrategy.start()")
        if initial_arrays is not None and len(initial_arrays):
            changes["init_from"] = str(_stored(initial_arrays, folder / "initial"))
        config = config.model_copy(update=changes)
        resume = folder if begun_as(config, folder, "run_dir") else None
        central = _Central(evaluate_fn, config.strategy)
        run_federation(config, Machines(), Console(), folder, True, resume, grid, (central, *self.listeners))
        return _result(folder, central.metrics)

    def summary(self) -> None:
        """Print nothing; listeners report the run."""

    def _refuse(self, *args: Any, **keys: Any) -> NoReturn:
        """Refuse what Flower's own loop would call."""
        raise NotImplementedError("a round may have several exchanges with a client; call start(), which plays all")

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _refuse


class _Central(Listener):
    """Evaluates the state of the run's strategy at the server, as the caller of `start` asks."""

    def __init__(self, evaluate: Callable[[int, ArrayRecord], MetricRecord | None] | None, strategy: str) -> None:
        self.metrics: dict[int, MetricRecord] = {}
        self._evaluate, self._strategy = evaluate, strategy

    def gathering(self, federation: Federation) -> None:
        """Remember the federation, whose roster belongs to the state."""
        self._federation = federation

    def phase(self, algorithm: Algorithm, name: str) -> None:
        self._algorithm = algorithm if name == self._strategy else None

    def round_done(self, report: RoundReport) -> None:
        if self._evaluate and self._algorithm and report.outcome.evaluation:
            arrays = _arrays(self._algorithm.state(), json.dumps(self._federation.roster.to_json()).encode())
            if (own := self._evaluate(report.number, arrays)) is not None:
                self.metrics[report.number] = own


def _result(folder: Path, central: dict[int, MetricRecord]) -> Result:
    """Return what a finished run's strategy has left in its folder, with the metrics of the caller's evaluation."""
    result = Result(evaluate_metrics_serverapp=central)
    for line in read_lines(folder / METRICS):  # in asynchronous mode a round's first line is the one of its training
        trained: dict[str, Any] = {key: line[key] for key in ("clients", "loss") if key in line}
        result.train_metrics_clientapp.setdefault(line["round"], MetricRecord(trained))
        if "metric" in line:
            scores = dict(list(line.items())[[*line].index("metric") + 1 :])
            result.evaluate_metrics_clientapp[line["round"]] = MetricRecord(scores)
    last = folder / LAST
    result.arrays = _arrays(load_file(last) if last.exists() else {}, (folder / "roster.json").read_bytes())
    return result


def _arrays(state: Mapping[str, torch.Tensor], roster: bytes) -> ArrayRecord:
    arrays = {name: Array(tensor.cpu().numpy()) for name, tensor in state.items()}
    return ArrayRecord(arrays | {ROSTER: Array(np.frombuffer(roster, np.uint8))})


def _stored(arrays: ArrayRecord, folder: Path) -> Path:
    """Write the arrays of an earlier `Result` as a run folder from which a run can start, and return its path."""
    if ROSTER not in arrays:
        raise ConfigError(
            f"initial_arrays: expected Result.arrays of an earlier run, with {ROSTER!r}; found "
            f"{', '.join(sorted(arrays)[:3])}. Leave them empty to start from the seed"
        )
    tensors = {name: torch.from_numpy(array.numpy()) for name, array in arrays.items() if name != ROSTER}
    write_tensors(folder / "hypernetwork.safetensors", tensors, {})
    write_bytes(folder / "roster.json", arrays[ROSTER].numpy().tobytes())
    return folder


def _named(strategy: str, algorithm: type[Algorithm]) -> type[FlowerStrategy]:
    """Return the Flower strategy that takes the keys of a run of one algorithm as arguments."""

    class Named(FlowerStrategy):
        def __init__(self, run_dir: str | Path | None = None, listeners: Sequence[Listener] = (), **keys: Any) -> None:
            config = make_run_config({"strategy": strategy}, keys, f"{algorithm.__name__}()")
            super().__init__(config, run_dir, listeners)

    Named.__name__ = Named.__qualname__ = algorithm.__name__
    Named.__doc__ = (
        f"Strategy {strategy}: `{algorithm.__name__}(clients=4, local={{'steps': 20}}, run_dir='runs/mine')`.\n\n"
        "Keyword arguments are the keys of a run and the options of the strategy, as "
        f"`flower-server --explain {strategy}` lists them. See `FlowerStrategy`."
    )
    return Named


NAMED: dict[str, type[FlowerStrategy]] = {each.__name__: _named(name, each) for name, each in STRATEGIES.items()}
"""A Flower strategy for each built-in algorithm, by the name of its class. `hyperbloom.PFedHN` is one of them."""
