"""A run from the first client to the last word: phases, what listeners hear, what clients are told of the run."""

import errno
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from hyperbloom import __version__
from hyperbloom.client.work import together, training
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import DataConfig, LocalConfig, PrivacyConfig, RunConfig
from hyperbloom.common.errors import CohortError, ConfigError, HyperbloomError
from hyperbloom.common.files.storage import write_json, write_tensors
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import EvaluateOrder, Greeting, Notice, TrainOrder, TrainResult
from hyperbloom.common.wire.pack import unpack
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.server.grids.inline import InlineGrid
from hyperbloom.server.grids.local_clients import client_settings
from hyperbloom.server.loop import admission
from hyperbloom.server.loop.listener import Checkpoint, Listener, Resume, RoundReport
from hyperbloom.server.loop.session import Session, baseline_config, check_run, greeting_of
from hyperbloom.strategies import make_algorithm


class Heard(Listener):
    """What a listener hears, in order; `rounds` have the strategy's name before their number."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.checkpoints: list[Checkpoint] = []
        self._name = ""

    def phase(self, algorithm: Any, name: str) -> None:
        self._name = name
        self.said.append(f"{name} begins")

    def round_done(self, report: RoundReport) -> None:
        self.said.append(f"{self._name} {report.number}")

    def phase_done(self, algorithm: Any) -> None:
        self.said.append(f"{self._name} is over")

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        self.said.append(f"checkpoint {checkpoint.phase}/{checkpoint.progress.round}")
        self.checkpoints.append(checkpoint)


class Rounds(Listener):
    """Knows the federation's round when a strategy begins; with `lies` the first client is in quarantine after it."""

    session: Session

    def __init__(self, lies: bool = False) -> None:
        self.lies, self.begun = lies, list[int]()
        self.held: list[bool] = []

    def phase(self, algorithm: Any, name: str) -> None:
        federation = self.session.federation
        self.begun.append(federation.round)
        self.held = [federation.roster.conduct.in_quarantine("client-0", number) for number in (10, 11)]

    def phase_done(self, algorithm: Any) -> None:
        for _ in range(3 * self.lies):
            self.session.federation.blame("client-0", "a lie")


class WatchedGrid(InlineGrid):
    """Keeps every order that passes."""

    def __init__(self, grid: InlineGrid) -> None:
        self.__dict__ = grid.__dict__
        self.orders: list[Any] = []

    def push_messages(self, messages: Any) -> Any:
        outgoing: list[Message] = list(messages)
        kinds = {kind.message_type: kind for kind in (Greeting, Notice, TrainOrder, EvaluateOrder)}
        self.orders += [unpack(kinds[m.metadata.message_type], m.content) for m in outgoing]
        return super().push_messages(outgoing)

    def of(self, kind: type) -> list[Any]:
        """Return the orders of a kind."""
        return [order for order in self.orders if type(order) is kind]


@pytest.fixture
def config() -> RunConfig:
    """Return a short run of two clients with a baseline."""
    local = LocalConfig(steps=1, batch_size=4)
    counts = {"clients": 2, "cohort": 2, "rounds": 2, "eval_every": 2, "checkpoint_every": 1}
    return RunConfig(strategy="fedavg", baselines=("local",), sizes=("S",), local=local, **counts)


@pytest.fixture
def watched(config: RunConfig, tmp_path: Path) -> WatchedGrid:
    """Return its clients."""
    return WatchedGrid(inline_grid(config, tmp_path))


def test_strategies_follow_each_other_with_the_same_clients(config: RunConfig, watched: WatchedGrid) -> None:
    heard = Heard()
    results = Session(config, watched, "run", [heard]).run()
    assert list(results) == ["fedavg", "local"]
    assert [s for s in heard.said if not s.startswith("checkpoint")] == [
        *("fedavg begins", "fedavg 1", "fedavg 2", "fedavg is over"),
        *("local begins", "local 1", "local 2", "local is over"),
    ]
    assert watched.of(Greeting) == 2 * [Greeting(__version__)]
    assert [order.scope.run_id for order in watched.of(TrainOrder)] == ["run-fedavg"] * 4 + ["run-local"] * 4
    assert watched.of(Notice) == 2 * [Notice("finished", "the run is over", "run")]


