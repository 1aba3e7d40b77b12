"""Subcommands: found in a package, run by name, listed in `--help`; flags alone mean what they meant."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyperbloom.client.cli import main as client_main
from hyperbloom.common.commands import list_commands, run_command
from hyperbloom.server.cli import main as server_main

COMMAND = '''"""Say a word.

More of it.
"""

from hyperbloom.common.errors import RefusedError

EXAMPLE = "say-it --word hello"


def add_arguments(parser):
    parser.add_argument("--word", default="nothing")


def run(args):
    if args.word == "never":
        raise RefusedError("--word: expected another")
    if args.word == "stop":
        raise KeyboardInterrupt
    if args.word == "pipe":
        raise BrokenPipeError
    print(args.word)
    return 7 if args.word == "seven" else None
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "some_commands"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "say_it.py").write_text(COMMAND)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("some_commands", "some_commands.say_it"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "some_commands"


def test_a_command_runs_by_its_name(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("prog", package, ["say-it", "--word", "hello"]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert run_command("prog", package, ["say-it", "--word", "seven"]) == 7


@pytest.mark.parametrize("arguments", [[], ["--word", "say-it"], ["-v"]])
def test_flags_alone_are_no_command(package: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("prog", package, arguments) is None
    assert capsys.readouterr() == ("", "")


def test_an_unknown_command_is_one_line(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("prog", package, ["sing"]) == 2
    assert capsys.readouterr().err == "prog: expected a flag or one of say-it; found 'sing'\n"


def test_errors_and_ctrl_c_end_in_one_line(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("prog", package, ["say-it", "--word", "never"]) == 3
    assert run_command("prog", package, ["say-it", "--word", "stop"]) == 130
    assert capsys.readouterr().err == "prog say-it: --word: expected another\nprog say-it: stopped\n"


def test_a_reader_that_has_gone_is_no_traceback(package: str, tmp_path: Path) -> None:
    program = "import sys; from hyperbloom.common.commands import run_command; "
    program += f"sys.exit(run_command('prog', {package!r}, ['say-it', '--word', 'hello']))"
    near, far = os.pipe()
    os.close(near)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    ended = subprocess.run([sys.executable, "-c", program], stdout=far, stderr=subprocess.PIPE, env=environment)
    os.close(far)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_another_pipe_that_breaks_is_not_hidden(package: str) -> None:
    with pytest.raises(BrokenPipeError):
        run_command("prog", package, ["say-it", "--word", "pipe"])


def test_help_lists_the_commands_with_an_example(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = list_commands("prog", package)
    assert "  say-it: Say a word.\n    prog say-it --word hello\n" in text
    with pytest.raises(SystemExit) as stop:
        run_command("prog", package, ["say-it", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: prog say-it" in shown
    assert "More of it." in shown
    assert "prog say-it --word hello" in shown


@pytest.mark.parametrize("main", [client_main, server_main], ids=["client", "server"])
def test_both_programs_have_commands(main, monkeypatch, package, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(main.__globals__, "_COMMANDS", package)
    assert main(["say-it", "--word", "hello"]) == 0
    monkeypatch.setattr(sys, "argv", ["prog", "say-it", "--word", "there"])
    assert main() == 0
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("hello\nthere\n")
    assert "say-it: Say a word." in shown


def test_no_command_imports_anything_heavy_at_its_top() -> None:
    code = (
        "import sys\nfrom hyperbloom.common.commands import list_commands\n"
        "for side in ('server', 'client'): list_commands(side, f'hyperbloom.{side}.commands')\n"
        "print([name for name in ('torch', 'flwr', 'sklearn', 'grpc', 'PIL', 'onnx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
