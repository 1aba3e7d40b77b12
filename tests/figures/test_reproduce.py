"""`python -m figures.reproduce`: what can be run is run, beside the paper's number; what cannot be says why."""

import json
import re
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from figures import paper_tables
from figures.reproduce import program
from hyperbloom.common.config import load_run_config
from hyperbloom.common.errors import CohortError
from hyperbloom.common.program.commands import execute
from hyperbloom.server.loop.listener import RoundReport
from hyperbloom.server.loop.session import Session
from hyperbloom.server.watch.view import TerminalView

TABLE = """
paper: A, B
url: https://arxiv.org/abs/2
table: table 9
title: a small table
seeds: 2
run: {clients: 4, rounds: 6, eval_every: 2, data: {name: digits, max_train: 40}, local: {steps: 3}}
differs: [the digits are small]
columns:
  whole: {title: everybody}
  parted: {title: by halves, run: {data: {split: iid}}, parts: {even: [0, 2], odd: [1, 2], never: null}}
  stood: {title: another, stand_in: digits for galaxies}
  far: {title: far away, run: {data: {name: cifar100}}}
  seen: {title: who sees alike}
  lost: {title: lost, cannot: "it needs a telescope"}
  late:
    title: who comes late
    run: {clients: 1, model: mlp, models: [plain-4], data: {parts: 4, first: 3}}
    first: {clients: 3, cohort: 2, data: {first: 0}, local: {learning_rate: 0.1}}
methods:
  One:
    strategy: fedavg
    numbers: {whole: [90, 1.5], parted: {even: 80, odd: 70, never: 60}, stood: 50, far: 5, seen: 4, lost: 1}
  Two: {strategy: local, everyone: true, run: {rounds: 2}, note: alone, numbers: {whole: 40}}
  Three: {why_not: it is not there yet, numbers: {whole: 30, stood: 3}}
  Five:
    strategy: ghn
    after_first: true
    run: {local: {learning_rate: 1.0e-9}, options: {latent: 8, hidden: 4}}
    numbers: {late: 60}
  Six: {strategy: local, numbers: {late: 50}}
  Seven: {strategy: fedhenn, run: {options: {rad: cifar100, rows: 8}}, numbers: {seen: 7}}
  Four: {why_not: nobody wrote it, numbers: {whole: 20}}
"""


def main(words: list[str]) -> int:
    """Run the program as its command line does."""
    return execute(program, words)


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a small table in the place of the papers'."""
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers/small.yaml").write_text(TABLE)
    monkeypatch.setattr(paper_tables, "_folder", lambda: tmp_path / "papers")
    monkeypatch.chdir(tmp_path)


def accuracy(folder: Path, strategy: str) -> dict[str, float]:
    """Return the accuracy of each client of a run."""
    found: dict[str, float] = json.loads((folder / "summary.json").read_text())[strategy]["test_accuracy"]
    return found


def test_ours_stand_beside_the_papers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--root", str(tmp_path), "--rounds", "4", "--seeds", "1"]
    assert main(["small", "--column", "whole", *flags]) == 0
    out = tmp_path / "runs/reproduce-small-whole"
    text = (out / "reproduction.md").read_text()
    assert text in capsys.readouterr().out
    one = fmean(accuracy(out / "one-seed0", "fedavg").values())
    two = fmean(accuracy(out / "two-seed0", "local").values())
    table = [" ".join(line.replace("|", " ").split()) for line in text.splitlines() if line.startswith("|")]
    assert table[2:] == [
        f"One {one:.2f} 1 90.00 +- 1.50 {one - 90:+.2f}",
        f"Two {two:.2f} 1 40.00 {two - 40:+.2f}",
        "Three not available 0 30.00",
        "Four not available 0 20.00",
    ]
    assert [line.removeprefix("- ") for line in text.splitlines() if line.startswith("- ")] == [
        "the digits are small",
        "One: 4 rounds, not 6",
        "Two: alone",
        "Three: not available: it is not there yet",
        "Four: not available: nobody wrote it",
        "seeds: 1, not 2",
        "accuracy is the mean over clients, at the round that validation selected",
    ]
    assert len((out / "two-seed0/metrics.jsonl").read_text().splitlines()) == 2
    assert main(["small", "--column", "whole", *flags]) == 0
    assert capsys.readouterr().out.count("finished before, kept") == 2


