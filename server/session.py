"""A run from the first client to the last word: gather, train, baselines, goodbye."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flwr.serverapp import Grid

from hyperbloom.common.config import RunConfig
from hyperbloom.common.data import DATASETS, PARTITIONERS
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.messages import ASKS
from hyperbloom.common.models import ModelSpec, find_model, full_layout, model_names
from hyperbloom.common.privacy import promise
from hyperbloom.server.asynchronous import run_asynchronously
from hyperbloom.server.federation import Federation
from hyperbloom.server.listener import NOTHING_DONE, Checkpoint, Listener, Progress, Resume, Selection
from hyperbloom.server.rounds import run_rounds
from hyperbloom.server.run_folder import read_run
from hyperbloom.strategies import find_strategy, make_strategy
from hyperbloom.strategies.personalised import PersonalisedStrategy
from hyperbloom.strategies.roster import Roster

__all__ = ["Session", "check_run"]


@dataclasses.dataclass
class Session:
    """One run over one grid.

    Attributes:
        config: the run.
        grid: Flower's, over the network or in this process.
        run_id: names the run to the clients.
        listeners: told of everything.
        watch: called while waiting for clients; raises if waiting has become pointless.
        resume: the checkpoint to go on from, if the run has begun already.
    """

    config: RunConfig
    grid: Grid
    run_id: str
    listeners: Sequence[Listener]
    watch: Callable[[], None] = lambda: None
    resume: Resume | None = None

    def __post_init__(self) -> None:
        """Read the run to start from, if there is one, and check the strategies' names and options."""
        self.roster = Roster(self.config.seed)
        self._initial = None
        self._points = list(self.resume.points) if self.resume else []
        if self.resume:
            self.roster = Roster.from_json(self.resume.checkpoint.roster)
        elif self.config.init_from:
            self._initial, self.roster = read_run(Path(self.config.init_from))
            self.roster.seed = self.config.seed
        self.federation = Federation(self.grid, self.roster, self._tell, self.watch)
        for listener in self.listeners:
            listener.gathering(self.roster)

    def run(self) -> dict[str, Selection]:
        """Run the strategy and its baselines; returns the selected evaluation of each, by name.

        Raises:
            HyperbloomError: too few clients, or nobody answers any more.
        """
        complete: str | None = None
        try:
            results = self._run()
            complete = self.run_id
            return results
        finally:
            self.federation.say_goodbye("the run is over", complete)

    def _run(self) -> dict[str, Selection]:
        went_on = self.resume.checkpoint if self.resume else None
        results = dict(went_on.results) if went_on else {}
        names = (self.config.strategy, *self.config.baselines)
        for phase, name in enumerate(names):
            config = self.config if phase == 0 else baseline_config(self.config, name)
            strategy = make_strategy(config, f"{self.run_id}-{name}", self.roster)
            strategy.on_release = self._spend
            self.federation.greet_for(strategy)
            if went_on and phase < went_on.phase:
                continue
            resumed = went_on if went_on and phase == went_on.phase else None
            if resumed:
                self._go_on(strategy, resumed)
            elif phase == 0:
                self._start(strategy)
            else:
                self.federation.begin(strategy, 0)
            self._mark(strategy, phase)
            for listener in self.listeners:
                listener.phase(strategy, name)

            def save(progress: Progress, strategy: PersonalisedStrategy = strategy, phase: int = phase) -> None:
                self._save(phase, progress, results, strategy)

            done = resumed.progress if resumed else NOTHING_DONE
            if not resumed:
                save(done)
            run = run_asynchronously if config.asynchronous else run_rounds
            results[name] = run(strategy, self.federation, config, self.listeners, done, save)
            for listener in self.listeners:
                listener.phase_done(strategy)
        self._save(len(names), NOTHING_DONE, results)
        return results

    def _start(self, strategy: PersonalisedStrategy) -> None:
        """Wait for the clients, and begin with the run's strategy."""
        known = len(self.roster)
        if self._initial is not None:
            strategy.check_initial(self._initial)
        self.federation.gather(strategy, self.config.clients, self.config.join_timeout_s)
        self.roster.sort(known)
        if self._initial is not None:
            strategy.load(self._initial)
        self.federation.begin(strategy, known)

    def _go_on(self, strategy: PersonalisedStrategy, checkpoint: Checkpoint) -> None:
        """Give a strategy its state back, and wait for as many clients as there were."""
        known = len(self.roster)
        for client in self.roster:  # in order of rows: the networks are for the data of the first
            strategy.check_newcomer(client.about)
        strategy.restore(checkpoint.tensors)
        self.federation.gather(strategy, max(1, checkpoint.here), self.config.join_timeout_s)
        self.roster.sort(known)
        self.federation.begin(strategy, known)

    def _mark(self, strategy: PersonalisedStrategy, phase: int) -> None:
        """Let orders say to which rounds of this phase the run may go back, and to which it has gone back."""
        rewound = self.resume.rewound if self.resume else ()
        strategy.resume_points = tuple(orders for of, orders in self._points if of == phase)
        strategy.rewound = tuple(orders if of == phase else 0 for of, orders in rewound if of <= phase)

    def _save(
        self,
        phase: int,
        progress: Progress,
        results: Mapping[str, Selection],
        strategy: PersonalisedStrategy | None = None,
    ) -> None:
        """Write a checkpoint; without a strategy it says that the run is over."""
        if not self.config.checkpoint_every:
            return
        tensors = strategy.checkpoint() if strategy else {}
        roster, here = self.roster.to_json(), self.roster.live_count
        checkpoint = Checkpoint(self.run_id, phase, progress, dict(results), roster, here, tensors)
        for listener in self.listeners:
            listener.checkpoint(checkpoint)
        self._points = [*self._points, (phase, progress.orders)][-2:]
        if strategy:
            self._mark(strategy, phase)

    def _spend(self, names: Sequence[str]) -> None:
        for listener in self.listeners:
            listener.released(names)

    def _tell(self, text: str) -> None:
        for listener in self.listeners:
            listener.event(text)


