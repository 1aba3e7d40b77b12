"""Programs: subcommands, flags by section, errors in one line, exit codes."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from hyperbloom.client.cli import flower_client
from hyperbloom.client.cli import main as client_main
from hyperbloom.common.program import doctor
from hyperbloom.common.program.commands import Program, execute
from hyperbloom.server.cli import flower_server
from hyperbloom.server.cli import main as server_main
from tests.parsing import commands

PROGRAM = """
import tempfile
from pathlib import Path

import click

from hyperbloom.common.program.commands import Flag, Program, command, section
from hyperbloom.common.errors import RefusedError


@command("say", Flag("--word", "what to say", default="nothing"), example="prog say --word hello")
def say(word):
    '''Say a word.

    More of it.
    '''
    if word == "never":
        raise RefusedError("--word: expected another")
    if word == "clear":
        raise RefusedError(f"the server says: {chr(27)}[2J{chr(7)} bye")
    if word == "closed":
        raise PermissionError(13, "Permission denied", "/srv/scans")
    if word == "below":
        raise NotADirectoryError(20, "Not a directory", "/srv/a.csv/x.json")
    if word == "stop":
        raise KeyboardInterrupt
    if word == "full":
        raise OSError(28, "No space left on device", "/srv/report.html")
    if word == "pipe":
        raise BrokenPipeError
    if word == "import":
        raise ImportError("cannot import name 'Grid' from 'flwr.app'")
    print(word)
    return 7 if word == "seven" else None


def run(ctx, flags):
    print(flags)


