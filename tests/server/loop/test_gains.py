"""Clients say what the federation gains them: in the run folder, on the report, on the card."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hyperbloom.common.config import DataConfig, LocalConfig, RunConfig
from hyperbloom.common.errors import WireError
from hyperbloom.common.gains import MIXTURES, MODELS, Gain, of_all, sentence
from hyperbloom.common.metrics import scale_of
from hyperbloom.common.wire.orders import CompareOrder
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.server.loop import federation, rounds
from hyperbloom.server.loop.gains import check_gain, rounds_alone
from hyperbloom.server.loop.listener import Checkpoint, Listener, Resume, RoundReport, Selection
from hyperbloom.server.loop.post import Post
from hyperbloom.server.loop.session import Session
from hyperbloom.server.pages.report import write_report
from hyperbloom.server.runs.export import Export
from hyperbloom.server.runs.folder import RunFolder
from hyperbloom.server.runs.lines import read_gains
from hyperbloom.strategies.pfedhn import PFedHN

pytestmark = pytest.mark.usefixtures("clean_process")


class Told(Listener):
    """Keeps the gains of each time that clients were asked, and the scores of the selected round."""

    def __init__(self) -> None:
        self.gains: list[dict[str, Gain]] = []
        self.selection: Selection | None = None
        self.rounds: list[int] = []  # after which they were asked
        self.checkpoints: list[Checkpoint] = []
        self.round = 0

    def round_done(self, report: RoundReport) -> None:
        self.round = report.number

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        self.checkpoints.append(checkpoint)

    def selected(self, selection: Selection, state: Any, roster: Any) -> None:
        self.selection = selection

    def gained(self, gains: Any, metric: str, number: int) -> None:
        assert metric == "accuracy"
        self.gains.append(dict(gains))
        self.rounds.append(self.round)


def play(folder: Path, strategy: str, resume: Resume | None = None, **changes: Any) -> Told:
    values: dict[str, Any] = {
        "clients": 3,
        "cohort": 2,
        "rounds": 3,
        "eval_every": 1,
        "gains": True,
        "local": LocalConfig(steps=2, batch_size=8),
        "data": DataConfig(name="digits", max_train=20),
    }
    config = RunConfig(strategy=strategy, **(values | changes))
    told = Told()
    folder.mkdir(parents=True, exist_ok=True)
    recorder = RunFolder(folder, config, "run")
    grid = inline_grid(config, folder)
    listeners = [recorder, told]
    Session(config, grid, "run", listeners, resume=resume, selected_state=recorder.selected_state).run()
    return told


ON_SERVER = ("personal", "common", *(name for name in MODELS if name.startswith("personal+common")))
ENDS, SMALL = ("personal", "tuned", "common", "common-tuned"), {"options": {"hidden_dim": 8}}
OWN = {"models": ("mlp",), "options": {"hidden": 8, "latent": 8}}


@pytest.mark.parametrize(
    ("strategy", "ends", "changes"),
    [
        ("pfedhn", ENDS, SMALL),
        ("pfedhn-pc", ("personal", "tuned"), SMALL),
        ("odpfl", ENDS, SMALL),
        ("fedavg", ("personal", "tuned"), {}),
        ("fedavg-ft", ("personal", "common", "common-tuned"), {"options": {"epochs": 1}}),
        ("lg-fedavg", ("personal", "tuned"), {"options": {"fedavg_rounds": 1}}),
        ("ditto", ENDS, {}),
        ("ghn", ("personal", "common", "common-tuned"), OWN),
        ("ghn-server", ("personal", "common", "common-tuned"), OWN),
        ("hafl-distillation", ("personal",), {"models": ("mlp",), "options": {"epochs": 1}}),
    ],
)
def test_every_client_compares_what_its_strategy_gives_it(
    tmp_path: Path, strategy: str, ends: tuple[str, ...], changes: dict[str, Any]
) -> None:
    told = play(tmp_path, strategy, **changes)
    (gains,) = told.gains
    assert list(gains) == ["client-0", "client-1", "client-2"]
    mixtures = [name for name, (first, second, _) in MIXTURES.items() if {first, second} <= set(ends)]
    for name, gain in gains.items():
        assert set(gain.models) == {*ends, *mixtures, "alone"} and gain.chosen in gain.models
        of = dict(zip(gain.models, gain.test, strict=True))
        assert gain.value == pytest.approx(of[gain.chosen] - of["alone"])
        assert (tmp_path / "clients" / name / "scored" / f"run-{strategy}.safetensors").exists()


def test_the_model_for_all_is_made_once_for_each_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a mean over all clients, so that asking for each client's takes the square of their number."""
    asked: list[str] = []
    common = PFedHN.common
    monkeypatch.setattr(
        PFedHN, "common", lambda self, client: (asked.append(client.client_id), common(self, client))[1]
    )
    play(tmp_path, "pfedhn", **SMALL)
    assert asked == ["client-0"]


