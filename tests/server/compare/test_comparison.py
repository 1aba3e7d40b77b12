"""`flower-server compare`: cells are ordinary runs, what is finished is kept, and the table says what they say."""

import csv
import hashlib
import io
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperbloom.common.config import RunConfig, load_run_config
from hyperbloom.common.errors import CohortError, ConfigError
from hyperbloom.common.models import ModelSpec, full_layout
from hyperbloom.server.cli import main
from hyperbloom.server.compare import comparison, table
from hyperbloom.server.compare.comparison import Cell, open_comparison, plan
from hyperbloom.server.compare.table import markdown, read_results, write_table
from hyperbloom.server.live.run import how_far
from hyperbloom.server.loop.listener import RoundReport
from hyperbloom.server.runs.checkpoint import locked
from hyperbloom.server.runs.course import Course
from hyperbloom.server.watch.tracking import tracked
from hyperbloom.server.watch.view import TerminalView

from ..html import Page, check_self_contained

CONFIG = """
strategy: pfedhn
baselines: [local]
clients: 3
cohort: 2
rounds: 4
eval_every: 2
checkpoint_every: 2
data: {max_train: 40}
local: {steps: 3}
options: {hidden_dim: 8}
options_by_strategy:
  pfedhn: {embedding_dim: 2}
  ghn: {latent: 8}
"""
STRATEGIES = ("pfedhn", "local")