@pytest.mark.parametrize(
    ("error", "told"),
    [(CohortError("nobody answers"), 2), (KeyboardInterrupt(), 2), (OSError(errno.ENOSPC, "full"), 0)],
)
def test_clients_wait_for_a_server_that_ended_by_an_error_of_the_machine_and_leave_after_any_other(
    config: RunConfig, watched: WatchedGrid, error: BaseException, told: int
) -> None:
    class Fails(Listener):
        def round_done(self, *_: Any) -> None:
            raise error

    with pytest.raises(type(error)):
        Session(config, watched, "run", [Fails()]).run()
    assert watched.of(Notice) == told * [Notice("finished", "the run was stopped")]


def test_a_quarantine_lasts_ten_rounds_also_over_the_end_of_a_strategy(config: RunConfig, watched: WatchedGrid) -> None:
    rounds = Rounds(lies=True)
    rounds.session = Session(config, watched, "run", [rounds])
    rounds.session.run()
    assert rounds.held == [True, False] and rounds.begun == [0, 0]
    assert {order.scope.run_id for order in watched.of(TrainOrder)[4:]} == {"run-local"}
    assert len(watched.of(TrainOrder)) == 4 + 2, "one of two clients in each of two rounds"


def test_orders_say_to_which_rounds_the_run_may_go_back(config: RunConfig, watched: WatchedGrid) -> None:
    heard = Heard()
    Session(config, watched, "run", [heard]).run()
    assert [s for s in heard.said if s.startswith("checkpoint")] == [
        *("checkpoint 0/-1", "checkpoint 0/1", "checkpoint 1/-1", "checkpoint 1/1", "checkpoint 2/-1"),
    ]
    told = [(order.scope.round, order.scope.resume_points) for order in watched.of(TrainOrder)[::2]]
    assert told == [(1, (0,)), (2, (0, 1)), (1, (0,)), (2, (0, 1))]
    assert heard.checkpoints[-1].tensors == {} and list(heard.checkpoints[-1].results) == ["fedavg", "local"]


