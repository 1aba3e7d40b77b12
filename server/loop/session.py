"""A run from start to end: gather clients, train, run the baselines, say goodbye."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from hyperbloom import __version__
from hyperbloom.common.config import PrivacyConfig, RunConfig
from hyperbloom.common.data import DATASETS, PARTITIONERS
from hyperbloom.common.data.schema import load_schema, read_schema
from hyperbloom.common.errors import ConfigError, HyperbloomError, attempt
from hyperbloom.common.models import find_model, full_layout, model_names
from hyperbloom.common.program.device import pick_device
from hyperbloom.common.reasons import Reason
from hyperbloom.common.tasks import AUTO, TASKS, TaskSpec, make_task
from hyperbloom.common.wire.orders import ASKS, Greeting, Scope
from hyperbloom.server.loop.admission import Admission
from hyperbloom.server.loop.asynchronous import run_asynchronously
from hyperbloom.server.loop.federation import Federation
from hyperbloom.server.loop.gains import ask_gains, rounds_alone
from hyperbloom.server.loop.listener import NOTHING_DONE, Checkpoint, Listener, Progress, Resume, Selection
from hyperbloom.server.loop.post import Grid
from hyperbloom.server.loop.protection import check_protection
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.loop.rounds import Fruitless, Run, run_rounds
from hyperbloom.server.runs.folder import read_run
from hyperbloom.server.runs.recorded import read_config
from hyperbloom.server.runs.trained import restored
from hyperbloom.strategies import find_strategy, make_algorithm
from hyperbloom.strategies.algorithm import Algorithm, target_spec
from hyperbloom.strategies.local import Local


@dataclass
class Session:
    """One run over one grid.

    Attributes:
        watch: called while waiting for clients; raises if waiting has become pointless.
        device: where the server's networks live; auto: CUDA where there is one, else the CPU.
        selected_state: returns the server state of a strategy's selected round; None: nobody has kept it.
    """

    config: RunConfig
    grid: Grid
    run_id: str
    listeners: Sequence[Listener]
    watch: Callable[[], None] = lambda: None
    resume: Resume | None = None
    device: str = "auto"
    selected_state: Callable[[str], Mapping[str, Tensor]] | None = None

    def __post_init__(self) -> None:
        roster = Roster()
        self._initial = None
        self._points = list(self.resume.points) if self.resume else []
        if self.resume:
            roster = Roster.from_json(self.resume.checkpoint.roster)
        elif self.config.init_from:
            self._initial, roster = read_run(Path(self.config.init_from))
            roster.conduct.begin_anew()
        self.federation = Federation(self.grid, roster, self._tell, self.watch)
        self.roster = roster
        for listener in self.listeners:
            listener.gathering(self.federation)

    def run(self) -> dict[str, Selection]:
        """Run the strategy and its baselines; return the selected evaluation of each, by name.

        Raises:
            HyperbloomError: too few clients joined, or none answers any more.
        """
        try:
            results = self._run()
        except (HyperbloomError, KeyboardInterrupt):  # after other errors, such as a full disk, clients wait
            attempt(self.federation.say_goodbye, "the run was stopped")  # its failure must not hide the cause
            raise
        self.federation.say_goodbye("the run is over", self.run_id)
        return results

    def _run(self) -> dict[str, Selection]:
        went_on = self.resume.checkpoint if self.resume else None
        results = dict(went_on.results) if went_on else {}
        names = (self.config.strategy, *self.config.baselines)
        greeting = greeting_of(make_algorithm(self.config))  # baselines share this greeting
        told = next((client.about.schema for client in self.roster), None)  # perhaps scaled by moments
        if told and (went_on or greeting.schema is None or read_schema(greeting.schema, "the schema").open):
            greeting = replace(greeting, schema=told)
        self.federation.greeting = greeting
        for phase, name in enumerate(names):
            if went_on and phase < went_on.phase:
                continue
            resumed = went_on if went_on and phase == went_on.phase else None
            config = self.config if phase == 0 else baseline_config(self.config, name)
            results[name] = self._play(config, phase, resumed, results)
        self._save(len(names), NOTHING_DONE, results)
        return results

    def _play(
        self, config: RunConfig, phase: int, resumed: Checkpoint | None, results: Mapping[str, Selection]
    ) -> Selection:
        algorithm = make_algorithm(config)
        algorithm.device = pick_device(self.device)
        self.federation.admission = Admission(
            config, algorithm, self._initial if phase == 0 else None, self.federation.greeting.schema
        )
        if resumed:
            known, self.federation.round = len(self.roster), max(0, resumed.progress.round)
            self.federation.admission.restore(self.roster, resumed.tensors)
            # A client that trained when the server was killed finishes first. Then a minute is enough to connect again.
            self._gather(known, max(1, resumed.here), self.config.round_timeout_s + 60)
        elif phase == 0:
            next(self.federation.admission.checked(self.roster), None)  # the clients of `init_from` decide for others
            self._gather(len(self.roster), self.config.clients)
        else:
            self.roster.conduct.begin_anew(self.federation.round)
            self.federation.round = 0
            self.federation.admission.begin(self.roster, 0)
        scope = Scope(f"{self.run_id}-{config.strategy}", 0, config.seed, *self._points_of(phase))
        run = Run(config, algorithm, self.federation, self.listeners, scope)
        gains = config.gains and not isinstance(algorithm, Local)
        if gains and config.gains_every:
            run.halfway = lambda number: ask_gains(run, number, rounds_alone(run, number))
        for listener in self.listeners:
            listener.phase(algorithm, config.strategy)

        def save(progress: Progress) -> None:
            self._save(phase, progress, results, algorithm)
            resume_points, rewound = self._points_of(phase)
            run.scope = replace(run.scope, resume_points=resume_points, rewound=rewound)

        done = resumed.progress if resumed else NOTHING_DONE
        if not resumed:
            save(done)
        try:
            selection = (run_asynchronously if config.asynchronous else run_rounds)(run, done, save)
        except Fruitless as error:
            if phase == 0 or error.best is None or error.reason not in (Reason.DIVERGED, Reason.FORBIDDEN):
                raise
            self._tell(f"{config.strategy}: {error}; round {error.best.round}, which it had selected, stands")
            selection = error.best
        for listener in self.listeners:
            listener.phase_done(algorithm)
        if gains:
            self._compare(run, selection)
        return selection

    def _compare(self, run: Run, selection: Selection) -> None:
        """Ask what the federation gains each client: with its selected model if the server has all of it."""
        number = max(selection.round, self.federation.round)
        rounds, has_all = rounds_alone(run, number), run.algorithm.recipe(selection.round).private == "none"
        state = self.selected_state(run.config.strategy) if self.selected_state and has_all else {}
        with suppress(ConfigError):  # not every strategy of one's own can start from a state
            if state:
                run = replace(run, algorithm=restored(run.config, state, self.roster, run.algorithm.device))
                number = selection.round
        ask_gains(run, number, rounds)

    def _gather(self, known: int, wanted: int, soon: float = 0) -> None:
        """Wait for `wanted` clients, or after `soon` seconds for one, and hand all to the algorithm."""
        self.federation.gather(wanted, self.config.join_timeout_s, soon=soon)
        scaled = None if known else self.federation.admission.scale_columns(self.roster)
        if scaled is not None:
            self._tell("scaling the columns of tables by the moments that clients disclose; all clients are told")
            self.federation.greet_again(replace(self.federation.greeting, schema=scaled))
            self.federation.gather(wanted, self.config.join_timeout_s, soon=soon)
        self.roster.sort(known)
        self.federation.admission.begin(self.roster, known)
        schema = next((client.about.schema for client in self.roster), None)
        if not known and schema and (columns := read_schema(schema, "the schema").open):
            self._tell(
                f"columns without a scale, from which little is learned: {', '.join(columns)[:99]}; give them mean and "
                "std in the schema, or let clients with ten values or more pass --disclose-moments"
            )
        setting = self.federation.admission.setting
        if setting is not None and setting.task.standardises and not self.roster.moments:
            self._tell(
                "the regression targets stay in their own units, in which training may diverge: set target_moments, or "
                "let clients with ten examples or more pass --disclose-moments"
            )

    def _points_of(self, phase: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the rounds of a phase to which the run may go back, and those to which it has gone back."""
        rewound = self.resume.rewound if self.resume else ()
        points = tuple(orders for of, orders in self._points if of == phase)
        return points, tuple(orders if of == phase else 0 for of, orders in rewound if of <= phase)

    def _save(
        self, phase: int, progress: Progress, results: Mapping[str, Selection], algorithm: Algorithm | None = None
    ) -> None:
        """Tell the listeners of a checkpoint. Without an algorithm the run is over, which is told in any case."""
        if algorithm and not self.config.checkpoint_every:
            return
        tensors = algorithm.checkpoint() if algorithm else {}
        roster, here = self.roster.to_json(), self.roster.live_count
        checkpoint = Checkpoint(self.run_id, phase, progress, dict(results), roster, here, tensors)
        for listener in self.listeners:
            listener.checkpoint(checkpoint)
        self._points = [*self._points, (phase, progress.orders)][-2:]

    def _tell(self, text: str) -> None:
        for listener in self.listeners:
            listener.event(text)


