"""`flower-server watch`: on folders that are whole, that grow, that were cut back."""

import io
import shutil
from pathlib import Path

import pytest
from filelock import lock_descriptor
from rich.console import Console

from hyperbloom.common.files import storage
from hyperbloom.server.cli import main
from hyperbloom.server.runs.checkpoint import locked
from hyperbloom.server.watch.watching import is_running, watch

from ..recorded import Recording, some_config

WHOLE = [
    "pfedhn: round 2/6  accuracy mean 21.0 %, worst client 20.0 %  2.0 rounds/s  2.0 s left",
    "pfedhn: round 4/6  accuracy mean 41.0 %, worst client 40.0 %  2.0 rounds/s  1.0 s left",
    "pfedhn: round 6/6  accuracy mean 61.0 %, worst client 60.0 %  2.0 rounds/s  0.0 s left",
]


class Watched:
    """A console, and what it has shown since one last asked."""

    def __init__(self, terminal: bool = False) -> None:
        self.file = io.StringIO()
        self.console = Console(file=self.file, width=200, force_terminal=terminal, color_system=None)

    def lines(self) -> list[str]:
        """Return the lines that are new."""
        text = self.file.getvalue()
        self.file.seek(0)
        self.file.truncate()
        return text.splitlines()


def test_a_run_that_is_over_is_told_from_its_beginning(tmp_path: Path) -> None:
    Recording(tmp_path).whole()
    shown = Watched()
    watch(tmp_path, shown.console, sleep=lambda seconds: pytest.fail("there is nothing to wait for"))
    said = shown.lines()
    assert said[:6] == [*WHOLE, *(line.replace("pfedhn", "local") for line in WHOLE)]
    assert said[6] == "test accuracy in percent, at the round that validation selected"
    assert any("│ mean over clients    │          │      61.0 │      61.0 │" in line for line in said)


def test_a_run_that_goes_on_is_followed_until_it_ends(tmp_path: Path) -> None:
    run, shown, said = Recording(tmp_path, config=some_config(baselines=())), Watched(), []
    run.begin("pfedhn")
    run.folder.event("a joined")
    held = locked(tmp_path)
    held.__enter__()

    def go_on(seconds: float) -> None:
        said.append(shown.lines())
        number = len(said)
        if number <= 6:
            run.go(number, **({"b": "no reply"} if number == 3 else {}))
        else:
            run.folder.end()
            held.__exit__(None, None, None)

    watch(tmp_path, shown.console, go_on)
    assert said[0][0].endswith(" a joined")
    assert said[1:] == [[], WHOLE[:1], ["round 3: b left out: no reply"], WHOLE[1:2], [], WHOLE[2:]]
    assert shown.lines()[0] == "test accuracy in percent, at the round that validation selected"


def test_on_a_terminal_there_is_a_block_per_strategy(tmp_path: Path) -> None:
    Recording(tmp_path).whole()
    shown = Watched(terminal=True)
    watch(tmp_path, shown.console)
    blocks = "\n".join(shown.lines())
    assert blocks.rindex("pfedhn  ━") < blocks.index("local  ━")
    assert blocks.count("\x1b[?25l") == blocks.count("\x1b[?25h") == 2


def test_where_a_run_stopped_is_said(tmp_path: Path) -> None:
    run, shown = Recording(tmp_path), Watched()
    run.begin("pfedhn")
    for number in (1, 2, 3):
        run.go(number)
    watch(tmp_path, shown.console)
    assert shown.lines()[-1] == (
        f"it stopped after round 3 of 6 of pfedhn; flower-server --resume {tmp_path}, or flwr run for a Flower app, "
        "goes on with it"
    )


def test_a_run_that_went_back_to_a_checkpoint_is_told_again(tmp_path: Path) -> None:
    run, shown, said = Recording(tmp_path, config=some_config(baselines=())), Watched(), []
    run.begin("pfedhn")
    for number in (1, 2):
        run.go(number)
    kept = {name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "clients.jsonl")}
    for number in (3, 4):
        run.go(number)

    def go_back(seconds: float) -> None:
        said.append(shown.lines())
        for name, content in kept.items():
            (tmp_path / name).write_bytes(content)
        if len(said) == 2:
            shutil.rmtree(tmp_path / "checkpoints")

    with locked(tmp_path):
        watch(tmp_path, shown.console, go_back)
    assert said == [WHOLE[:2], ["the run went back to a checkpoint", WHOLE[0]]]
    assert shown.lines()[-1].startswith("it stopped after round 2 of 6")


def test_whoever_holds_the_folder_is_at_work(tmp_path: Path) -> None:
    assert not is_running(tmp_path)
    with locked(tmp_path):
        assert is_running(tmp_path)
    assert not is_running(tmp_path)
    with locked(tmp_path):  # who has looked holds nothing
        pass


def test_a_server_that_begins_while_somebody_looks_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked(tmp_path):
        pass
    with (tmp_path / "checkpoints/lock").open() as looking:
        lock_descriptor(looking.fileno())
        monkeypatch.setattr(storage.time, "sleep", lambda seconds: looking.close())
        with locked(tmp_path):
            assert looking.closed


def test_another_folder_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said == f"flower-server watch: expected the folder of a run, found no {tmp_path}/config.yaml\n"
    Recording(tmp_path / "one").whole()
    assert main(["watch", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith(f"found no {tmp_path}/config.yaml; name one of the runs in it\n")


def test_a_damaged_line_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Recording(tmp_path).whole()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"hello": 1}\n')
    assert main(["watch", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"flower-server watch: {tmp_path} is damaged (KeyError('round'))\n"


def test_the_command_watches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Recording(tmp_path).whole()
    assert main(["watch", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == WHOLE


def test_novel_clients_stand_apart_as_in_the_runs_own_table(tmp_path: Path) -> None:
    Recording(tmp_path, config=some_config(novel=30, clients=3)).whole()
    shown = Watched()
    watch(tmp_path, shown.console, sleep=lambda seconds: None)
    table = "\n".join(shown.lines())
    assert "c (novel)" in table and "mean over novel clients" in table
