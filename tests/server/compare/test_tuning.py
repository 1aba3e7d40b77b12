"""`flower-server tune`: halving finds what is best, its runs are ordinary ones, and it goes on where it was stopped."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hyperbloom.common.config import load_run_config
from hyperbloom.common.errors import CohortError, ConfigError
from hyperbloom.server.cli import main
from hyperbloom.server.compare import comparison, tuning
from hyperbloom.server.compare.comparison import Cell
from hyperbloom.server.compare.tuning import grid_of, halve
from hyperbloom.server.loop.listener import RoundReport
from hyperbloom.server.watch.view import TerminalView

FLAGS = ["--set", "clients=2", "--set", "strategy=local", "--set", "data.max_train=30", "--set", "local.steps=3"]
OVER = ["--over", "local.learning_rate=0.00001,0.05,0.1", "--over", "local.batch_size=8,16"]
RATES = (0.00001, 0.05, 0.1)
WHOLE = [
    "--set",
    "cohort=2",
    "--set",
    "baselines=[fedavg]",
    "--set",
    "gains=true",
    *FLAGS,
    *OVER,
    "--set",
    "rounds=9",
    "--rounds",
    "4",
]


def tune(out: Path, *flags: str) -> int:
    """Run the command."""
    return main(["tune", *flags, "--out", str(out)])


# ---------------------------------------------------------------------- halving


def scorer(quality: Sequence[float], asked: list[tuple[list[int], int]]) -> Callable[..., list[float]]:
    """Return a scorer that knows each setting's quality, and notes what it is asked."""

    def score(left: Sequence[int], rounds: int) -> list[float]:
        asked.append((list(left), rounds))
        return [quality[one] * rounds for one in left]

    return score


def test_the_better_half_goes_on_for_twice_as_many_rounds() -> None:
    asked: list[tuple[list[int], int]] = []
    quality = [3.0, 9.0, 1.0, 7.0, 2.0, 8.0, 6.0, 4.0, 5.0]
    rungs = halve(9, 100, scorer(quality, asked))
    assert asked == [(list(range(9)), 12), ([1, 3, 5, 6, 8], 25), ([1, 3, 5], 50), ([1, 5], 100)]
    assert rungs[100] == {1: 900.0, 5: 800.0}
    assert {rounds: list(rung) for rounds, rung in rungs.items()} == {rounds: left for left, rounds in asked}


@pytest.mark.parametrize(
    ("count", "rounds", "rungs"),
    [
        (1, 10, [(1, 10)]),
        (2, 10, [(2, 10)]),
        (3, 10, [(3, 5), (2, 10)]),
        (8, 80, [(8, 20), (4, 40), (2, 80)]),
        (8, 2, [(8, 1), (4, 2)]),  # too few rounds for more halvings
        (8, 1, [(8, 1)]),
    ],
)
def test_the_last_two_run_all_rounds(count: int, rounds: int, rungs: list[tuple[int, int]]) -> None:
    asked: list[tuple[list[int], int]] = []
    halve(count, rounds, scorer(list(range(count)), asked))
    assert [(len(left), budget) for left, budget in asked] == rungs
    assert all(count - 1 in left for left, _ in asked), "the best one is always in it"


def test_of_equal_settings_the_first_ones_go_on_and_failed_ones_do_not() -> None:
    asked: list[tuple[list[int], int]] = []
    halve(4, 8, scorer([1.0, 1.0, 1.0, 1.0], asked))
    assert asked[-1] == ([0, 1], 8)
    asked.clear()
    halve(4, 8, scorer([tuning.WORST, 1.0, tuning.WORST, 0.0], asked))
    assert asked[-1] == ([1, 3], 8)


# ---------------------------------------------------------------------- the grid


def test_the_grid_is_what_was_asked_for() -> None:
    asked = ["local.steps=5,10", "model=mlp,lenet", "local.clip=1.0"]
    assert grid_of(asked) == {"local.steps": [5, 10], "model": ["mlp", "lenet"], "local.clip": [1.0]}
    assert grid_of(tuning.USUAL) == {"local.learning_rate": [0.005, 0.02, 0.1], "local.steps": [10, 50]}


