"""The pages: every command of the tutorial runs, every link leads somewhere, and the site builds without a warning."""

import importlib
import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import click
import pytest

import benchmarks
import figures
import siege
from hyperbloom.client.cli import flower_client
from hyperbloom.client.cli import main as client_main
from hyperbloom.server.broker.superlink import free_port
from hyperbloom.server.cli import flower_server
from hyperbloom.server.cli import main as server_main
from tests.parsing import parse
from tests.processes.conftest import Site, cleared

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
WRITTEN = [
    *PAGES,
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "deploy").glob("*.md")),
    ROOT / "docker/README.md",
]
MAINS: dict[str, Callable[[list[str]], int]] = {"flower-server": server_main, "flower-client": client_main}


def sections(page: Path) -> dict[str, list[tuple[str, list[str]]]]:
    """Return a page's fenced shell blocks by section: what stands behind `sh`, and the commands."""
    parts = (part.partition("\n") for part in page.read_text().split("\n## ")[1:])
    found = {title: re.findall(r"^```sh *(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE) for title, _, text in parts}
    return {
        title: [(info, code.replace("\\\n", " ").strip().splitlines()) for info, code in blocks]
        for title, blocks in found.items()
        if blocks
    }


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command of ours in a page, fenced or indented, without placeholders such as `...`."""
    text = re.sub(r"\\\n\s*", " ", page.read_text())
    for line in re.findall(r"^(?: {4,}|)(flower-(?:server|client) .*)$", text, re.MULTILINE):
        words = shlex.split(line.split(" | ")[0], comments=True)
        if "..." not in words:
            yield words


# ---------------------------------------------------------------------- the tutorial


TUTORIAL = sections(ROOT / "docs/tutorial.md")


def _ahead(folder: Path) -> float:
    rows = json.loads((folder / "comparison.json").read_text())
    mean = {row["name"]: row["mean"] for row in rows}
    return mean["pfedhn"] - mean["local"]


CHECKS: dict[str, Callable[[Path, str], bool]] = {
    "Is this machine fit?": lambda folder, shown: "nothing here keeps a run from working" in shown,
    "A first run": lambda folder, shown: (
        "pfedhn: round 10/10" in shown
        and all((folder / "runs/first" / name).is_file() for name in ("config.yaml", "metrics.jsonl"))
    ),
    "Does it pay?": lambda folder, shown: 10 <= _ahead(folder / "runs/compared") <= 20,
    "When is training alone enough?": lambda folder, shown: 0 <= _ahead(folder / "runs/plenty") <= 1,
    "Two hospitals": lambda folder, shown: (folder / "north.npz").is_file(),
}
"""What is so after the commands of a section, as the page says."""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("title", TUTORIAL)
def test_every_command_of_the_tutorial_runs(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each section is a test of its own, so that the time limit holds for one section and not for the sum of all."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "examples"
    monkeypatch.chdir(folder)
    for line in [line for info, lines in TUTORIAL[title] if not info for line in lines]:
        program, *words = shlex.split(line)
        if program == "python":
            subprocess.run([sys.executable, *words], check=True, timeout=60)
        else:
            words += ["--port", str(free_port())] if words[0] == "doctor" else []  # 9092 may be somebody's
            assert MAINS[program](words) == 0, line
    sys.modules.pop("hospital", None)
    assert CHECKS[title](folder, capsys.readouterr().out)
    together = {info: lines for info, lines in TUTORIAL[title] if info}
    if title == "Two hospitals":
        assert list(together) == ['title="the server"', 'title="a client"', 'title="the other client"']
        _together(folder, list(together.values()))
    else:
        assert not together


def _together(folder: Path, terminals: list[list[str]]) -> None:
    """Run the blocks of several terminals side by side, on a port that is free here; the first is the server's."""
    with cleared(folder) as site:
        started = [_start(site, index, line) for index, (line,) in enumerate(terminals)]
        for process in reversed(started):
            assert process.wait() == 0, process.output
        assert "north" in started[0].output
        assert "mean over clients" in started[0].output


def _start(site: Site, index: int, line: str):  # type: ignore[no-untyped-def]
    program, *words = shlex.split(line.replace(":9092", f":{site.port}"))
    if program == "flower-server":
        words += ["--port", str(site.port)]
    else:
        words += ["--state-dir", str(site.folder / f"state-{index}"), "--threads", "1"]
    return site.start(f"hyperbloom.{program.removeprefix('flower-')}", program, *words)


# ---------------------------------------------------------------------- all pages


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_every_command_that_is_written_down_has_flags_that_exist(page: Path) -> None:
    programs = {"flower-server": flower_server, "flower-client": flower_client}
    for program, *words in commands(page):
        with suppress(click.exceptions.Exit):  # --help
            parse(programs[program], words)


@pytest.mark.parametrize("package", [benchmarks, figures, siege], ids=lambda package: package.__name__)
def test_every_program_that_is_written_down_exists_and_all_can_be_imported(package: ModuleType) -> None:
    there, name = {module.name for module in pkgutil.iter_modules(package.__path__)}, package.__name__
    pages = [*WRITTEN, ROOT / "benchmarks/README.md", ROOT / "figures/README.md", ROOT / "Makefile"]
    named = {found for page in pages for found in re.findall(rf"python -m {name}\.(\w+)", page.read_text())}
    assert len(named) > 3
    assert named <= there, named - there
    for module in sorted(there - {"fuzz_guided"}):  # that needs atheris
        importlib.import_module(f"{name}.{module}")


def test_every_name_that_a_page_imports_exists() -> None:
    lines = [
        line for page in WRITTEN for line in re.findall(r"^ +(from hyperbloom.* import .*)$", page.read_text(), re.M)
    ]
    assert lines
    for line in lines:
        exec(line)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_every_file_that_is_linked_exists(page: Path) -> None:
    text = page.read_text()
    linked = [page.parent / name for name in re.findall(r"\]\((?!https?:)([^)#]+)", text)]
    linked += [
        ROOT / name for name in re.findall(r"`((?:docs|examples|benchmarks|figures|siege)/[\w/.-]+\.\w+)`", text)
    ]
    assert [str(path) for path in linked if not path.exists()] == []


def test_every_fault_and_every_lie_is_shown_by_a_test_that_exists() -> None:
    tests = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    text = (ROOT / "docs/failures.md").read_text()
    tables = [text.split(f"## {title}\n")[1].strip().split("\n\n")[0] for title in ("Faults", "Lies")]
    tables.append((ROOT / "SECURITY.md").read_text().split("## Against whom\n")[1].strip().split("\n\n")[0])
    rows = [line.strip("| ").split(" | ") for table in tables for line in table.splitlines()[2:]]
    assert len(rows) > 25
    for fault, *_, shown in rows:
        named = re.findall(r"`(\w+)`", shown)
        assert named and set(named) <= tests, (fault, set(named) - tests)


def test_the_runbook_has_the_exit_codes_that_help_has() -> None:
    text = (ROOT / "deploy/runbook.md").read_text().split("## By code\n\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in text.splitlines()[2:]]
    for column, program in ((1, flower_server), (2, flower_client)):
        told = str(program.epilog).split("exit codes: ")[1]
        codes = re.findall(r"\b(\d+) (?=[a-zA-Z])", told)
        assert codes == [row[0] for row in rows if row[column] and row[0].isdecimal()]


def test_every_page_can_be_found() -> None:
    yaml = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES if f": {page.name}" not in yaml] == []


def test_every_page_is_reached_from_the_first_in_two_steps() -> None:
    def linked(page: Path) -> set[Path]:
        return {page.parent / name for name in re.findall(r"\]\(([\w-]+\.md)", page.read_text())}

    first = ROOT / "docs/index.md"
    near = linked(first)
    assert sorted(path.name for path in set(PAGES) - {first} - near.union(*map(linked, near))) == []


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="pip install 'hyperbloom[docs]'")
    pytest.importorskip("mkdocstrings", reason="pip install 'hyperbloom[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site/reference.html").read_text()
    assert 'id="hyperbloom.strategies.algorithm.Algorithm.weights"' in reference
    assert 'class="highlight"' in (tmp_path / "site/tutorial.html").read_text()
