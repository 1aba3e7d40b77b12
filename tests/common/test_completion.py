"""Shell completion, asked as a shell asks: in a real bash."""

import shutil
import subprocess
from pathlib import Path

import pytest

from hyperbloom.client.cli import main as client_main
from hyperbloom.server.cli import main as server_main
from hyperbloom.strategies import STRATEGIES

MAIN = {"flower-server": server_main, "flower-client": client_main}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("scripts")
    with pytest.MonkeyPatch.context() as patch:
        made: dict[str, Path] = {}
        for program, main in MAIN.items():
            lines: list[str] = []
            patch.setattr("builtins.print", lambda text, lines=lines, **_: lines.append(text))
            assert main(["completion", "bash"]) == 0
            made[program] = folder / program
            made[program].write_text("\n".join(lines))
    return made


def ask(script: Path, line: str, folder: Path) -> set[str]:
    """Return what bash proposes for the last word of a line."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    code = (
        f'eval "$(cat {script})"\nread -ra COMP_WORDS <<< "$1"\n[[ "$1" == *" " ]] && COMP_WORDS+=("")\n'
        "COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))\n"
        "function=$(complete -p \"${COMP_WORDS[0]}\" | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n"
        '"$function" 2>/dev/null\nprintf "%s\\n" "${COMPREPLY[@]}"'
    )
    asked = [bash, "--norc", "-c", code, "bash", line]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True, cwd=folder)
    return {word.strip() for word in done.stdout.split("\n")} - {""}


@pytest.mark.parametrize(
    ("line", "proposed"),
    [
        ("flower-server --strategy pfedhn", {"pfedhn", "pfedhn-pc", "pfedhn-heads"}),
        ("flower-server --model lst", {"lstm-1", "lstm-2"}),
        ("flower-server --engine ", {"grpc", "inline", "ray"}),
        ("flower-server --explain fedav", {"fedavg", "fedavg-ft"}),
        ("flower-server --join", {"--join-timeout"}),
        ("flower-server doc", {"doctor"}),
        ("flower-server certs init --d", {"--dir", "--days"}),
        ("flower-server certs re", {"renew"}),
        ("flower-server --config r", {"run.yaml"}),
        ("flower-server completion ", {"bash", "zsh", "fish"}),
        ("flower-client --key w", {"ward.pem"}),
        ("flower-client --disclose ", {"types", "all-types", "graph"}),
        ("flower-client keygen --o", {"--out"}),
    ],
)
def test_bash_proposes(scripts: dict[str, Path], tmp_path: Path, line: str, proposed: set[str]) -> None:
    for name in ("run.yaml", "ward.pem"):
        (tmp_path / name).touch()
    assert ask(scripts[line.split()[0]], line, tmp_path) == proposed


def test_all_strategies_are_proposed(scripts: dict[str, Path], tmp_path: Path) -> None:
    assert ask(scripts["flower-server"], "flower-server --strategy ", tmp_path) == set(STRATEGIES)


@pytest.mark.parametrize(("shell", "mark"), [("zsh", "#compdef flower-server"), ("fish", "complete -c flower-server")])
def test_other_shells_have_theirs(capsys: pytest.CaptureFixture[str], shell: str, mark: str) -> None:
    assert server_main(["completion", shell]) == 0
    shown = capsys.readouterr().out
    assert mark in shown
    assert "pfedhn-pc" in shown
    found = shutil.which(shell)
    if found:
        subprocess.run([found, "-n"], input=shown, text=True, timeout=30, check=True)