def test_the_answer_is_in_the_run_folder_on_the_report_and_on_the_card(tmp_path: Path) -> None:
    (gains,) = play(tmp_path, "pfedhn", **SMALL).gains
    found = read_gains(tmp_path)
    assert all((found[name][1].value, found[name][1].low) == (gain.value, gain.low) for name, gain in gains.items())
    assert "each client now trains alone, to compare" in (tmp_path / "events.jsonl").read_text()
    page = write_report(tmp_path).read_text().replace("&#39;", "'")
    assert "Does it pay for each client?" in page and of_all(gains.values(), "accuracy") in page
    export = Export(tmp_path)
    for client in export.clients(None):
        name, (_, _, card) = client.client_id, export.model(client)
        says = sentence(name, gains[name], "accuracy")
        assert says.removeprefix(f"{name}: ").removeprefix(f"{name} ") in page and f"{says}." in card.remarks
        elsewhere = [remark for remark in card.remarks if "It has chosen" in remark]
        assert bool(elsewhere) == (gains[name].chosen not in ON_SERVER)
        assert all(MODELS[gains[name].chosen] in remark and "flower-client export" in remark for remark in elsewhere)


@pytest.mark.parametrize(
    ("chosen", "share"), [("personal", 0), ("common", 1), ("personal+common:0.25", 0.25), ("tuned", 0)]
)
def test_the_server_writes_what_a_client_has_chosen_if_it_can(tmp_path: Path, chosen: str, share: float) -> None:
    play(tmp_path, "pfedhn", **SMALL)
    lines = [json.loads(text) for text in (tmp_path / "gains.jsonl").read_text().splitlines()]
    changed = [line | {"gain": line["gain"] | {"chosen": chosen}} for line in lines]
    (tmp_path / "gains.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in changed))
    export = Export(tmp_path)
    for client in export.clients(None):
        (own,), common = export.trained.strategy.personal([client]), export.trained.strategy.common(client)
        module, _, card = export.model(client)
        written = own.layout.flatten(dict(module.named_parameters())).detach()
        torch.testing.assert_close(written, (1 - share) * own.values + share * common.values)
        assert any("flower-client export" in remark for remark in card.remarks) == (chosen == "tuned")
        gain = read_gains(tmp_path)[client.client_id][1]
        of = dict(zip(gain.models, gain.test, strict=True))
        assert scale_of("accuracy").show(100 * of["personal" if chosen == "tuned" else chosen]) in str(card.origin)
        assert not torch.equal(own.values, common.values)


def test_nothing_is_asked_unless_wished_nor_of_clients_that_learn_alone(tmp_path: Path) -> None:
    assert play(tmp_path / "unasked", "fedavg", gains=False).gains == []
    assert play(tmp_path / "alone", "local").gains == []
    assert not list(tmp_path.glob("*/gains.jsonl"))


ALL_OF_IT = [
    "pfedhn",
    "odpfl",
    "fedavg",
    "fedavg-ft",
    "fedprox",
    "per-fedavg",
    "ghn",
    "ghn-server",
    "hafl-distillation",
]


@pytest.mark.parametrize("strategy", ALL_OF_IT)
def test_the_gain_is_that_of_the_selected_round_where_the_server_has_the_model(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models of the last round have other scores than those of the second, which is selected here."""
    better = rounds._better
    monkeypatch.setattr(rounds, "_better", lambda best, number, *of: better(best, number, *of) if number < 3 else best)
    changes = OWN if "ghn" in strategy else {"models": ("mlp",)} if "hafl" in strategy else {}
    told = play(tmp_path, strategy, **changes)
    assert told.selection is not None and told.selection.round < 3
    for name, gain in told.gains[-1].items():
        personal = dict(zip(gain.models, gain.test, strict=True))["personal"]
        assert 100 * personal == pytest.approx(told.selection.test_accuracy[name])


def test_they_compare_in_the_middle_of_a_run_and_train_alone_once(tmp_path: Path) -> None:
    """Training alone for rounds 1 and 2, and then on to 3, ends where training for all of them ends."""
    often = play(tmp_path / "often", "pfedhn", cohort=3, gains_every=1, baselines=("fedavg",), **SMALL)
    once = play(tmp_path / "once", "pfedhn", cohort=3, **SMALL)
    assert often.rounds == [1, 2, 3, 1, 2, 3] and once.rounds == [3]
    assert often.gains[2] == once.gains[0]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("patience", "rounds_run"), [(None, 4), (1, 3)])
def test_a_stop_in_the_comparison_costs_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, patience: int | None, rounds_run: int
) -> None:
    """With patience: the first evaluation stays the best. In asynchronous mode the last one ends a round later."""
    better = rounds._better
    monkeypatch.setattr(rounds, "_better", lambda best, number, of: best or better(best, number, of))
    run: Any = {"asynchronous": asynchronous, "patience": patience, "rounds": 4, **SMALL}
    rounds_run -= bool(patience and not asynchronous)
    told = play(tmp_path, "pfedhn", **run)
    assert [(each.phase, each.progress.round) for each in told.checkpoints] == [(0, -1), (0, rounds_run), (1, -1)]
    points = [(0, 0), (0, told.checkpoints[1].progress.orders)]
    again = play(tmp_path, "pfedhn", Resume(told.checkpoints[1], points, points[1:]), **run)
    assert again.round == 0, "no round was played"
    assert [each.phase for each in again.checkpoints] == [1]
    assert again.gains == told.gains


def test_without_a_comparison_no_checkpoint_follows_the_last_round(tmp_path: Path) -> None:
    assert [each.progress.round for each in play(tmp_path, "pfedhn", gains=False, **SMALL).checkpoints] == [-1, -1]


def test_a_strategy_that_keeps_more_than_its_state_goes_back_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    told = play(tmp_path, "momentum:FedAvgM")
    assert told.selection is not None
    for name, gain in told.gains[0].items():
        personal = dict(zip(gain.models, gain.test, strict=True))["personal"]
        assert 100 * personal == pytest.approx(told.selection.test_accuracy[name])


def test_clients_of_the_first_phase_compare_the_models_that_they_keep(tmp_path: Path) -> None:
    options = {"mode": "two-phase", "tune": 0.5, "hidden_dim": 8, "embedding_dim": 4}
    told = play(tmp_path, "odpfl", rounds=6, options=options)
    assert told.selection is not None and told.selection.round > 3
    for name, gain in told.gains[-1].items():
        personal = dict(zip(gain.models, gain.test, strict=True))["personal"]
        assert 100 * personal == pytest.approx(told.selection.test_accuracy[name])


def test_a_client_that_joins_after_the_selected_round_compares_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of that round has no embedding for it, so it gets a fresh one, as a new client does."""
    monkeypatch.setattr(federation, "VISIT_EVERY_S", 0.0)
    config = RunConfig(clients=2, rounds=4, eval_every=2, local=LocalConfig(steps=1), gains=True, **SMALL)  # type: ignore[arg-type]
    grid, late = inline_grid(config.model_copy(update={"clients": 3}), tmp_path), Told()
    nodes = list(grid.get_nodes())
    grid.get_nodes = lambda: nodes[: 3 if late.selection else 2]  # type: ignore[method-assign]

    class First(RunFolder):
        def selected(self, selection: Selection, state: Any, roster: Any) -> None:
            if selection.round == 2:
                super().selected(selection, state, roster)

    recorder = First(tmp_path, config, "run")
    Session(config, grid, "run", [recorder, late], selected_state=recorder.selected_state).run()
    assert list(late.gains[0]) == ["client-0", "client-1", "client-2"]


def test_who_is_away_counts_as_one_who_has_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 4 clients has trained in about 6 of 12 rounds, also where only two are left to compare."""
    counts = {"clients": 4, "cohort": 2, "rounds": 12, "eval_every": 12}
    config = RunConfig(strategy="fedavg", gains=True, local=LocalConfig(steps=1), **counts)  # type: ignore[arg-type]
    asked: list[int] = []
    send = Post.send

    def watched(self: Post, orders: Any, *more: Any, **named: Any) -> Any:
        asked.extend(order.rounds for _, order, _ in orders if isinstance(order, CompareOrder))
        return send(self, orders, *more, **named)

    class Leaving(Listener):
        def phase_done(self, algorithm: Any) -> None:
            for node in (2, 3):
                session.roster.leave(node)

    monkeypatch.setattr(Post, "send", watched)
    session = Session(config, inline_grid(config, tmp_path), "run", [Leaving()])
    session.run()
    assert asked == [6, 6]


@pytest.mark.parametrize(
    ("cohort", "clients", "done", "rounds"), [(2, 4, 12, 6), (2, 3, 4, 3), (4, 2, 7, 7), (3, 3, 5, 5), (2, 0, 3, 3)]
)
def test_training_alone_takes_as_many_rounds_as_a_client_has_trained(
    cohort: int, clients: int, done: int, rounds: int
) -> None:
    """A cohort of more than there are, such as beside novel clients, trains each in every round."""
    config = SimpleNamespace(cohort=cohort)
    run: Any = SimpleNamespace(
        config=config, federation=SimpleNamespace(roster=range(clients + 1)), may_train=lambda row: row < clients
    )
    assert rounds_alone(run, done) == rounds


@pytest.mark.parametrize(
    ("changes", "lie"),
    [
        ({}, False),
        ({"value": -0.1}, True),  # it is worse by what is told, and was better
        ({"metric": "rmse"}, True),
        ({"metric": "rmse", "value": -0.1}, False),
        ({"test": (0.2, 0.8), "value": 0.6, "low": 0.5, "high": 0.7}, True),
        ({"low": 0.19}, True),
        ({"low": 0.0, "high": 0.01}, True),
        ({"low": 0.11}, False),  # the bootstrap of a skewed metric
        ({"low": 0.1 + 1e-9}, False),  # rounding
        ({"chosen": "alone", "value": 0.0, "low": 0.0, "high": 0.0}, False),
        ({"value": 0.2}, True),
        ({"high": 7.0}, True),
        ({"low": float("-inf")}, True),
        ({"test": (1e6, 1e6 - 0.1), "value": 0.1}, True),
    ],
)
def test_a_gain_that_cannot_be_is_a_lie(changes: dict[str, Any], lie: bool) -> None:
    changes = dict(changes)
    metric = changes.pop("metric", "accuracy")
    told = replace(Gain("personal", 0.1, -0.1, 0.2, ("personal", "alone"), (0.9, 0.8)), **changes)
    with pytest.raises(WireError, match="gain: expected") if lie else nullcontext():
        check_gain(told, metric)


def test_they_compare_in_asynchronous_mode(tmp_path: Path) -> None:
    told = play(tmp_path, "pfedhn", asynchronous=True, gains_every=1, **SMALL)
    assert told.rounds == [1, 2, 3] and all(len(gains) == 3 for gains in told.gains)


def test_lines_hold_the_sentence_and_the_numbers(tmp_path: Path) -> None:
    play(tmp_path, "fedavg")
    lines = [json.loads(line) for line in (tmp_path / "gains.jsonl").read_text().splitlines()]
    assert [line["client"] for line in lines] == ["client-0", "client-1", "client-2"]
    assert all(line["says"].startswith(line["client"]) and line["gain"]["chosen"] in MODELS for line in lines)


def test_scores_of_the_kept_models_are_none_of_a_comparison(tmp_path: Path) -> None:
    """In phase 2 of two, clients that trained are scored once. Halfway they compare before that."""
    more: dict[str, Any] = {"cohort": 3, "rounds": 5, "eval_every": 2, "gains_every": 3}
    told = play(tmp_path, "odpfl", options={"mode": "two-phase", "tune": 0.6}, **more)
    assert told.rounds == [3, 5] and set(told.gains[0]) == {"client-0", "client-1", "client-2"}


def test_with_a_frozen_hypernetwork_those_who_train_count_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tmp_path / "first", "pfedhn", clients=2, cohort=2, **SMALL)
    shutil.copytree(tmp_path / "first" / "clients", tmp_path / "second" / "clients")
    asked: list[int] = []
    monkeypatch.setattr("hyperbloom.server.loop.session.ask_gains", lambda run, number, rounds: asked.append(rounds))
    options = {**SMALL["options"], "freeze": True}
    changes: dict[str, Any] = {"init_from": str(tmp_path / "first"), "options": options, "clients": 6, "cohort": 1}
    play(tmp_path / "second", "pfedhn", rounds=4, gains_every=2, **changes)
    assert asked == [1, 1], "four clients train, one in each of four rounds"


def test_a_card_tells_no_gain_of_another_rounds_model(tmp_path: Path) -> None:
    """A run that was stopped has the answers of the middle, and the model that validation selected later."""
    play(tmp_path, "pfedhn", **SMALL)
    lines = [json.loads(text) for text in (tmp_path / "gains.jsonl").read_text().splitlines()]
    changed = [line | {"round": line["round"] + 1, "gain": line["gain"] | {"chosen": "common"}} for line in lines]
    (tmp_path / "gains.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in changed))
    export = Export(tmp_path)
    for client in export.clients(None):
        _, _, card = export.model(client)
        assert not any("gains" in remark or "training alone" in remark for remark in card.remarks)
