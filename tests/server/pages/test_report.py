"""The report: a sound page that needs nothing else, with the right numbers in it, whatever clients are called."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.gains import Gain, sentence
from hyperbloom.server.cli import main
from hyperbloom.server.loop.exchange import Evaluated, Outcome
from hyperbloom.server.loop.listener import Selection
from hyperbloom.server.pages.report import BARS, write_report
from hyperbloom.server.pages.report_data import read_run_data
from hyperbloom.server.runs import running
from hyperbloom.server.runs.folder import RunFolder

from ..html import Page, check_self_contained
from ..recorded import ROUNDS, Recording, score, some_config

HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{ 7*7 }}{% raw %}", "a\u202e&lt;b")


def test_a_whole_run(tmp_path: Path) -> None:
    path = write_report(Recording(tmp_path / "run-7").whole())
    assert path == tmp_path / "run-7" / "report.html"
    check_self_contained(path)
    page = Page(path)
    assert page.tables["Test accuracy over clients, percent"] == [
        ["strategy", "mean", "worst", "round"],
        ["pfedhn", "61.0", "60.0", "6"],
        ["local", "61.0", "60.0", "6"],
    ]
    assert page.tables["Test accuracy in percent, at the round that validation selected"] == [
        ["client", "examples", "size", "pfedhn", "local", "left out"],
        ["a", "60", "M", "60.0", "60.0", "0"],
        ["b", "60", "M", "61.0", "61.0", "0"],
        ["c", "60", "M", "62.0", "62.0", "0"],
        ["mean", "", "", "61.0", "61.0", ""],
    ]
    assert set(page.pictures()) == {"curve", "pca", "bytes", "seconds"}
    assert "After 6 rounds of pfedhn, 3 clients are right on 61.0 % of their test examples" in page.text
    assert (
        "That is level with local, the best of the others; 0 of 3 clients are better off than with it, 0 worse."
        in page.text
    )
    assert "Nobody was left out of a round." in page.text
    assert "strategy: pfedhn" in page.text
    assert [row[:2] for row in page.tables[""] if row[0] == "run_id"] == [["run_id", "run-1"]]


def test_the_curve_is_where_the_numbers_are(tmp_path: Path) -> None:
    path = write_report(Recording(tmp_path, config=some_config(baselines=())).whole())
    page = Page(path)
    (main_line,) = page.styled("line main s0")[:1]
    points = [tuple(map(float, pair.split())) for pair in str(main_line["d"])[1:].split("L")]
    assert len(points) == 3  # rounds 2, 4, 6 at 21, 41 and 61 percent of 0 to 100
    (x1, y1), (x2, y2), (x3, y3) = points
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.11)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.11)
    height = (y1 - y3) / 0.4  # of 100 percent
    assert y3 == pytest.approx(34 + 0.39 * height, abs=0.3)
    (wide,) = page.styled("band wide")
    edges = [tuple(map(float, pair.split())) for pair in str(wide["d"])[1:-1].split("L")]
    assert [round(y1 - y, 1) for _, y in (edges[0], edges[-1])] == pytest.approx(
        [height / 100, -height / 100], abs=0.15
    )


def test_what_clients_are_called_is_text(tmp_path: Path) -> None:
    run = Recording(tmp_path, HOSTILE, some_config(baselines=()))
    run.folder.event(f"{HOSTILE[0]} joined</pre><script>")
    run.begin("pfedhn")
    for number in range(1, ROUNDS + 1):
        run.go(number, **{HOSTILE[0]: f"tensor {HOSTILE[1]}: shape"} if number == 5 else {})
    path = write_report(tmp_path)
    check_self_contained(path)
    page = Page(path)
    named = [row[0] for row in page.tables["Test accuracy in percent, at the round that validation selected"][1:-1]]
    assert sorted(named) == sorted(HOSTILE)
    assert page.tables["Clients left out of rounds of pfedhn"][1] == [
        HOSTILE[0],
        "1",
        "5",
        f"tensor {HOSTILE[1]}: shape",
    ]
    assert f"{HOSTILE[0]} joined</pre><script>" in page.text
    assert "49" not in {
        row[0] for row in page.tables["Test accuracy in percent, at the round that validation selected"]
    }


def test_many_clients_are_one_picture_and_the_worst_are_named(tmp_path: Path) -> None:
    names = [f"ward-{index:02d}" for index in range(BARS + 16)]
    path = write_report(Recording(tmp_path, names, state={"embeddings": torch.randn(len(names), 4)}).whole())
    check_self_contained(path)
    page = Page(path)
    assert {"clients", "pca", "tsne"} < set(page.pictures())
    for strategy in ("s0", "s1"):
        each = [dot for dot in page.styled(f"dot {strategy}") if dot["r"] == "2.5"]
        assert len(each) == len(names)
    assert [row[0] for row in page.tables["Those that are served worst"][1:]] == names[:8]


def test_clients_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = ["ward-10", "ward-2", "7", "icu", "ward-1"]
    page = Page(write_report(Recording(tmp_path, names, state={"embeddings": torch.randn(5, 4)}).whole()))
    rows = page.tables["Test accuracy in percent, at the round that validation selected"][1:-1]
    assert [row[0] for row in rows] == ["7", "icu", "ward-1", "ward-2", "ward-10"]
    assert [row[3] for row in rows] == ["62.0", "63.0", "64.0", "61.0", "60.0"]  # each its own


@pytest.mark.parametrize(("shares", "coloured"), [((), "by test accuracy"), ((0.75, 0.25), "by the classes")])
def test_points_are_coloured_by_what_is_known(tmp_path: Path, shares: tuple[float, ...], coloured: str) -> None:
    disclosed = [(*shares, *[0.0] * 8), (0.0, 1.0, *[0.0] * 8), (*shares, *[0.0] * 8)] if shares else ()
    page = Page(write_report(Recording(tmp_path, shares=disclosed).whole()))
    assert f"Coloured {coloured}" in page.text
    if shares:
        slices = [each["stroke"] for each in page.all("circle") if "stroke-dasharray" in each]
        assert len(slices) == 4  # two pies of two classes
        assert len([each for each in page.styled("point") if each.get("fill")]) == 1  # all of one class
        assert "class 0" in page.text and "class 1" in page.text and "class 2 " not in page.text
    else:
        assert [each["class"] for each in page.styled("point")] == ["point q0", "point q4", "point q8"]


def test_what_failed_and_when(tmp_path: Path) -> None:
    run = Recording(tmp_path, config=some_config(baselines=()))
    run.begin("pfedhn")
    run.go(1, b="no reply")
    run.go(2, b="no reply", c="MemoryError")
    run.go(3)
    run.folder.event("b left")
    page = Page(write_report(tmp_path))
    assert page.tables["Clients left out of rounds of pfedhn"][1:] == [
        ["b", "2", "2", "no reply"],
        ["c", "1", "2", "MemoryError"],
    ]
    assert "3 in all, in 2 rounds" in page.text and "UTC not finished pfedhn" in page.text
    (event,) = page.tables["All of them are in events.jsonl"][1:]
    assert event[1:] == ["round 3 of pfedhn", "b left"]
    assert "not finished" in page.text
    assert "After 3 of 6 rounds of pfedhn" in page.text


def test_a_run_without_an_evaluation_yet(tmp_path: Path) -> None:
    run = Recording(tmp_path)
    run.begin("pfedhn")
    run.go(1)
    path = write_report(tmp_path)
    check_self_contained(path)
    assert "After 1 of 6 rounds of pfedhn nothing has been evaluated yet." in Page(path).text


def test_a_strategy_without_embeddings_has_no_map(tmp_path: Path) -> None:
    config = some_config(strategy="fedavg", baselines=())
    page = Page(write_report(Recording(tmp_path, config=config, state={"fc1.weight": torch.ones(2)}).whole()))
    assert "There is no map: fedavg has no embedding of each client on the server" in page.text


def test_a_run_of_one_client_and_one_round_is_told_in_the_singular(tmp_path: Path) -> None:
    run = Recording(tmp_path, names=("a",), config=some_config(baselines=(), rounds=1, clients=1, eval_every=1))
    run.begin("pfedhn")
    run.go(1)
    run.folder.event("a left")
    environment = json.loads((tmp_path / "environment.json").read_text())
    (tmp_path / "environment.json").write_text(json.dumps(environment | {"commit": None}))
    page = Page(write_report(tmp_path))
    assert ["commit", "\u2013"] in page.tables[""]
    assert "After 1 round of pfedhn, 1 client is right on 10.0 % of their test examples" in page.text
    assert "There is no map of a single client." in page.text
    assert any(each["r"] == "5" for each in page.styled("dot s0"))
    assert "Who came, left and was refused: 1 event " in page.text


def test_clients_that_are_worse_off_than_with_the_best_of_the_others_are_counted(tmp_path: Path) -> None:
    run = Recording(tmp_path)
    for name, hits in (("pfedhn", (90, 40, 70)), ("local", (50, 60, 70))):
        run.begin(name)
        scores = {client: score(5, 10, right, 100) for client, right in zip("abc", hits, strict=True)}
        run.folder.round_done(replace(run.report(6), outcome=Outcome({}, Evaluated(scores), {})))
        accuracy = dict(zip("abc", map(float, hits), strict=True))
        run.folder.selected(Selection(6, Evaluated(scores).metrics(), accuracy), run.state, run.roster)
    text = Page(write_report(tmp_path)).text
    assert (
        "6.7 points ahead of local, the best of the others; 1 of 3 clients is better off than with it, 1 worse." in text
    )


def test_novel_clients_are_scored_apart(tmp_path: Path) -> None:
    config = some_config(baselines=(), clients=3, novel=30)
    run = Recording(tmp_path, config=config)
    assert [run.strategy("pfedhn").config.is_novel(client.row) for client in run.roster] == [False, False, True]
    run.whole()
    data = read_run_data(tmp_path)
    assert sorted(data.main.accuracy) == ["a", "b"]
    spreads = [(spread[0], spread[-1]) for spread in data.spreads.values()]
    assert spreads == [(20.0, 21.0), (40.0, 41.0), (60.0, 61.0)]
    page = Page(write_report(tmp_path))
    rows = page.tables["Test accuracy in percent, at the round that validation selected"]
    assert [(row[0], row[3]) for row in rows[2:4]] == [("b", "61.0"), ("c (novel)", "62.0")]
    assert page.text.count("c (novel)") == 2 and len(page.styled("bar s0")) == 3, "it has a bar, too"


@pytest.mark.parametrize("clients", [3, BARS + 1])
def test_answers_say_a_name_once_and_those_of_many_clients_are_folded_away(tmp_path: Path, clients: int) -> None:
    Recording(tmp_path).whole()
    gain = Gain("personal", 0.031, 0.012, 0.05, ("personal", "alone"), (0.9, 0.8))
    names = [f"ward-{number}" for number in range(clients)]
    told = [{"client": each, "says": sentence(each, gain, "accuracy"), "gain": vars(gain)} for each in names]
    (tmp_path / "gains.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    page = Page(write_report(tmp_path))
    rows = page.tables["Test accuracy in percent"][1:]
    assert len(rows) == clients and rows[2][0] == "ward-2" and rows[2][4].startswith("gains 3.1 points (1.2 to 5.0)")
    assert (f"The answer of each client: {clients}" in page.text) == (clients > BARS)


def test_what_a_newcomer_may_expect_is_said(tmp_path: Path) -> None:
    path = write_report(Recording(tmp_path).whole())
    assert "newcomer gets" not in Page(path).text
    summary = json.loads((tmp_path / "summary.json").read_text())
    told = {"trained": 6, "held_out": 2, "share": 0.0, "test": [80, 70, 60, 50, 49.4], "low": 62.5, "high": 88}
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"pfedhn": summary["pfedhn"] | {"newcomers": told}}))
    text = Page(write_report(tmp_path)).text
    assert "A newcomer gets the model for all, and may expect a test accuracy of 80.0 % (62.5 to 88.0)" in text
    assert "49.4 % with the model written from its descriptor" in text


def test_strategies_of_a_comparison_are_put_beside_each_other(tmp_path: Path) -> None:
    (tmp_path / "comparison.yaml").write_text("engine: inline\n")
    for name, seed in (("pfedhn", 0), ("fedavg", 0), ("fedavg", 1)):
        folder = tmp_path / f"{name}-seed{seed}"
        Recording(folder, config=some_config(strategy=name, baselines=(), seed=seed)).whole()
        environment = json.loads((folder / "environment.json").read_text())
        environment["started"] = f"2026-01-0{2 - (name == 'pfedhn') + seed}T00:00:00+00:00"
        (folder / "environment.json").write_text(json.dumps(environment))
        (folder / "cell.json").write_text("{}")
    assert [course.name for course in read_run_data(tmp_path).courses] == ["pfedhn", "fedavg"]
    assert write_report(tmp_path) == tmp_path / "pfedhn-seed0" / "report.html"
    page = Page(tmp_path / "pfedhn-seed0" / "report.html")
    assert "The other strategies are runs of the same comparison with seed 0." in page.text
    alone = read_run_data(tmp_path / "fedavg-seed1")
    assert [course.name for course in alone.courses] == ["fedavg"] and alone.compared == ""
    longer = some_config(strategy="fedavg", baselines=(), rounds=12)  # as a search has it
    Recording(tmp_path / "longer", config=longer).whole()
    (tmp_path / "longer" / "cell.json").write_text("{}")
    assert [course.name for course in read_run_data(tmp_path / "longer").courses] == ["fedavg"]
    assert len(read_run_data(tmp_path / "pfedhn-seed0").courses) == 2


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.yaml", None, "expected the folder of a run, found no"),
        ("summary.json", "{", r"summary\.json is damaged"),
        ("roster.json", '{"clients": [{}]}', r"roster\.json is damaged"),
        ("clients.jsonl", '{"round": 1}\n', "is damaged"),
        ("metrics.jsonl", "", "no round is over yet"),
        ("metrics.jsonl", '{"round": 1}\n', "is damaged"),
        ("gains.jsonl", '{"client": "a", "says": "no", "gain": {"of": 1}}\n', r"gains\.jsonl is damaged"),
        ("hypernetwork.safetensors", "x", "is damaged"),
    ],
)
def test_a_damaged_run_is_told_in_one_line(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    path = Recording(tmp_path).whole() / file
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        write_report(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_run_whose_environment_is_lost_has_a_report(tmp_path: Path) -> None:
    folder = Recording(tmp_path).whole()
    (folder / "environment.json").unlink()
    assert "UTC" not in Page(write_report(folder)).text


def test_those_left_out_of_an_evaluation_count_as_in_the_table(tmp_path: Path) -> None:
    recording = Recording(tmp_path, config=some_config(baselines=()))
    recording.begin("pfedhn")
    report = recording.report(2, b="busy")
    recording.folder.round_done(replace(report, asked=1))  # it was asked for its scores alone
    for number in (3, 4):
        recording.go(number)
    assert "1 in all, in 1 round" in Page(write_report(tmp_path)).text


def test_the_command_writes_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Recording(tmp_path / "run", config=some_config(strategy="fedavg", baselines=())).whole()
    out = tmp_path / "elsewhere" / "r.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"the report is {out}\n"
    assert "After 6 rounds of fedavg" in Page(out).text


# ---------------------------------------------------------------------- at the end of a run

TINY = "--strategy pfedhn --engine inline --clients 3 --rounds 2 --eval-every 1 --max-train 20 --set local.steps=1"


@pytest.fixture
def one_line_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_writes_its_report(one_line_commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY.split(), "--run-dir", "run", "--metrics-port", "0", "--track", "tensorboard"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^metrics: http://127\.0\.0\.1:\d+/metrics$", said, re.M)
    assert "report: run/report.html\n" in said
    check_self_contained(Path("run/report.html"))
    page = Page(Path("run/report.html"))
    assert "After 2 rounds of pfedhn, 3 clients" in page.text
    assert list(Path("run/tensorboard/run").iterdir()), Path("run/track-tensorboard.log").read_text()
    assert "still running" not in page.text


def test_a_report_that_fails_does_not_spoil_the_run(
    one_line_commands: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> Path:
        raise ZeroDivisionError("no way")

    monkeypatch.setattr(running, "write_report", broken)
    assert main([*TINY.split(), "--run-dir", "run"]) == 0
    assert "the report could not be written (no way); flower-server report run tries again" in capsys.readouterr().out
    assert "ZeroDivisionError" in Path("run/server.log").read_text()


def test_a_report_that_would_take_long_is_left_to_its_command(
    one_line_commands: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "LARGEST_FOR_REPORT", 100)
    assert main([*TINY.split(), "--run-dir", "run"]) == 0
    assert "its report would take long; flower-server report run writes it\n" in capsys.readouterr().out
    assert not Path("run/report.html").exists()


def test_how_a_run_stopped_is_among_its_events(one_line_commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for sign, word in ((signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")):

        def stop(self: RunFolder, report: object, sign: int = sign) -> None:
            signal.raise_signal(sign)

        monkeypatch.setattr(RunFolder, "round_done", stop)
        assert main([*TINY.split(), "--run-dir", word]) == 130
        last = Path(word, "events.jsonl").read_text().splitlines()[-1]
        assert json.loads(last)["text"].removesuffix(", or flwr stop") == f"the run stopped: {word}"