def compare(file: Path, out: Path, *more: str, strategies: str = ",".join(STRATEGIES), seeds: int = 2) -> int:
    """Run the command."""
    flags = ["--config", str(file), "--strategies", strategies, "--seeds", str(seeds), "--out", str(out)]
    return main(["compare", *flags, *more])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run's file."""
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def out(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a whole comparison."""
    folder = tmp_path_factory.mktemp("compared") / "out"
    assert compare(file, folder) == 0
    return folder


@pytest.fixture
def copy(out: Path, tmp_path: Path) -> Path:
    """Return a copy of it."""
    return Path(shutil.copytree(out, tmp_path / "copy"))


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_there_is_a_run_folder_per_strategy_and_seed_and_a_table_and_a_page(out: Path) -> None:
    folders = {f"{name}-seed{seed}" for name in STRATEGIES for seed in (0, 1)}
    files = {
        "comparison.yaml",
        "comparison.md",
        "comparison.json",
        "comparison.html",
        "curves.csv",
        ".lock",
    }
    assert {path.name for path in out.iterdir()} == folders | files
    for name in STRATEGIES:
        for seed in (0, 1):
            config = load_run_config(out / f"{name}-seed{seed}" / "config.yaml", {})
            assert (config.strategy, config.seed, config.rounds, config.baselines) == (name, seed, 4, ())
            assert config.options == ({"hidden_dim": 8, "embedding_dim": 2} if name == "pfedhn" else {})


def test_a_cell_is_the_run_that_flower_server_makes(out: Path, file: Path, tmp_path: Path) -> None:
    flags = ["--set", "options={hidden_dim: 8, embedding_dim: 2}", "--set", "baselines=[]", "--seed", "1"]
    plain = tmp_path / "run.yaml"
    plain.write_text(CONFIG.partition("options_by_strategy")[0])
    folder = tmp_path / "pfedhn-seed1"  # the name is in every order, and so in the bytes
    assert main(["--config", str(plain), "--engine", "inline", "--run-dir", str(folder), *flags]) == 0
    alone, cell = folder, out / "pfedhn-seed1"
    assert (alone / "summary.json").read_text() == (cell / "summary.json").read_text()
    assert (alone / "config.yaml").read_text() == (cell / "config.yaml").read_text()
    for one, other in zip(lines(alone / "metrics.jsonl"), lines(cell / "metrics.jsonl"), strict=True):
        timeless = {key for key in one if key not in ("seconds", "elapsed")}
        assert {key: one[key] for key in timeless} == {key: other[key] for key in timeless}


def test_strategies_train_the_same_clients_in_the_same_rounds(out: Path) -> None:
    cohorts = [
        [(line["round"], line["client"]) for line in lines(out / f"{name}-seed1/clients.jsonl") if "seconds" in line]
        for name in STRATEGIES
    ]
    assert cohorts[0] == cohorts[1]
    assert len(cohorts[0]) == 4 * 2


def test_the_table_is_what_the_run_folders_say(out: Path) -> None:
    rows = {row["name"]: row for row in json.loads((out / "comparison.json").read_text())}
    assert list(rows) == list(STRATEGIES)
    for name in STRATEGIES:
        found = [json.loads((out / f"{name}-seed{seed}/summary.json").read_text())[name] for seed in (0, 1)]
        each = np.array([list(one["test_accuracy"].values()) for one in found])  # (seeds, clients)
        row = {key: float(value) for key, value in rows[name].items() if key != "name"}
        assert row["seeds"] == 2
        assert row["mean"] == pytest.approx(each.mean())
        assert row["deviation"] == pytest.approx(each.mean(1).std(ddof=1))
        assert row["client_std"] == pytest.approx(each.std(1).mean())
        assert row["client_worst"] == pytest.approx(each.min(1).mean())
        told = [line["seconds"] for seed in (0, 1) for line in lines(out / f"{name}-seed{seed}/metrics.jsonl")]
        assert row["seconds"] == pytest.approx(sum(told) / 2)
        assert f"| {name} " in (out / "comparison.md").read_text()
        shown = f"{each.mean():.2f} +- {each.mean(1).std(ddof=1):.2f}"
        assert shown in (out / "comparison.md").read_text()


def test_bytes_are_those_of_the_weights_and_little_more(out: Path) -> None:
    size = 4 * full_layout(ModelSpec("auto", "M", (1, 8, 8), 10).resolved()).numel
    pfedhn = [(line["bytes_down"], line["bytes_up"]) for line in lines(out / "pfedhn-seed0/metrics.jsonl")]
    for bytes_of_round in (count for both in pfedhn for count in both):
        assert 2 * size < bytes_of_round < 2 * (size + 500)  # a cohort of two; evaluations are left out
    for down, up in ((line["bytes_down"], line["bytes_up"]) for line in lines(out / "local-seed0/metrics.jsonl")):
        assert 0 < up < down < 2 * 500
    rows = json.loads((out / "comparison.json").read_text())
    assert float(rows[0]["bytes_down"]) == pytest.approx(sum(down for down, _ in pfedhn) / 8, abs=1)


def test_the_curves_are_all_evaluations(out: Path) -> None:
    rows = list(csv.reader(io.StringIO((out / "curves.csv").read_text())))
    assert rows[0] == ["strategy", "seed", "round", "test_mean"]
    for name in STRATEGIES:
        for seed in (0, 1):
            told = [line for line in lines(out / f"{name}-seed{seed}/metrics.jsonl") if "test_mean" in line]
            expected = [[name, str(seed), str(line["round"]), str(line["test_mean"])] for line in told]
            assert [row for row in rows if row[:2] == [name, str(seed)]] == expected
            assert [line["round"] for line in told] == [2, 4]


def test_the_page_needs_nothing_else_and_says_what_the_table_says(out: Path) -> None:
    check_self_contained(out / "comparison.html")
    page = Page(out / "comparison.html")
    rows = json.loads((out / "comparison.json").read_text())
    (table,) = page.tables.values()
    assert [cells[:2] for cells in table[1:]] == [["pfedhn", "2"], ["local", "2"]]
    for row, cells in zip(rows, table[1:], strict=True):
        accuracy = f"{float(row['mean']):.2f} ± {float(row['deviation']):.2f}"
        assert [cell.strip() for cell in cells[2:5]] == [
            accuracy,
            f"{float(row['client_worst']):.2f}",
            f"{float(row['client_std']):.2f}",
        ]
    assert len(page.styled("band")) == len(rows), "the range over seeds"
    curves = list(csv.DictReader(io.StringIO((out / "curves.csv").read_text())))
    first = np.mean([float(row["test_mean"]) for row in curves if (row["strategy"], row["round"]) == ("pfedhn", "2")])
    assert f"pfedhn goes from {first:.1f} to " in page.text


# ---------------------------------------------------------------------- going on


def test_what_is_finished_is_kept_and_what_was_stopped_is_run_again(
    file: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = 0

    def stop(view: TerminalView, report: RoundReport) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 7:  # in the second cell
            raise KeyboardInterrupt

    here = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(TerminalView, "round_done", stop)
        assert compare(file, here) == 130
    assert "stopped" in capsys.readouterr().err
    assert [path.parent.name for path in sorted(here.glob("*/cell.json"))] == ["pfedhn-seed0"]
    assert len(lines(here / "local-seed0/metrics.jsonl")) == 3
    before = (here / "pfedhn-seed0/metrics.jsonl").stat().st_mtime_ns
    assert compare(file, here) == 0
    assert (here / "pfedhn-seed0/metrics.jsonl").stat().st_mtime_ns == before
    assert len(lines(here / "local-seed0/metrics.jsonl")) == 4
    told = capsys.readouterr().out
    assert "pfedhn-seed0: finished before, kept; 1/4" in told
    assert "local-seed0: finished before" not in told
    assert re.search(r"local-seed0: .* s from round 2 on; 2/4", told)
    # Stopped or not, the result is the same.
    assert (here / "curves.csv").read_text() == (out / "curves.csv").read_text()


def test_a_run_that_cannot_be_gone_on_with_is_kept(file: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = copy / "local-seed0"
    (cell / "cell.json").unlink()
    # Complete, and stopped before that was noted: nothing is run again.
    before = (cell / "metrics.jsonl").read_bytes()
    assert compare(file, copy) == 0
    assert (cell / "metrics.jsonl").read_bytes() == before
    assert (cell / "cell.json").exists()
    # Begun by a version whose configuration read otherwise, and not ended.
    (cell / "cell.json").unlink()
    about = json.loads((cell / "environment.json").read_text())
    (cell / "environment.json").write_text(json.dumps({key: about[key] for key in about if key != "ended"}))
    point = max((cell / "checkpoints").glob("0*.json"))
    stored = json.loads(point.read_text())
    stored["body"] |= {"config": "of another version", "phase": 0}
    stored["digest"] = hashlib.blake2b(json.dumps(stored["body"], sort_keys=True).encode(), digest_size=16).hexdigest()
    point.write_text(json.dumps(stored))
    assert compare(file, copy) == 2
    assert f"--out: cannot go on in {cell} (delete it to run it anew): " in capsys.readouterr().err
    # Checkpoints of which none can be read: nothing is deleted, however often it is tried.
    point.write_text("no checkpoint")
    for _ in range(2):
        assert compare(file, copy) == 2
        assert "found none that can be used" in capsys.readouterr().err
    assert point.read_text() == "no checkpoint"
    assert (cell / "metrics.jsonl").read_bytes() == before


def test_one_that_is_killed_before_its_first_round_can_be_begun_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    here = tmp_path / "stopped"
    for name in (
        "runs.running.adopt_identities",
        "grids.engine.inline_grid",
        "compare.comparison.shutil.rmtree",
        "loop.session.Session.run",
    ):
        with monkeypatch.context() as patch:  # the one behind meets what this one has left
            patch.setattr(f"hyperbloom.server.{name}", stop)
            assert compare(file, here, strategies="local", seeds=1) == 130
        if (here / "local-seed0" / "config.yaml").exists():
            (here / "local-seed0" / "clients" / "client-0").mkdir(parents=True, exist_ok=True)
    assert compare(file, here, strategies="local", seeds=1) == 0


def test_a_run_at_which_a_server_is_at_work_is_left_alone(
    file: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(view: TerminalView, report: RoundReport) -> None:
        if report.number == 3:
            raise KeyboardInterrupt

    here = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(TerminalView, "round_done", stop)
        assert compare(file, here) == 130
    cell = here / "pfedhn-seed0"
    before = {path: path.read_bytes() for path in cell.rglob("*") if path.is_file()}
    with locked(cell):  # as `flower-server --resume` holds it
        assert compare(file, here) == 2
    assert f"another server is still at work in {cell}" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in cell.rglob("*") if path.is_file()} == before
    assert compare(file, here) == 0
    assert (here / "curves.csv").read_text() == (out / "curves.csv").read_text()


def test_strategies_and_seeds_may_be_added(file: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(file, copy, strategies="fedavg,local", seeds=3) == 0
    told = capsys.readouterr().out
    assert told.count("finished before") == 2
    assert (copy / "fedavg-seed2/cell.json").exists()
    assert "| local " in (copy / "comparison.md").read_text()
    assert "| pfedhn " not in (copy / "comparison.md").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "local.steps=4"], "was begun with local.steps = 3, found 4; choose another"),
        (["--set", "pfedhn.hidden_dim=9"], "pfedhn-seed0 was begun with options.hidden_dim = 8, found 9; choose"),
        (["--engine", "grpc"], "was begun with engine = inline, found grpc; choose another"),
    ],
)
def test_another_comparison_is_refused(
    file: Path, copy: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file()}
    assert compare(file, copy, *flags) == 2
    told = capsys.readouterr().err
    assert told.startswith("flower-server compare: --out: ") and told.count("\n") == 1
    assert message in told
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file() and path in before} == before


def test_settings_may_change_until_a_run_has_begun(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, out = tmp_path / "texts.csv", tmp_path / "out"
    table.write_text("text,y\n" + "".join(f"a patient who says {number},{number % 2}\n" for number in range(200)))
    bad = ["--set", f"data.name={table}", "--set", "data.label=y"]
    assert compare(file, out, *bad, strategies="local", seeds=1) == 2
    assert "expected columns beside the label" in capsys.readouterr().err
    assert (out / "local-seed0/config.yaml").exists()
    assert compare(file, out, strategies="local", seeds=1) == 0
    assert compare(file, out, *bad, strategies="local", seeds=1) == 2
    assert "was begun with data.name = digits" in capsys.readouterr().err


def test_a_folder_with_other_files_is_refused(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("dear")
    assert compare(file, tmp_path) == 2
    assert "expected a new folder, or an earlier comparison" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "dear"
    (tmp_path / "comparison.yaml").write_text("clients: 3\n")
    assert compare(file, tmp_path) == 2, "a user's own settings may be called so"
    assert (tmp_path / "comparison.yaml").read_text() == "clients: 3\n"


def test_a_folder_in_a_cells_place_is_refused(file: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "fedavg-seed0").mkdir()
    (copy / "fedavg-seed0/mine.txt").write_text("dear")
    assert compare(file, copy, strategies="fedavg", seeds=1) == 2
    assert "expected a run folder or nothing, found other files" in capsys.readouterr().err
    assert (copy / "fedavg-seed0/mine.txt").exists()


def test_two_processes_cannot_work_in_one_folder(tmp_path: Path) -> None:
    def begin() -> None:
        with open_comparison(tmp_path / "x", {"a": 1}, []):
            pass

    with open_comparison(tmp_path / "x", {"a": 1}, []), pytest.raises(ConfigError, match="another process is at work"):
        begin()
    begin()


def test_one_that_cannot_be_trained_does_not_stop_the_others(
    file: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = comparison._run

    def fail(cell: Cell, *args: Any) -> int:
        if cell.folder.name == "fedavg-seed0":
            raise CohortError("nobody answers")
        return run(cell, *args)

    monkeypatch.setattr(comparison, "_run", fail)
    assert compare(file, copy, strategies="fedavg,pfedhn", seeds=2) == 4
    assert "fedavg-seed0: failed: nobody answers; 1/4" in capsys.readouterr().out
    assert (copy / "fedavg-seed1/cell.json").exists()
    assert "fedavg-seed0: not finished\n" in (copy / "comparison.md").read_text()
    monkeypatch.undo()
    assert compare(file, copy, strategies="fedavg,pfedhn", seeds=2) == 0
    assert "not finished" not in (copy / "comparison.md").read_text()


# ---------------------------------------------------------------------- options


def planned(values: dict[str, Any], strategies: Sequence[str] = STRATEGIES, **overrides: Any) -> list[RunConfig]:
    """Return the configurations of a comparison with one seed."""
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return [cell.config for cell in plan(Path("x"), strategies, 1, values, dotted, "run.yaml")]


def test_each_strategy_gets_its_own_options_and_no_others() -> None:
    values = {"options_by_strategy": {"pfedhn": {"momentum": 0.5}, "ghn": {"latent": 8}}}
    pfedhn, local, ghn = planned(values, ("pfedhn", "local", "ghn"), pfedhn__hidden_dim=4, rounds=20)
    assert (pfedhn.options, local.options, ghn.options) == ({"momentum": 0.5, "hidden_dim": 4}, {}, {"latent": 8})
    assert {config.rounds for config in (pfedhn, local, ghn)} == {20}
    same = [config.model_copy(update={"strategy": "", "options": {}}) for config in (pfedhn, local, ghn)]
    assert same[0] == same[1] == same[2]


def test_an_option_of_a_strategy_in_a_package_is_its_own() -> None:
    names = ("figures.scaled:PFedHNScaled", "pfedhn")
    cells = plan(Path("x"), names, 1, {}, {f"{names[0]}.clip": 2.0}, "run.yaml")
    assert [cell.config.options for cell in cells] == [{"clip": 2.0}, {}]


def test_the_files_options_are_those_of_its_strategy() -> None:
    pfedhn, local = planned({"strategy": "pfedhn", "options": {"momentum": 0.5, "clip": 1.0}}, pfedhn__clip=2.0)
    assert (pfedhn.options, local.options) == ({"momentum": 0.5, "clip": 2.0}, {})
    assert [config.options for config in planned({"strategy": "ghn", "options": {"latent": 8}})] == [{}, {}]


def test_the_section_of_local_training_is_not_the_strategy_of_that_name() -> None:
    assert {config.local.steps for config in planned({}, local__steps=7)} == {7}


def test_seeds_count_from_the_runs_own() -> None:
    cells = plan(Path("x"), ["local", "fedavg"], 2, {"seed": 5}, {}, "")
    assert [cell.folder.name for cell in cells] == ["local-seed5", "fedavg-seed5", "local-seed6", "fedavg-seed6"]


@pytest.mark.parametrize(
    ("values", "overrides", "message"),
    [
        ({}, {"hidden_dim": 4}, "--set hidden_dim: expected a key of the run, or an option as STRATEGY.OPTION=VALUE"),
        ({}, {"strategy": "ghn"}, "--set strategy: expected --strategies"),
        ({}, {"options.clip": 1.0}, "--set options.clip: expected --strategies, or STRATEGY.OPTION=VALUE"),
        ({}, {"pfedme.lamda": 1.0}, "--set pfedme.lamda: pfedme is not among --strategies pfedhn,local$"),
        ({"options_by_strategy": {"no": {}}}, {}, "options_by_strategy: expected some of .*, found 'no' in run.yaml"),
        ({"options_by_strategy": [1]}, {}, "options_by_strategy: expected strategies, and for each its options"),
        ({"round": 4}, {}, "round: unknown key in run.yaml. Did you mean rounds"),
        ({"options": 3}, {}, "strategy, options: expected a name, keys and values; found pfedhn, 3 in run.yaml"),
        ({"strategy": ["a"], "options": {"b": 1}}, {}, r"expected a name, keys and values; found \['a'\], .*run.yaml"),
    ],
)
def test_unclear_options_are_refused(values: dict[str, Any], overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(Path("x"), STRATEGIES, 1, values, overrides, "run.yaml")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--strategies", "pfedhn,no"], "--strategies: expected some of ditto, .*, found 'no'"),
        (["--strategies", "local,local"], "--strategies: expected names, each once"),
        (["--strategies", "local", "--seeds", "0"], "--seeds: expected 1 to 1000, found 0"),
        (["--strategies", "local", "--seeds", "9" * 20], "--seeds: expected 1 to 1000, found 9"),
        (["--strategies", "local,fedavg", "--set", "fedavg.mu=1"], "fedavg: mu: unknown key in options of fedavg"),
        (["--strategies", "local", "--set", "data.split=no"], "local: data.split: expected one of"),
        (
            ["--strategies", "local", "--set", "rounds=0"],
            "rounds: expected greater than 0, found 0 in the command line",
        ),
        (["--strategies", "local", "--config", "nowhere.yaml"], "--config: cannot read nowhere.yaml"),
    ],
)
def test_wrong_settings_are_one_line_and_nothing_is_begun(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *flags, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(ConfigError, match=f"flower-server compare: {message}"):
        raise ConfigError(error)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- table and view


def test_a_table_reads_well_as_it_is() -> None:
    assert markdown(("a", "b"), [("x", "10"), ("long", "1")]).splitlines() == [
        "| a    |  b |",
        "|------|---:|",
        "| x    | 10 |",
        "| long |  1 |",
    ]


def test_clients_that_were_not_evaluated_are_told(copy: Path) -> None:
    cell = Cell("local", load_run_config(copy / "local-seed0/config.yaml", {}), copy / "local-seed0")
    more = replace(cell, config=cell.config.model_copy(update={"clients": 4}))
    assert "evaluated" not in write_table(copy, [cell])
    assert "local-seed0: 3 of 4 clients were evaluated\n" in write_table(copy, [more])
    novel = replace(cell, config=more.config.model_copy(update={"novel": 25}))
    assert "evaluated" not in write_table(copy, [novel]), "it has no model of its own"


def test_bars_of_errors_are_as_long_as_the_largest_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "comparison.yaml").write_text("")
    line = {"round": 1, "seconds": 1.0, "clients": 2}
    figures = {"test_mean": 50.0, "test_std": 40.0, "test_worst": 90.0}
    course = Course("local", [line], {1: 50.0}, 1, figures, {"a": 10.0, "b": 90.0}, "rmse")
    cell = Cell("local", RunConfig(strategy="local", clients=2, cohort=2), tmp_path / "local-seed0")
    monkeypatch.setattr(table, "read_results", lambda cells: {"local": [(cell, course)]})
    write_table(tmp_path, [cell])
    page = Page(tmp_path / "comparison.html")
    assert [each["style"] for each in page.all("i")][:2] == ["--v:0.5556", "--v:1.0000"]
    assert "The RMSE of local is 50.00 on the clients' test examples" in page.text


def test_programs_get_the_table_as_json_and_nothing_else(
    file: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(file, copy, "--json") == 0
    said = capsys.readouterr()
    rows = json.loads(said.out)
    assert [row["name"] for row in rows] == list(STRATEGIES) and rows[0]["seeds"] == 2
    assert f"everything is in {copy}" in said.err


def test_a_damaged_cell_is_named(copy: Path) -> None:
    cell = Cell("local", load_run_config(copy / "local-seed0/config.yaml", {}), copy / "local-seed0")
    lines = (cell.folder / "metrics.jsonl").read_text().splitlines()
    (cell.folder / "metrics.jsonl").write_text("\n".join([lines[0], "{", *lines[2:], ""]))
    with pytest.raises(ConfigError, match=r"local-seed0: damaged .*3 of 4 rounds.*; remove it"):
        read_results([cell])
    (cell.folder / "summary.json").write_text("{")
    with pytest.raises(ConfigError, match=r"local-seed0: damaged .*; remove it"):
        read_results([cell])


def test_a_strategy_that_no_client_fits_says_why_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "public.npz", x=np.zeros((4, 1, 9, 9), np.float32))
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG)
    flags = ["--set", f"fedhenn.rad={tmp_path}/public.npz", "--set", "join_timeout_s=1"]
    assert compare(file, tmp_path / "out", *flags, strategies="fedhenn", seeds=1) == 4
    begins, waits, refused, *more = capsys.readouterr().out.splitlines()[1:]
    assert begins == "fedhenn-seed0: begins"
    assert " waiting for 3 clients until " in waits
    assert " refused node 2: expected inputs of shape (1, 9, 9)" in refused
    assert any(line.startswith("fedhenn-seed0: failed: 0 of 3 clients joined") for line in more)


def test_a_run_that_patience_has_ended_is_compared(tmp_path: Path) -> None:
    """So small a rate makes nothing better after round 1."""
    keys = "clients=2 rounds=9 eval_every=1 patience=1 local.learning_rate=1e-12 local.steps=1"
    still = [part for key in keys.split() for part in ("--set", key)]
    size = ["--strategies", "local", "--seeds", "1", "--engine", "inline"]
    assert main(["compare", *size, *still, "--out", str(tmp_path / "all")]) == 0
    (row,) = json.loads((tmp_path / "all" / "comparison.json").read_text())
    assert row["name"] == "local", row
    assert len((tmp_path / "all" / "local-seed0" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_metric_that_no_client_has_on_its_test_examples_is_no_number(tmp_path: Path) -> None:
    """All test examples are of one class, so no AUROC is defined there. Validation selects as usual."""
    rng, splits = np.random.default_rng(0), {"train": 40, "val": 20, "test": 12}
    arrays = {f"x_{split}": rng.normal(size=(count, 6)).astype(np.float32) for split, count in splits.items()}
    arrays |= {f"y_{split}": np.arange(count) % (1 if split == "test" else 2) for split, count in splits.items()}
    np.savez(tmp_path / "data.npz", **arrays)
    keys = f"data.name={tmp_path}/data.npz data.split=iid clients=2 cohort=2 rounds=9 eval_every=1 patience=1"
    sets = [part for key in [*keys.split(), "select=auroc", "local.learning_rate=1e-12"] for part in ("--set", key)]
    size = ["--strategies", "fedavg,local", "--seeds", "2", "--engine", "inline"]
    assert main(["compare", *size, *sets, "--out", str(tmp_path / "out")]) == 0
    assert " nan |" in (tmp_path / "out" / "comparison.md").read_text()
    assert '"mean": null' in (tmp_path / "out" / "comparison.json").read_text()  # JSON has no NaN
    run = tmp_path / "out" / "fedavg-seed0"
    assert main(["report", str(run)]) == 0 and "nan" in Page(run / "report.html").text
    assert how_far(run, as_json=False).startswith("complete: fedavg: round 2 of 9")


def test_others_on_the_machine_cannot_look_into_its_folder(tmp_path: Path) -> None:
    with (
        open_comparison(tmp_path / "out", {}, []),
        locked(tmp_path / "out" / "cell"),
        tracked(tmp_path / "run", (), print),
    ):
        modes = [
            path.stat().st_mode & 0o007 for path in (tmp_path / "out", tmp_path / "out" / "cell", tmp_path / "run")
        ]
    assert modes == [0, 0, 0]