def test_seeds_may_begin_elsewhere(tmp_path: Path) -> None:
    flags = ["small", "--column", "whole", "--methods", "One", "--root", str(tmp_path), "--rounds", "2", "--out"]
    assert main([*flags, str(tmp_path / "first"), "--seeds", "2"]) == 0
    assert main([*flags, str(tmp_path / "second"), "--seeds", "1", "--first-seed", "1"]) == 0
    assert [path.name for path in (tmp_path / "second").glob("one-*")] == ["one-seed1"]
    assert accuracy(tmp_path / "second/one-seed1", "fedavg") == accuracy(tmp_path / "first/one-seed1", "fedavg")


def test_parts_are_means_over_their_clients(tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--seeds", "1", "--out", str(out), "--set", "local.steps=2"]
    assert main(["small", "--column", "parted", *flags]) == 0
    each = accuracy(out / "one-seed0", "fedavg")
    even, odd = (fmean(each[f"client-{index}"] for index in half) for half in ((0, 2), (1, 3)))
    text = (out / "reproduction.md").read_text()
    table = [" ".join(line.replace("|", " ").split()) for line in text.splitlines() if line.startswith("|")]
    assert table[2:] == [
        f"One, even {even:.2f} 1 80.00 {even - 80:+.2f}",
        f"One, odd {odd:.2f} 1 70.00 {odd - 70:+.2f}",
        "One, never not measured 1 60.00",
    ]
    assert "- set here: local.steps = 2\n" in text


def test_a_method_may_start_from_a_run_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    flags = ["small", "--column", "late", "--seeds", "1", "--rounds", "2", "--out", str(out)]
    assert main(flags) == 0
    clients = {name: set(accuracy(out / name, "ghn")) for name in ("five-seed0-first", "five-seed0")}
    assert clients == {"five-seed0-first": {"client-0", "client-1", "client-2"}, "five-seed0": {"client-3"}}
    assert set(accuracy(out / "six-seed0", "local")) == {"client-3"}
    # Its own rate is next to nothing: what it has in the end is what the others have learned.
    learned, own = (load_file(out / name / "hypernetwork.safetensors") for name in ("five-seed0-first", "five-seed0"))
    for name, values in learned.items():
        torch.testing.assert_close(own[name], values, rtol=0, atol=1e-6)
    assert learned
    rounds = [json.loads(line)["round"] for line in (out / "five-seed0/metrics.jsonl").read_text().splitlines()]
    assert rounds == [0, 1, 2]
    text = (out / "reproduction.md").read_text()
    assert re.search(r"\| Five +\| +[\d.]+ \| +1 \| 60.00 \|", text)
    assert re.search(r"\| Six +\| +[\d.]+ \| +1 \| 50.00 \|", text)
    assert "first" not in text.split("Where our")[0]
    capsys.readouterr()
    for again in (out, Path("out")):  # the fixture works in tmp_path
        assert main([*flags[:-1], str(again)]) == 0
        assert capsys.readouterr().out.count("finished before, kept") == 3


def test_a_folder_may_be_moved_in_the_midst_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["small", "--column", "late", "--seeds", "1", "--rounds", "2", "--methods", "Five", "--out"]
    rounds = []

    def stop(view: TerminalView, report: RoundReport) -> None:
        rounds.append(report.number)
        if rounds == [1, 2, 0, 1]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TerminalView, "round_done", stop)
        assert main([*flags, "out"]) == 130
    (tmp_path / "out").rename(tmp_path / "moved")
    capsys.readouterr()
    assert main([*flags, "moved"]) == 0
    assert capsys.readouterr().out.count("finished before, kept") == 1
    assert set(accuracy(tmp_path / "moved/five-seed0", "ghn")) == {"client-3"}


def test_who_starts_from_a_run_that_failed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run = Session.run

    def fail(session: Session) -> None:
        if session.config.clients == 3:
            raise CohortError("nobody came")
        run(session)

    monkeypatch.setattr(Session, "run", fail)
    assert main(["small", "--column", "late", "--seeds", "1", "--rounds", "2", "--out", str(out)]) == 4
    text = (out / "reproduction.md").read_text()
    assert re.search(r"\| Five +\| not finished \|", text)
    assert re.search(r"\| Six +\| +[\d.]+ \|", text)
    assert "nobody came" in capsys.readouterr().out


