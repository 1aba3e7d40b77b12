"""A client where POSIX is not: no `fcntl`, no signals but those of Windows, no folder that can be opened."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.conftest import Site
from tests.test_architecture import SOURCES

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


def test_every_module_can_be_imported() -> None:
    command = [sys.executable, "-m", "tests.elsewhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert (done.stdout, done.returncode) == (f"{len(SOURCES)} modules\n", 0), done.stderr


def test_a_client_plays_a_run_and_keeps_its_state(site: Site, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["--strategy", "pfedhn-pc", "--rounds", "2", "--clients", "1", "--cohort", "1", "--run-dir", str(run)]
    server = site.server(*arguments, "--set", "local.steps=2")
    flags = ["--server", f"127.0.0.1:{site.port}", "--insecure", "--client-id", "ward-7", "--data", "digits"]
    flags += ["--max-train", "60", "--state-dir", str(tmp_path / "state"), "--threads", "1"]
    client = site.start("tests.elsewhere", "client", "hyperbloom.client", *flags)
    assert (server.wait(), client.wait()) == (0, 0), server.output + client.output
    assert json.loads((run / "summary.json").read_text())["pfedhn-pc"]["metrics"]
    assert list((tmp_path / "state/personal").glob("*.safetensors"))


def test_a_client_that_asks_for_posix_is_noticed() -> None:
    for code in ("import fcntl", "import os; os.fchmod", "import signal; signal.SIGHUP", "import os; os.open('.', 0)"):
        command = [sys.executable, "-c", f"from tests.elsewhere import hide_posix; hide_posix(); {code}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1, (code, done.stderr)
