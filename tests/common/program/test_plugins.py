"""Plug-ins by entry point, as installed packages bring them: a folder with a dist-info on the path."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hyperbloom.common.data import DataSpec, load_client_data
from hyperbloom.common.errors import ConfigError, DataError, ModelError
from hyperbloom.common.models import ModelSpec, build, build_own, full_layout
from hyperbloom.common.program.plugins import plugin_lines, plugins
from hyperbloom.server.cli import main
from hyperbloom.strategies import STRATEGIES, find_strategy

CODE = """
import numpy as np
from torch import nn
from hyperbloom.strategies.fedavg import FedAvg
from hyperbloom.strategies.algorithm import Algorithm

class Mine(FedAvg):
    '''A strategy of ours.'''

class Half(Algorithm):
    def weights(self, clients):
        return None

def net(input_shape, num_classes):
    net = nn.Sequential()
    net.add_module("flat", nn.Flatten())
    net.add_module("head", nn.Linear(int(np.prod(input_shape)), num_classes))
    return net

def headless(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), num_classes))

def stripes():
    rng = np.random.default_rng(0)
    parts = []
    for size in (40, 20, 20):
        labels = np.arange(size) % 2
        inputs = rng.normal(size=(size, 6)).astype(np.float32) + 3 * labels[:, None]
        parts.append((inputs, labels))
    return tuple(parts)
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a package `NAME 1.0` with the module `ours` and these entry points."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "ours.py").write_text(CODE)
    monkeypatch.syspath_prepend(site)

    def write(package: str = "ours-plugins", **groups: dict[str, str]) -> None:
        info = site / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = []
        for kind, entries in groups.items():
            lines += [f"[hyperbloom.{kind}]", *(f"{name} = {target}" for name, target in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        plugins.cache_clear()

    yield write
    plugins.cache_clear()
    sys.modules.pop("ours", None)


def test_without_packages_there_are_none() -> None:
    plugins.cache_clear()
    assert [plugin_lines(kind, ()) for kind in ("strategies", "models", "datasets")] == [{}, {}, {}]


def test_a_run_names_a_strategy_a_model_and_data_of_a_package(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(strategies={"mine": "ours:Mine"}, models={"net": "ours:net"}, datasets={"stripes": "ours:stripes"})
    flags = "--strategy mine --model net --data stripes --split iid --engine inline --clients 2 --cohort 2 --rounds 2"
    assert main([*flags.split(), "--eval-every", "2", "--run-dir", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "mine: round 2/2" in shown
    state = full_layout(ModelSpec("net", "M", (6,), 2))
    assert [name for name, _ in state.shapes] == ["head.weight", "head.bias"]
    assert load_client_data(DataSpec(data="stripes")).input_shape == (6,)
    assert isinstance(build_own(ModelSpec("net", "M", (6,), 2)), torch.nn.Sequential)


def test_the_list_says_where_each_comes_from_and_imports_none(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(strategies={"mine": "ours:Mine"}, models={"net": "ours:net"}, datasets={"stripes": "nowhere:stripes"})
    assert main(["--list"]) == 0
    lines = {line.split()[0]: line for line in map(str.rstrip, capsys.readouterr().out.splitlines()) if line}
    assert lines["mine"].endswith("plug-in of ours-plugins 1.0: ours:Mine")
    assert lines["net"].endswith("plug-in of ours-plugins 1.0: ours:net")
    assert lines["stripes"].endswith("plug-in of ours-plugins 1.0: nowhere:stripes")
    assert "ours" not in sys.modules


def test_a_name_with_two_meanings_is_refused(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(strategies={"fedavg": "ours:Mine", "mine": "ours:Mine"})
    install("others", strategies={"mine": "others:Strategy"}, models={"mlp": "ours:net"}, datasets={"digits": "a:b"})
    two = "ours:Mine of ours-plugins 1.0"
    with pytest.raises(ConfigError, match=f"mine: expected one meaning, found others:Strategy of others 1.0 and {two}"):
        find_strategy("mine")
    with pytest.raises(ConfigError, match=f"fedavg: expected one meaning, found a built-in one and {two}; uninstall"):
        find_strategy("fedavg")
    with pytest.raises(ModelError, match="mlp: expected one meaning"):
        build(ModelSpec("mlp", "M", (4,), 2))
    with pytest.raises(DataError, match="digits: expected one meaning"):
        load_client_data(DataSpec(data="digits"))
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("cannot be used: ") == 4


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere:x", "is broken: nowhere:x: expected a subclass of hyperbloom"),
        ("ours:Nothing", "is broken: ours:Nothing: expected a subclass of hyperbloom"),
        ("ours:np", "is broken: ours:np: expected a subclass of hyperbloom"),
    ],
)
def test_a_broken_one_is_one_line_that_names_its_package(
    install: Install, capsys: pytest.CaptureFixture[str], target: str, message: str
) -> None:
    install(strategies={"mine": target})
    assert main(["--strategy", "mine", "--engine", "inline"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"flower-server: plug-in 'mine' of ours-plugins 1.0 {message}")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "ours:net",
            "strategy: expected ours:net to be a subclass of hyperbloom.*Algorithm, found function",
        ),
        ("ours:Half", "strategy: expected ours:Half to define learn as well"),
        ("nowhere:X", "nowhere:X: expected a subclass of .*, found ModuleNotFoundError: No module named 'nowhere'"),
        ("mime", f"strategy: expected one of .*{list(STRATEGIES)[-1]}, mine; or package.module:Class; found 'mime'"),
    ],
)
def test_what_is_no_strategy_is_said(install: Install, name: str, message: str) -> None:
    install(strategies={"mine": "ours:Mine"})
    with pytest.raises(ConfigError, match=message):
        find_strategy(name)


def test_models_of_a_package_have_one_size_and_a_head(install: Install) -> None:
    install(models={"net": "ours:net", "headless": "ours:headless", "gone": "ours:gone"})
    with pytest.raises(ModelError, match="size: expected one of M, found 'L'"):
        build(ModelSpec("net", "L", (6,), 2))
    with pytest.raises(ModelError, match="plug-in 'headless': expected its last layer to be called head, found 0, 1"):
        build(ModelSpec("headless", "M", (6,), 2))
    with pytest.raises(ModelError, match=r"plug-in 'gone' of ours-plugins 1.0 is broken: ours:gone"):
        build(ModelSpec("gone", "M", (6,), 2))
    # Whoever writes an order must not choose what is imported here.
    with pytest.raises(ModelError, match=r"model: expected one of .*found 'ours:net'"):
        build(ModelSpec("ours:net", "M", (6,), 2))