def test_a_stand_in_is_named_and_not_compared(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["small", "--column", "stood", "--seeds", "1", "--out", str(out), "--methods", "One"]) == 0
    text = (out / "reproduction.md").read_text()
    assert "- STAND-IN for the paper's data: digits for galaxies\n" in text
    assert [line.split("|")[5].strip() for line in text.splitlines() if line.startswith("| One")] == [""]
    assert "Three" not in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["small", "--column", "far", "--root", "nowhere"], "cifar100 not found; looked at nowhere/cifar-100-binary/"),
        (["small", "--column", "lost"], "--column lost: it needs a telescope"),
        (["small"], "--column: expected one of whole, parted, stood, far, seen, lost, late; found none"),
        (["small", "--column", "whole", "--methods", "One,No"], "--methods: expected some of One, .*; found 'No'"),
        (["small", "--column", "stood", "--methods", "Three"], "--column stood: none of its methods can be run"),
        (["small", "--column", "whole", "--rounds", "0"], "Invalid value for '--rounds': 0 is not in the range x>=1"),
        (
            ["small", "--column", "whole", "--set", "options.rows=5"],
            "--set options.rows: expected a key of the run, or an option of One, Two$",
        ),
        (
            ["small", "--column", "seen", "--methods", "One", "--set", "rad=x.npz"],
            "--set rad: expected a key of the run, or an option of One$",
        ),
        (["big"], "expected one of small; found 'big'"),
        ([], "expected a table such as pfedhn-table1, or --list"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags]) == 2
    error = capsys.readouterr().err
    assert re.search(f"python -m figures.reproduce: {message}", error), error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_the_list_says_what_can_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--root", str(tmp_path / "nowhere")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[:8] == [
        "small: a small table (table 9 of A, B)",
        "  whole: everybody; 2 of 4 methods",
        "  parted: by halves; 1 of 1 methods",
        "  stood: another; 1 of 2 methods; STAND-IN: digits for galaxies",
        "  far: far away; 1 of 1 methods; no cifar100, see below",
        "  seen: who sees alike; 2 of 2 methods; no cifar100 for 1 of them, see below",
        "  lost: lost; cannot be run: it needs a telescope",
        "  late: who comes late; 2 of 2 methods",
    ]
    assert told[9].startswith("no cifar100: cifar100 not found; looked at ")
    assert len(told) == 10


def test_the_list_looks_for_the_inputs_on_which_networks_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "papers/small.yaml"
    path.write_text(
        TABLE.replace("  far: {title: far away, run: {data: {name: cifar100}}}\n", "").replace("far: 5, ", "")
    )
    assert main(["--list", "--root", str(tmp_path / "nowhere")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[4] == "  seen: who sees alike; 2 of 2 methods; no cifar100 for 1 of them, see below"
    assert [line.startswith("no cifar100: cifar100 not found; looked at ") for line in told[-2:]] == [False, True]

    assert main(["--list", "--set", "options.rad=mnist", "--root", str(tmp_path / "nowhere")]) == 0
    assert "  seen: who sees alike; 2 of 2 methods; no mnist for 1 of them, see below" in capsys.readouterr().out
    assert main(["--list", "--set", "options.rad=x.npz", "--root", str(tmp_path / "nowhere")]) == 0
    assert "  seen: who sees alike; 2 of 2 methods\n" in capsys.readouterr().out


def test_an_option_is_for_the_methods_that_have_it(tmp_path: Path) -> None:
    np.savez(tmp_path / "public.npz", x=np.random.default_rng(0).random((9, 1, 8, 8), dtype=np.float32))
    out = tmp_path / "out"
    rows = ["--set", "options.rad=public.npz", "--set", "rows=5", "--set", "local.steps=2"]
    flags = ["--seeds", "1", "--rounds", "1", "--out", str(out), *rows]
    assert main(["small", "--column", "seen", *flags]) == 0
    options = {path.name: load_run_config(path / "config.yaml", {}).options for path in out.glob("*-seed0")}
    assert options == {"one-seed0": {}, "seven-seed0": {"rad": "public.npz", "rows": 5}}
    text = (out / "reproduction.md").read_text()
    assert "- set here: options.rad = public.npz (Seven)\n- set here: rows = 5 (Seven)\n" in text
    assert "- set here: local.steps = 2\n" in text


def test_where_nothing_can_be_run_the_reasons_stand_above(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--column", "seen", "--methods", "Seven", "--root", str(tmp_path / "nowhere")]
    assert main(["small", *flags]) == 2
    told = capsys.readouterr()
    assert told.err.endswith("--column seen: none of its methods can be run here; the reasons are above\n")
    assert "- Seven: not available: cifar100 not found; looked at " in told.out
