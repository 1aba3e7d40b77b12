"""The release as `python -m build` makes it: what it holds, and that it runs where the repository is not."""

import os
import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.deploy.conftest import TOP, run
from tests.processes.conftest import cleared
from tests.test_architecture import PACKAGES, SHIPPED, relative

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist, and the wheel that is built from it."""
    copy, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("dist")
    for name in ("hyperbloom", "examples", *PACKAGES):
        shutil.copytree(TOP / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "constraints-cpu.txt"):
        shutil.copy(TOP / name, copy / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy), timeout=200)
    return out


def test_twine_has_nothing_to_say(dist: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir()))


def test_the_wheel_from_the_sdist_is_whole(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    expected = {"hyperbloom/__init__.py", *(f"hyperbloom/{relative(path)}" for path in SHIPPED)}
    assert {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("hyperbloom/")} == expected


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_the_demo_runs_from_an_empty_environment(
    dist: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its libraries are this environment's, by a path that leads to no checkout."""
    (package,), (sdist,) = dist.glob(kind), dist.glob("*.tar.gz")
    venv.create(tmp_path / "venv")
    paths = {"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")}
    place, python = Path(sysconfig.get_path("purelib", vars=paths)), str(tmp_path / "venv/bin/python")
    (place / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    install = ["install", "--no-index", "--no-deps", "--no-build-isolation", str(package)]
    run(sys.executable, "-m", "pip", "--python", python, *install, timeout=200)
    assert Path(run(python, "-c", "import hyperbloom; print(hyperbloom.__file__)").strip()).is_relative_to(place)
    with tarfile.open(sdist) as archive:
        (member,) = [each for each in archive.getmembers() if each.name.endswith("examples/demo.yaml")]
        archive.extract(member, tmp_path, filter="data")
    monkeypatch.setattr(sys, "executable", python)
    short = ["--rounds", "2", "--eval-every", "2", "--set", "baselines=[]"]
    demo = ["--config", member.name, "--insecure", "--port", "0", "--local-clients", "6", *short]
    with cleared(tmp_path) as site:
        server = site.start("hyperbloom.server", "server", *demo, "--run-dir", "run")
        assert server.wait() == 0, server.output
    assert "mean over clients" in server.output
    assert str(place) in run(python, "-c", "import hyperbloom.client.cli as cli; print(cli.__file__)")


def test_continuous_integration_calls_the_one_script() -> None:
    (job,) = yaml.safe_load((TOP / ".github/workflows/check.yml").read_text())["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    assert os.access(TOP / ".ci/run", os.X_OK)