def test_a_key_that_is_given_twice_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^--over: expected each key once, with all its values, found local\.steps again$"
    ):
        grid_of(["local.steps=5", "local.clip=1.0", "local.steps=10"])


def test_strategies_can_be_tried_too(tmp_path: Path) -> None:
    few = ["--set", "clients=2", "--set", "cohort=2", "--set", "data.max_train=30", "--set", "local.steps=1"]
    assert tune(tmp_path, *few, "--set", "rounds=2", "--over", "strategy=local,fedavg") == 0
    assert load_run_config(tmp_path / "tuned.yaml", {}).strategy in ("local", "fedavg")


@pytest.mark.parametrize(
    "text",
    ["local.steps", "local.steps=", "=5", "rounds=5,10", "seed =1,2", "select=auroc,f1", "data.name=digits,nope"],
)
def test_a_grid_without_key_or_values_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError,
        match=re.escape(f"--over: expected KEY=A,B, such as local.steps=10,50, of what may vary; found '{text}'"),
    ):
        grid_of([text])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--over", "local.step=5,6"], "local.step: unknown key in the command line. Did you mean steps?"),
        (["--over", "no_option=5"], "no_option: unknown key in options of pfedhn"),
        (["--over", "local.steps=5,many"], "local.steps: expected a valid integer"),
        (["--seeds", "0"], "Invalid value for '--seeds'"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_made(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(tmp_path / "out", *flags) == 2
    said = capsys.readouterr()
    assert message in said.err and not said.out
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a whole search over six settings."""
    folder = tmp_path_factory.mktemp("tuned") / "out"
    assert tune(folder, *WHOLE) == 0
    return folder


def test_the_folders_are_runs_of_the_settings_and_the_best_one_is_a_configuration(out: Path) -> None:
    assert {path.name for path in out.glob("*-seed0")} >= {f"1-{one}-seed0" for one in range(6)}
    counts = [len([*out.glob(f"{rounds}-*")]) for rounds in (1, 2, 4)]
    assert counts == [6, 3, 2]
    for path in out.glob("*-seed0"):
        rounds, one, _ = path.name.split("-")
        config = load_run_config(path / "config.yaml", {})
        assert (config.rounds, config.eval_every) == (int(rounds), 1)
        assert (config.local.learning_rate, config.local.batch_size) == (RATES[int(one) // 2], (8, 16)[int(one) % 2])
        assert (config.baselines, config.gains) == ((), False), "only the strategy is scored"
    val = {
        path: json.loads((path / "summary.json").read_text())["local"]["metrics"]["val_mean"]
        for path in out.glob("4-*")
    }
    best = load_run_config(max(val, key=lambda path: val[path]) / "config.yaml", {})
    found = load_run_config(out / "tuned.yaml", {})
    assert found.local == best.local
    assert found.local.learning_rate > 0.001, "with the smallest rate nothing is learned"
    assert (found.rounds, found.baselines, found.gains) == (9, ("fedavg",), True), "the rest is what the user wants"
    table = (out / "tuned.md").read_text()
    for path, value in val.items():
        (row,) = [line for line in table.splitlines() if line.startswith(f"| {setting(path)} ")]
        assert row.endswith(f" {value:.2f} |")
    assert table.splitlines()[0].split(" | ")[1:] == ["1 round", "2 rounds", "4 rounds |"]


def setting(path: Path) -> str:
    """Return the name of a cell's setting."""
    local = load_run_config(path / "config.yaml", {}).local
    return f"local.learning_rate={local.learning_rate}, local.batch_size={local.batch_size}"


def test_a_search_that_was_stopped_goes_on_and_ends_alike(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = 0

    def stop(view: TerminalView, report: RoundReport) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 6 + 3:  # in the second run of the second rung
            raise KeyboardInterrupt

    here = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(TerminalView, "round_done", stop)
        assert tune(here, *WHOLE) == 130
    assert len([*here.glob("*/cell.json")]) == 7
    assert not (here / "tuned.yaml").exists()
    before = {path: path.stat().st_mtime_ns for path in here.glob("1-*/metrics.jsonl")}
    capsys.readouterr()
    assert tune(here, *WHOLE) == 0
    assert capsys.readouterr().out.count("finished before, kept") == 7
    assert {path: path.stat().st_mtime_ns for path in before} == before
    for name in ("tuned.md", "tuned.yaml"):
        assert (here / name).read_text() == (out / name).read_text()
    assert tune(here, *WHOLE, "--over", "local.steps=3,4") == 2
    assert "was begun with over" in capsys.readouterr().err
    turned = [word for word in WHOLE if word not in OVER] + [OVER[2], OVER[3], OVER[0], OVER[1]]
    assert tune(here, *turned) == 2  # its folders are numbered in another order
    assert "was begun with over" in capsys.readouterr().err


def test_a_search_may_be_shorter_than_the_rounds_between_evaluations_of_the_run(tmp_path: Path) -> None:
    flags = [*FLAGS, "--set", "rounds=20", "--set", "eval_every=5", "--over", "local.batch_size=8,16", "--rounds", "2"]
    assert tune(tmp_path / "out", *flags) == 0
    found = load_run_config(tmp_path / "out/tuned.yaml", {})
    assert (found.rounds, found.eval_every) == (20, 5)


def test_the_shortest_budget_is_checked_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of seven rounds and five settings the first runs have one round, too few for two phases."""
    two_phases = ["--set", "strategy=odpfl", "--set", "mode=two-phase", "--set", "rounds=7"]
    search = ["tune", *two_phases, "--over", "local.learning_rate=0.01,0.02,0.03,0.04,0.05", "--out"]
    assert main([*search, str(tmp_path / "search")]) == 2
    assert "rounds: expected at least 2 for mode: two-phase, found 1" in capsys.readouterr().err
    assert not (tmp_path / "search").exists()


def test_a_setting_that_cannot_be_trained_loses_and_if_none_can_that_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, bad = comparison._run, {8}

    def fail(cell: Cell, *args: object) -> int:
        if cell.config.local.batch_size in bad:
            raise CohortError("nobody answers")
        return run(cell, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(comparison, "_run", fail)
    flags = [*FLAGS, "--over", "local.batch_size=8,16", "--rounds", "1"]
    assert tune(tmp_path / "one", *flags) == 0
    assert load_run_config(tmp_path / "one/tuned.yaml", {}).local.batch_size == 16
    assert re.search(r"local.batch_size=8 +\| +inf \|", capsys.readouterr().out)
    bad.add(16)
    assert tune(tmp_path / "none", *flags) == 4
    assert "no setting could be trained for all rounds" in capsys.readouterr().err
    assert not (tmp_path / "none/tuned.yaml").exists()


def test_a_setting_counts_by_its_mean_over_seeds(tmp_path: Path) -> None:
    flags = [*FLAGS, "--over", "local.learning_rate=0.01,0.1", "--rounds", "1", "--seeds", "2", "--set", "seed=3"]
    assert tune(tmp_path / "out", *flags) == 0
    table = (tmp_path / "out/tuned.md").read_text()
    for one, rate in enumerate(("0.01", "0.1")):
        found = [json.loads((tmp_path / f"out/1-{one}-seed{seed}/summary.json").read_text()) for seed in (3, 4)]
        mean = sum(each["local"]["metrics"]["val_mean"] for each in found) / 2
        assert re.search(rf"local.learning_rate={rate} +\| +{mean:.2f} \|", table)
    assert load_run_config(tmp_path / "out/tuned.yaml", {}).seed == 3


@pytest.mark.parametrize(
    ("score", "metric", "shown"),
    [
        (-0.2007, "r2", "-0.2007"),
        (-58443.6, "rmse", "58,444"),
        (91.25, "accuracy", "91.25"),
        (tuning.WORST, "r2", "inf"),
    ],
)
def test_a_score_has_its_own_sign(score: float, metric: str, shown: str) -> None:
    assert tuning._shown(score, metric) == shown