def baseline_config(config: RunConfig, name: str) -> RunConfig:
    """Return the configuration of a baseline: the same clients, rounds, cohorts and local training, its own options.

    One that cannot be asynchronous goes by rounds.
    """
    asynchronous = config.asynchronous and find_strategy(name).asynchronous
    return config.model_copy(
        update={"strategy": name, "options": {}, "init_from": None, "models": (), "asynchronous": asynchronous}
    )


def check_run(config: RunConfig, uses_data_section: bool) -> None:
    """Find out before anything starts whether the run can work.

    Args:
        config: the run.
        uses_data_section: whether clients will be started on the data set that the run names.

    Raises:
        ConfigError: a strategy, one of its options, a model or a split does not exist, or they do not go together.
        ModelError: the target network does not fit the data set, or is a plug-in's that cannot be imported.
    """
    for name in (config.strategy, *config.baselines):
        one = config if name == config.strategy else baseline_config(config, name)
        strategy = make_strategy(one, "", Roster(config.seed))
        if name == config.strategy:
            asked = strategy.greeting().asks
            told = ASKS[: ASKS.index(asked) + 1] if asked else ()
        elif strategy.own_models == "must" and strategy.greeting().asks not in told:
            raise ConfigError(f"baselines: {name} asks clients for more than {config.strategy}; make it the strategy")
        if one.init_from:
            strategy.check_initial(read_run(Path(one.init_from))[0])
    if len({config.strategy, *config.baselines}) <= len(config.baselines):
        raise ConfigError(
            f"baselines: expected names other than {config.strategy}, each once, found {config.baselines}"
        )
    if config.privacy.where != "none":
        promise(config.privacy, 1)  # the accountant is here
    if config.model not in ("auto", *(names := model_names())):
        raise ConfigError(f"model: expected auto or one of {', '.join(names)}, found {config.model!r}")
    if config.model != "auto":
        find_model(config.model)
    if config.data.split not in PARTITIONERS:
        raise ConfigError(f"data.split: expected one of {', '.join(PARTITIONERS)}, found {config.data.split!r}")
    info = DATASETS.get(config.data.name)
    if uses_data_section and info:
        for size in config.sizes:
            full_layout(ModelSpec.choose(config.model, size, info.input_shape, info.num_classes))
