"""A whole run in Flower's simulation engine, with Ray's actors in processes of their own."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.processes.conftest import Site

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install '.[simulation]'"),
]

RUN = ["--strategy", "pfedhn-pc", "--clients", "5", "--cohort", "3", "--rounds", "6", "--eval-every", "3"]
RUN += ["--set", "local.steps=3", "--set", "hidden_dim=8", "--baselines", "local"]


def test_a_run_in_rays_actors_equals_the_inline_engine(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray gives to an actor of one core
    done = {
        engine: site.start("hyperbloom.server", engine, "--engine", engine, *RUN, "--run-dir", str(tmp_path / engine))
        for engine in ("inline", "ray")
    }
    for process in done.values():
        assert process.wait(300) == 0, process.output
    assert "Traceback" not in done["ray"].output and "Warning" not in done["ray"].output, done["ray"].output
    # Which of the actors serves a client changes from order to order: the personal parts went through the disk.
    assert (tmp_path / "ray/summary.json").read_text() == (tmp_path / "inline/summary.json").read_text()
    states = {engine: load_file(tmp_path / engine / "hypernetwork-last.safetensors") for engine in done}
    assert states["ray"].keys() == states["inline"].keys()
    for name, tensor in states["inline"].items():
        assert torch.equal(states["ray"][name], tensor), name
    for engine in done:
        personal = {path.parent.parent.name for path in (tmp_path / engine).glob("clients/*/personal/*-local*")}
        assert personal == {f"client-{index}" for index in range(5)}


def test_sigterm_ends_a_run_as_ctrl_c_does(site: Site, tmp_path: Path) -> None:
    args = ["--engine", "ray", *RUN[:6], "--rounds", "100000", "--set", "local.steps=3"]
    process = site.start("hyperbloom.server", "server", *args, "--run-dir", str(tmp_path / "run"))
    process.wait_for("5 clients are here", timeout_s=300)
    process.popen.terminate()
    assert process.wait() == 130, process.output
    assert "stopped; the run folder holds what was done" in process.output
    assert "SIGTERM" not in process.output