def greeting_of(algorithm: Algorithm) -> Greeting:
    """Return an algorithm's questions for new clients, and their tables' schema; ConfigError if that is unreadable."""
    asks = None if algorithm.own_models == "no" else algorithm.asks
    task = None if algorithm.config.task == AUTO else algorithm.config.task
    path = algorithm.config.data.schema_file
    schema = load_schema(Path(path)).text if path else None
    return Greeting(__version__, asks, algorithm.reference, task, schema)


def baseline_config(config: RunConfig, name: str) -> RunConfig:
    """Return a baseline's configuration: the run's clients, rounds, cohorts and local training, default options.

    A baseline that does not support asynchronous mode runs in synchronous rounds.
    """
    asynchronous = config.asynchronous and find_strategy(name).asynchronous
    return config.model_copy(
        update={"strategy": name, "options": {}, "init_from": None, "models": (), "asynchronous": asynchronous}
    )


def check_run(config: RunConfig, uses_data_section: bool) -> None:
    """Check the whole run before anything starts; `uses_data_section`: its clients are started on the data it names.

    Raises:
        ConfigError: a strategy, an option, a model or a split does not exist, or settings contradict each other.
        ModelError: the target network does not fit the data set, or belongs to a plug-in that cannot be imported.
    """
    told: tuple[str, ...] = ()
    for name in config.baselines:
        find_strategy(name, "baselines")
    for name in (config.strategy, *config.baselines):
        one = config if name == config.strategy else baseline_config(config, name)
        try:
            algorithm = make_algorithm(one)
        except ConfigError as error:
            if name == config.strategy or not str(error).startswith("options."):
                raise
            why = f"{name} has its default options as a baseline, and needs others; make it the strategy"
            raise ConfigError(f"baselines: {why} ({error})") from None
        check_protection(one, algorithm)
        asked = greeting_of(algorithm).asks
        if name == config.strategy:
            told = ASKS[: ASKS.index(asked) + 1] if asked else ()
        elif algorithm.own_models == "must" and asked not in told:
            raise ConfigError(f"baselines: {name} asks clients for more than {config.strategy}; make it the strategy")
        if one.init_from:
            algorithm.check_start(read_run(Path(one.init_from))[0])
            own_files = uses_data_section and config.data.name not in DATASETS  # which the seed splits
            if own_files and (before := read_config(Path(one.init_from)).seed) != config.seed:
                why = "another one would test the model on examples that it was trained on"
                raise ConfigError(f"seed: expected {before}, that of init_from, found {config.seed}: {why}")
    if len({config.strategy, *config.baselines}) <= len(config.baselines):
        raise ConfigError(f"baselines: expected names beside {config.strategy}, each once, found {config.baselines}")
    if config.max_staleness and not config.asynchronous:
        raise ConfigError("max_staleness: expected with asynchronous: true; by rounds a reply is in time, or dropped")
    if config.privacy.where == "none" and config.privacy != PrivacyConfig(largest_change=config.privacy.largest_change):
        raise ConfigError("privacy.where: expected client or server beside other keys of privacy; none adds no noise")
    metrics = [*([config.select] if config.select else []), *config.metrics]
    if config.task != AUTO:
        make_task(TaskSpec(config.task, balanced=config.class_weights == "balanced")).asked(metrics)
    elif odd := {*metrics}.difference(*(kind.metrics for kind in TASKS.values())):
        raise ConfigError(f"select, metrics: expected those of {', '.join(TASKS)}, found {min(odd)!r}")
    if config.model not in ("auto", *(names := model_names())):
        raise ConfigError(f"model: expected auto or one of {', '.join(names)}, found {config.model!r}")
    if config.model != "auto":
        find_model(config.model)
    if config.data.split not in PARTITIONERS:
        raise ConfigError(f"data.split: expected one of {', '.join(PARTITIONERS)}, found {config.data.split!r}")
    info = DATASETS.get(config.data.name)
    if uses_data_section and info:
        for size in config.sizes:
            full_layout(target_spec(config, size, info.input_shape, info.num_classes))