@pytest.fixture
def diverges(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what lets every training of a strategy diverge, or be forbidden, from its third round on."""

    def begin(name: str, allowed: bool = True) -> None:
        def conclude(client: Any, order: TrainOrder, network: Any, loss: float, seconds: float) -> TrainResult:
            broken = order.scope.run_id == f"run-{name}" and order.scope.round > 2
            if broken and not allowed:
                raise HyperbloomError("its user allows no more", reason=Reason.FORBIDDEN)
            return whole(client, order, network, math.nan if broken else loss, seconds)

        whole = training.conclude
        for module in (training, together):
            monkeypatch.setattr(module, "conclude", conclude)

    return begin


@pytest.mark.parametrize(
    ("asynchronous", "why"), [(False, "training diverged"), (True, "training diverged"), (False, "allows no more")]
)
def test_a_baseline_that_nobody_trains_keeps_what_it_selected_and_the_others_follow(
    asynchronous: bool, why: str, config: RunConfig, watched: WatchedGrid, diverges: Callable[..., None]
) -> None:
    diverges("local", allowed=why != "allows no more")
    told: list[str] = []
    listener = Listener()
    listener.event = told.append  # type: ignore[method-assign]
    more = {"strategy": "pfedhn", "baselines": ("local", "fedper"), "rounds": 20, "gains": False}
    run = config.model_copy(update={**more, "asynchronous": asynchronous})
    results = Session(run, watched, "run", [listener]).run()
    assert list(results) == ["pfedhn", "local", "fedper"] and results["local"].round == 2
    (line,) = [line for line in told if line.startswith("local: no usable reply ")]
    assert why in line and line.endswith("; round 2, which it had selected, stands")
    rounds = {order.scope.round for order in watched.of(TrainOrder) if order.scope.run_id == "run-fedper"}
    assert rounds == {*range(1, 21)}


def test_the_strategy_of_a_run_that_diverges_ends_it(
    config: RunConfig, watched: WatchedGrid, diverges: Callable[[str], None]
) -> None:
    diverges("fedavg")
    long = config.model_copy(update={"rounds": 20, "gains": False})
    with pytest.raises(CohortError, match=r"^no usable reply in 10 rounds, giving up after round 12 "):
        Session(long, watched, "run", []).run()


def test_a_run_that_goes_on_says_how_far_it_has_gone_back(
    config: RunConfig, watched: WatchedGrid, tmp_path: Path
) -> None:
    heard = Heard()
    Session(config, watched, "run", [heard]).run()
    again = WatchedGrid(inline_grid(config, tmp_path))
    resume = Resume(heard.checkpoints[1], [(0, 0), (0, 1)], [(0, 1)])
    session = Session(config, again, "run", [rounds := Rounds()], resume=resume)
    rounds.session = session
    results = session.run()
    assert rounds.begun == [1, 0], "it counts on from where it was, and each strategy from the start"
    assert list(results) == ["fedavg", "local"]
    scopes = [(order.scope.run_id, order.scope.round) for order in again.of(TrainOrder)[::2]]
    assert scopes == [("run-fedavg", 2), ("run-local", 1), ("run-local", 2)]
    assert {order.scope.rewound for order in again.of(TrainOrder)[:2]} == {(1,)}
    assert {order.scope.rewound for order in again.of(TrainOrder)[2:]} == {(0,)}


def test_a_run_goes_on_without_a_client_that_left_while_the_server_was_down(
    config: RunConfig, watched: WatchedGrid, tmp_path: Path
) -> None:
    heard = Heard()
    Session(config, watched, "run", [heard]).run()
    again = WatchedGrid(inline_grid(config, tmp_path))
    again._contexts.popitem()
    resume = Resume(heard.checkpoints[1], [(0, 0), (0, 1)], [(0, 1)])
    results = Session(config, again, "run", [went_on := Heard()], resume=resume).run()
    assert list(results) == ["fedavg", "local"] and "fedavg 2" in went_on.said
    assert len(again.of(TrainOrder)) == 3, "one client in each of the rounds that were left"


def test_clients_hear_of_the_end_of_a_run_that_fails_and_keep_what_they_have(
    config: RunConfig, watched: WatchedGrid
) -> None:
    with pytest.raises(CohortError):
        Session(config.model_copy(update={"clients": 3, "join_timeout_s": 0.2}), watched, "run", []).run()
    assert watched.of(Notice) == 2 * [Notice("finished", "the run was stopped")]


@pytest.mark.parametrize(
    ("strategy", "asks"), [("fedavg", None), ("local", "own"), ("ghn", "types"), ("ghn-server", "graph")]
)
def test_newcomers_are_asked_what_the_algorithm_wants_to_know(strategy: str, asks: str | None) -> None:
    greeting = greeting_of(make_algorithm(RunConfig(strategy=strategy)))
    assert (greeting.version, greeting.asks, greeting.reference) == (__version__, asks, None)


def test_a_baseline_has_its_own_options_and_its_own_way_of_going_round(config: RunConfig) -> None:
    mine = config.model_copy(
        update={"strategy": "pfedhn", "asynchronous": True, "options": {"hidden_dim": 8}, "models": ("mlp",)}
    )
    for name, asynchronous in (("fedavg", False), ("local", True)):
        other = baseline_config(mine, name)
        assert (other.strategy, other.options, other.models) == (name, {}, ())
        assert other.asynchronous is asynchronous
        assert other.local == mine.local and other.rounds == mine.rounds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baselines": ("fedavg",)}, r"^baselines: expected names beside fedavg, each once, found \('fedavg',\)$"),
        ({"privacy": PrivacyConfig(noise=8.0)}, "^privacy.where: expected client or server .*; none adds no noise$"),
        ({"privacy": PrivacyConfig(clip=0.5)}, "^privacy.where: expected client or server"),
        (
            {"secure_aggregation": True, "cohort": 3, "clients": 3, "privacy": PrivacyConfig(noise=8.0)},
            "^privacy.where: expected client or server",
        ),
        ({"max_staleness": 3}, r"^max_staleness: expected with asynchronous: true; "),
        ({"baselines": ("nosuch",)}, r"^baselines: expected one of ditto, .*; found 'nosuch'$"),
        ({"baselines": ("local", "local")}, r"^baselines: expected names beside fedavg, each once"),
        (
            {"strategy": "local", "baselines": ("ghn",)},
            "^baselines: ghn asks clients for more than local; make it the strategy$",
        ),
        (
            {"baselines": ("fedhenn",)},
            r"^baselines: fedhenn has its default options as a baseline, .*make it the strategy \(options.rad: ",
        ),
        (
            {"adapt": "head", "baselines": ("fedper",)},
            "^adapt: expected more than head with fedper, whose clients keep the head$",
        ),
        ({"model": "no"}, "^model: expected auto or one of .*, found 'no'$"),
        ({"select": "auc"}, "^select, metrics: expected those of classification, .*, found 'auc'$"),
        ({"task": "multilabel", "metrics": ("auc",)}, "^metrics: expected auroc, .* for multilabel, found 'auc'$"),
        ({"data.split": "no"}, "^data.split: expected one of .*, found 'no'$"),
        ({"strategy": "no"}, "^strategy: expected one of .*; found 'no'$"),
        ({"init_from": "nowhere"}, "^init_from: expected a run folder with .*, found nowhere"),
    ],
)
def test_a_run_that_cannot_work_is_refused_before_anything_starts(
    config: RunConfig, changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    split = changes.pop("data.split", None)
    data = config.data.model_copy(update={"split": split}) if split else config.data
    with pytest.raises(ConfigError, match=message):
        check_run(config.model_copy(update={"data": data, **changes}), uses_data_section=False)


def test_class_weights_reach_every_client(config: RunConfig, watched: WatchedGrid) -> None:
    Session(config.model_copy(update={"class_weights": "balanced"}), watched, "run", []).run()
    assert {order.target.task.balanced for order in watched.of(TrainOrder)} == {True}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_classes": 3}, "expected 3 classes as in this federation, found 10; name them all"),
        ({"model": "unet"}, r"unet: expected outputs \(10,\) of an input for classification, found \(10, 8, 8\)"),
    ],
)
def test_virtual_clients_that_are_refused_are_not_waited_for(
    config: RunConfig, watched: WatchedGrid, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(
        CohortError, match=rf"^0 of 2 clients joined \(none\); the last one refused was node [0-9]+: {why}"
    ):
        Session(config.model_copy(update=changes | {"join_timeout_s": 1e9}), watched, "run", []).run()


def test_waiting_that_has_become_pointless_ends_the_run(config: RunConfig, watched: WatchedGrid) -> None:
    def watch() -> None:
        raise CohortError("client-1 ended with code 2")

    with pytest.raises(CohortError, match=r"^client-1 ended with code 2$"):
        Session(config.model_copy(update={"clients": 3}), watched, "run", [], watch).run()


OPEN = """{"label": ["pulse"], "columns": [{"name": "age", "kind": "number"}, {"name": "dose", "kind": "number"},
{"name": "bmi", "kind": "number", "mean": 20.0, "std": 4.0}]}"""


@pytest.fixture
def table(tmp_path: Path) -> DataConfig:
    generator = np.random.default_rng(0)
    rows = [
        f"{50 + 9 * a},{'' if a > 0.5 else 7e-3 * b},{24 + c},{70 + 8 * d}"
        for a, b, c, d in generator.normal(size=(60, 4))
    ]
    (tmp_path / "t.csv").write_text("\n".join(["age,dose,bmi,pulse", *rows]))
    (tmp_path / "open.json").write_text(OPEN)
    return DataConfig(name=str(tmp_path / "t.csv"), schema_file=str(tmp_path / "open.json"), split="iid")


def test_tables_and_targets_are_scaled_by_what_all_clients_disclose_once_and_when_the_run_goes_on(
    config: RunConfig, table: DataConfig, tmp_path: Path
) -> None:
    config = config.model_copy(update={"data": table, "model": "mlp"})
    heard, grid = Heard(), WatchedGrid(inline_grid(config, tmp_path))
    session = Session(config, grid, "run", [heard])
    session.run()
    clients = [client_for(client_settings(config, index, tmp_path)) for index in (0, 1)]
    inputs = torch.cat([client.train_data.inputs for client in clients]).double()
    for column in (0, 2):
        values = inputs[inputs[:, column + 1] == 0, column]
        assert [float(values.mean()), float(values.std(correction=0))] == pytest.approx([0.0, 1.0], abs=1e-5)
    assert inputs[:, 4].mean() > 0.5, "the schema's own scale"
    targets = torch.cat([client.train_data.labels for client in clients]).double()
    assert session.roster.moments == pytest.approx([float(targets.mean()), float(targets.std(correction=0))])
    assert len(grid.of(Greeting)) == 4 and {order.target.task.mean for order in grid.of(TrainOrder)} == {
        session.roster.moments[:1]
    }
    schema = next(iter(session.roster)).about.schema
    (tmp_path / "open.json").write_text(OPEN.replace("20.0", "25.0"))  # the run keeps the schema that it began with
    again = WatchedGrid(inline_grid(config, tmp_path))
    resumed = Session(config, again, "run", [], resume=Resume(heard.checkpoints[1], [(0, 0), (0, 1)], [(0, 1)]))
    resumed.run()
    assert [greeting.schema for greeting in again.of(Greeting)] == [schema] * 2
    assert resumed.roster.moments == session.roster.moments


def test_columns_that_stay_without_a_scale_are_told(
    config: RunConfig, table: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission.Admission, "_pooled_moments", lambda self, roster: [])  # nobody discloses any
    config = config.model_copy(update={"data": table, "model": "mlp", "rounds": 1, "target_moments": (70.0, 8.0)})
    told: list[str] = []
    listener = Listener()
    listener.event = told.append  # type: ignore[method-assign]
    Session(config, inline_grid(config, tmp_path), "run", [listener]).run()
    assert [
        line
        for line in told
        if line.startswith("columns without a scale, from which little is learned: age, dose; give")
    ]


def test_a_client_that_leaves_before_it_is_told_the_scales_is_not_waited_for(
    config: RunConfig, table: DataConfig, tmp_path: Path
) -> None:
    """All of three disclose moments, the first one goes, and two are enough."""
    config = config.model_copy(update={"data": table, "model": "mlp"})

    class Leaving(WatchedGrid):
        def get_nodes(self) -> Any:
            return list(super().get_nodes())[len(self.of(Greeting)) >= 3 :]

    grid = Leaving(inline_grid(config.model_copy(update={"clients": 3}), tmp_path))
    session = Session(config, grid, "run", [])
    session.run()
    assert [client.client_id for client in session.roster] == ["client-1", "client-2"]
    told = [greeting.schema for greeting in grid.of(Greeting)]
    schema = next(iter(session.roster)).about.schema
    assert len(set(told[:3])) == 1 and told[3:] == [schema] * 2 != told[:2]
    scale = next(column for column in json.loads(str(schema))["columns"] if column["name"] == "age")
    settings = [client_settings(config.model_copy(update={"clients": 3}), index, tmp_path) for index in range(3)]
    raw, *scaled = (client_for(each).train_data.inputs[:, 0].double() for each in settings)
    ages = torch.cat([raw, *(each * scale["std"] + scale["mean"] for each in scaled)])
    assert scale["mean"] == pytest.approx(float(ages.mean()), abs=1e-3), "of all three"


def test_the_clients_of_init_from_decide_and_not_who_comes_first(
    config: RunConfig, watched: WatchedGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config.model_copy(update={"strategy": "pfedhn", "options": {}, "baselines": (), "rounds": 1})
    states: list[dict[str, Any]] = []
    listener = Listener()
    listener.phase_done = lambda algorithm: states.append(algorithm.state())  # type: ignore[method-assign]
    before = Session(run, watched, "before", [listener])
    before.run()
    write_tensors(tmp_path / "hypernetwork.safetensors", states[0], {})
    write_json(tmp_path / "roster.json", before.roster.to_json())
    known: list[Any] = []

    def gather(self: Session, *_: int) -> None:
        known.append(self.federation.admission.setting)
        raise CohortError("enough")

    monkeypatch.setattr(Session, "_gather", gather)
    with pytest.raises(CohortError, match="enough"):
        Session(run.model_copy(update={"init_from": str(tmp_path)}), watched, "next", []).run()
    assert known[0] is not None and known[0].spec.num_classes == 10
