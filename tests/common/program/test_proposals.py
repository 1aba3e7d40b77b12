"""Shell completion, asked as a shell asks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hyperbloom.client.cli import main as client_main
from hyperbloom.common.data import DATASETS, PARTITIONERS
from hyperbloom.common.models import MODELS
from hyperbloom.common.program import proposals
from hyperbloom.server.cli import main as server_main
from hyperbloom.strategies import STRATEGIES

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
        ("flower-server --strategy pfedhn", {"plain,pfedhn", "plain,pfedhn-pc", "plain,pfedhn-heads"}),
        ("flower-server --model lst", {"plain,lstm-1", "plain,lstm-2"}),
        ("flower-server --engine ", {"plain,grpc", "plain,inline"}),
        ("flower-server --explain fedav", {"plain,fedavg", "plain,fedavg-ft"}),
        ("flower-server --join", {"plain,--join-timeout"}),
        ("flower-server doc", {"plain,doctor"}),
        ("flower-server certs init --d", {"plain,--dir", "plain,--days"}),
        ("flower-server certs re", {"plain,renew"}),
        ("flower-server --config r", {"file,r"}),
        ("flower-server watch r", {"dir,r"}),
        ("flower-client --key w", {"file,w"}),
        ("flower-client --split al", {"plain,alphabet"}),
        ("flower-client --disclose ", {"plain,types", "plain,all-types", "plain,graph"}),
        ("flower-client keygen --o", {"plain,--out"}),
    ],
)
def test_bash_is_told_what_to_propose(proposed, line: str, expected: set[str]) -> None:  # type: ignore[no-untyped-def]
    assert proposed(line) == expected


def test_the_names_that_are_proposed_are_those_that_are_registered() -> None:
    assert list(STRATEGIES) == proposals.STRATEGIES
    assert list(MODELS) == proposals.MODELS
    assert list(DATASETS) == proposals.DATASETS
    assert list(PARTITIONERS) == proposals.SPLITS


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
