"""A run in Flower's run config, and back."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import flatten_dict, fuse_dicts, parse_config_args

from hyperbloom.common.config import DataConfig, RunConfig, Section, load_run_config
from hyperbloom.common.errors import ConfigError
from hyperbloom.server.cli import main
from hyperbloom.server.flower_project import RUN_DIR, make_project, run_of


def run_config(folder: Path) -> dict[str, Any]:
    """Return a project's run config, flat as Flower passes it on."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    return flatten_dict(project["tool"]["flwr"]["app"]["config"])


def test_its_run_config_has_every_key_of_the_run_and_gives_it_back(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "{strategy: pfedhn, rounds: 30, clients: 4, sizes: [S, M], input_shape: [1, 8, 8], max_staleness: 7, "
        "baselines: [local, fedavg], options: {embedding_dim: 5}, data: {root: /data, max_train: 60}, "
        "local: {learning_rate: 1e-3}, privacy: {where: client}, compression: top-k:0.1, join_timeout_s: 5}"
    )
    flags = ["--config", str(tmp_path / "run.yaml"), "--set", "local.steps=7"]
    assert main(["app", "new", str(tmp_path / "Ward-1"), *flags]) == 0
    values = run_config(tmp_path / "Ward-1")
    assert run_of(values) == load_run_config(tmp_path / "run.yaml", {"local.steps": 7})
    sections = {name: value for name, value in RunConfig() if isinstance(value, Section)}
    keys = {f"{name}.{key}" for name, section in sections.items() for key, _ in section}
    assert set(values) == {*keys, *(RunConfig.model_fields.keys() - sections.keys()), RUN_DIR}


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_flower_builds_it_and_overrides_its_keys(tmp_path: Path) -> None:
    assert main(["app", "new", str(tmp_path / "ward")]) == 0
    assert run_of(run_config(tmp_path / "ward")) == load_run_config(None, {})
    assert len((tmp_path / "ward/ward_app.py").read_text().splitlines()) == 2
    assert build_fab_from_disk(tmp_path / "ward")
    words = "strategy='fedavg' rounds=5 local.steps=2 local.clip=3 data.max_train=9 baselines='[local]' run-dir='/r/1'"
    values = fuse_dicts(run_config(tmp_path / "ward"), parse_config_args([words]))
    wanted = {"strategy": "fedavg", "rounds": 5, "local.steps": 2, "local.clip": 3.0, "baselines": ["local"]}
    assert run_of(values) == load_run_config(None, {**wanted, "data.max_train": 9})
    assert values[RUN_DIR] == "/r/1"


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
@pytest.mark.parametrize("text", ["# rooms", "/srv/data #2", "null", "2", "%", "/m/a: b", "[x]", "\U0001f600"])
def test_text_comes_back_as_it_is(text: str, tmp_path: Path) -> None:
    config = RunConfig().model_copy(
        update={"data": DataConfig(label=text, root=text), "backbone": text, "select": text}
    )
    make_project(tmp_path / "ward", config)
    again = run_of(run_config(tmp_path / "ward"))
    assert (again.data.label, again.data.root, again.backbone, again.select) == (text,) * 4


def test_what_follows_other_keys_follows_their_overrides(tmp_path: Path) -> None:
    make_project(tmp_path / "a", load_run_config(None, {}))
    make_project(tmp_path / "b", load_run_config(None, {"asynchronous": True}))
    assert run_of({**run_config(tmp_path / "a"), "asynchronous": True}).local.schedule == "constant"
    assert run_of({**run_config(tmp_path / "b"), "asynchronous": False}).local.schedule == "cosine"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"round": 3}, r"^round: unknown key in options of pfedhn"),
        ({"rounds": "many"}, r"^rounds: expected a valid integer, found 'many' in the run config$"),
        ({"sizes": "S"}, r"^sizes: expected a valid tuple, found 'S' in the run config$"),
    ],
)
def test_a_wrong_value_is_one_line(values: dict[str, Any], message: str) -> None:
    from hyperbloom.strategies import make_algorithm

    with pytest.raises(ConfigError, match=message):
        make_algorithm(run_of(values))


def test_wrong_options_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["app", "new", str(tmp_path / "ward"), "--set", "options.embeding_dim=5"]) == 2
    assert "embeding_dim: unknown key in options of pfedhn" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "1st", "a_b", "a" * 41])
def test_a_name_that_flower_refuses_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["app", "new", str(tmp_path / name if name else tmp_path / "there" / "..")]) == 2
    assert "DIR: expected a n" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ward").mkdir()
    assert main(["app", "new", str(tmp_path / "ward")]) == 2
    assert "DIR: expected a new folder, found" in capsys.readouterr().err