how = section("How", Flag("--loud", "say it louder", is_flag=True), Flag("--times", "how often", default=2))
end = Path(tempfile.mkdtemp()) / "help.txt"
end.write_text("The end.")
program = Program("prog", [say], run, how, end)
"""


@pytest.fixture(scope="module")
def program() -> Program:
    scope: dict[str, Program] = {}
    exec(PROGRAM, scope)
    return scope["program"]


def test_a_command_runs_by_its_name_and_flags_alone_run_the_program(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(program, ["--loud"]) == 0
    assert execute(program, ["say", "--word", "seven"]) == 7
    assert capsys.readouterr().out == "{'loud': True, 'times': 2}\nseven\n"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("sing", 2, "prog: No such command 'sing'; see prog --help"),
        ("--loud say", 2, "prog: --loud: expected no command behind the flags of a run, found 'say'; see prog --help"),
        ("--times x", 2, "prog: Invalid value for '--times': 'x' is not a valid integer; see prog --help"),
        ("say --xy", 2, "prog say: No such option '--xy'; see prog say --help"),
        ("say --word never", 3, "prog say: --word: expected another"),
        ("say --word closed", 2, "prog say: [Errno 13] Permission denied: '/srv/scans'"),
        ("say --word below", 2, "prog say: [Errno 20] Not a directory: '/srv/a.csv/x.json'"),
        (
            "say --word full",
            6,
            "space left on device: '/srv/report.html'; make room, or write elsewhere, and give the command again",
        ),
        ("say --word stop", 130, "prog say: stopped"),
    ],
)
def test_what_is_wrong_is_one_line_and_a_code(
    program: Program, words: str, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(program, words.split()) == code
    said = capsys.readouterr().err
    assert said.endswith(f"{text}\n") and said.count("\n") == 1


def test_control_characters_of_an_error_do_not_reach_the_terminal(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(program, ["say", "--word", "clear"]) == 3
    assert capsys.readouterr().err == "prog say: the server says:  [2J  bye\n"


def test_help_shows_flags_by_section_commands_and_examples(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(program, ["-h"]) == 0
    shown = capsys.readouterr().out
    for text in ("How:\n  --loud           say it louder", "[default: 2]", "  say  Say a word.\n"):
        assert text in shown
    assert execute(program, ["say", "--help"]) == 0
    shown = capsys.readouterr().out
    for text in ("Usage: prog say", "More of it.", "what to say  [default: nothing]", "Example:\n    prog say --word"):
        assert text in shown


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    code = f"{PROGRAM}\nimport sys; from hyperbloom.common.program.commands import execute\n"
    code += "sys.exit(execute(program, ['say', '--word', 'hello']))"
    near, far = os.pipe()
    os.close(near)
    ended = subprocess.run([sys.executable, "-c", code], stdout=far, stderr=subprocess.PIPE)
    os.close(far)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_full_disk_behind_the_output_is_one_line() -> None:
    code = f"{PROGRAM}\nfrom hyperbloom.common.program.commands import execute\n"
    code += "from hyperbloom.common.program.signals import run_program\n"
    code += "run_program(lambda: execute(program, ['say', '--word', 'hello']))"
    with open("/dev/full", "wb") as full:
        ended = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE)
    assert ended.returncode == 6
    assert ended.stderr.startswith(b"prog say: [Errno 28] No space left on device; make room, ")
    assert ended.stderr.count(b"\n") == 1


def test_where_rich_meets_a_reader_that_has_gone_the_code_is_the_same() -> None:
    code = "import sys; from hyperbloom.server.__main__ import main; sys.exit(main(['--list']))"
    near, far = os.pipe()
    os.close(near)
    ended = subprocess.run([sys.executable, "-c", code], stdout=far, stderr=subprocess.PIPE)
    os.close(far)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_another_pipe_that_breaks_is_not_hidden(program: Program) -> None:
    with pytest.raises(BrokenPipeError):
        execute(program, ["say", "--word", "pipe"])


def test_what_an_untested_version_breaks_is_one_line(
    program: Program, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "requires", lambda name: ["flwr<1"])
    assert execute(program, ["say", "--word", "import"]) == 2
    found = f"flwr {version('flwr')}, tested with <1; pip install 'flwr<1'"
    assert capsys.readouterr().err == f"prog: cannot import name 'Grid' from 'flwr.app': {found}\n"
    monkeypatch.setattr(doctor, "requires", lambda name: ["flwr>1"])
    with pytest.raises(ImportError):  # the versions fit, so it is a defect
        execute(program, ["say", "--word", "import"])


@pytest.mark.parametrize("program", [flower_server, flower_client], ids=lambda program: program.name)
def test_every_command_has_help_for_each_of_its_flags(program: Program) -> None:
    every = list(commands(program))
    assert len(every) > 7
    for command in every:
        summary = command.get_short_help_str(62)
        assert command is program or (summary and not summary.endswith("...")), f"{summary} does not fit into a line"
        seen = [each for each in command.params if not getattr(each, "hidden", False)]
        without = [each.name for each in seen if not getattr(each, "help", None) and not hasattr(each, "key")]
        assert without == [], command.name


def test_no_command_imports_anything_heavy_at_its_top() -> None:
    code = (
        "import sys\nfrom tests.parsing import commands\n"
        "from hyperbloom.client.cli import flower_client\nfrom hyperbloom.server.cli import flower_server\n"
        "for program in (flower_client, flower_server): list(commands(program))\n"
        "heavy = ('torch', 'flwr', 'sklearn', 'grpc', 'PIL', 'onnx', 'pydantic', 'rich', 'typer', 'cryptography')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


# ---------------------------------------------------------------------- completion, asked as a shell asks


MAIN = {"flower-server": server_main, "flower-client": client_main}


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Return a function from a line to what bash is told to propose for its last word."""

    def ask(line: str) -> set[str]:
        program = line.split()[0]
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - (not line.endswith(" "))))
        monkeypatch.setenv(f"_{program.upper().replace('-', '_')}_COMPLETE", "bash_complete")
        assert MAIN[program]() == 0
        return set(capsys.readouterr().out.split())

    return ask


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flower-server --engine ", {"plain,grpc", "plain,inline"}),
        ("flower-server --join", {"plain,--join-timeout"}),
        ("flower-server doc", {"plain,doctor"}),
        ("flower-server certs init --d", {"plain,--dir", "plain,--days"}),
        ("flower-server certs re", {"plain,renew"}),
        ("flower-server --config r", {"file,r"}),
        ("flower-server watch r", {"dir,r"}),
        ("flower-client --key w", {"file,w"}),
        ("flower-client --disclose ", {"plain,types", "plain,graph"}),
        ("flower-client keygen --o", {"plain,--out"}),
    ],
)
def test_bash_is_told_what_to_propose(proposed, line: str, expected: set[str]) -> None:  # type: ignore[no-untyped-def]
    assert proposed(line) == expected


@pytest.mark.parametrize("program", MAIN)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_that_asks_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str, program: str
) -> None:
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    monkeypatch.setenv(variable, f"{shell}_source")
    assert MAIN[program]() == 0
    script = capsys.readouterr().out
    assert f"{variable}={shell}_complete" in script
    if found := shutil.which(shell):
        subprocess.run([found, "-n"], input=script, text=True, timeout=30, check=True)


def test_a_real_bash_asks_and_proposes() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    code = 'eval "$(_FLOWER_SERVER_COMPLETE=bash_source flower-server)"\nCOMP_WORDS=(flower-server doc)\n'
    code += "COMP_CWORD=1\n_flower_server_completion flower-server\n"
    code += 'echo "${COMPREPLY[@]}"'
    here = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # of flower-server
    done = subprocess.run(
        [bash, "--norc", "-c", code], capture_output=True, text=True, timeout=30, check=True, env=here
    )
    assert done.stdout == "doctor\n"
