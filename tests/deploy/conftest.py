"""The files in `docker/` and `deploy/`, and tools that look at them: a test is skipped where its tool is absent."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
COMPOSE = TOP / "docker/compose.yaml"


def tool(name: str) -> str:
    """Return a program of this environment or of this machine; skip the test if there is none."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} here")
    return found


def run(*command: str, timeout: float = 60) -> str:
    """Return what a command says on standard output; its complaints are in the error."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(command)}: code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
