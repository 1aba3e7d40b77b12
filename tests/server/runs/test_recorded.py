"""The configuration in a run folder, which may come from elsewhere."""

import sys
from pathlib import Path

import pytest

from hyperbloom.common.config import DataConfig, RunConfig, dump_run_config
from hyperbloom.common.errors import ConfigError
from hyperbloom.server.cli import main
from hyperbloom.server.runs.recorded import Members, read_config, read_members, read_summary

from ..conftest import ABOUT
from ..recorded import Recording

NAMED = [
    {"strategy": "evil:Strategy"},
    {"baselines": ("local", "evil:Strategy")},
    {"models": ("mlp", "evil:net")},
    {"model": "evil:net"},
    {"strategy": "fedhenn", "options": {"rad": "evil:data"}},
    {"data": DataConfig(name="evil:data")},
    {"backbone": "evil:net"},
    {"strategy": "hf:Strategy"},  # of a data set alone does this say a hub
    {"strategy": "pfedhn", "model": "hf:net", "data": DataConfig(name="hf:ylecun/mnist")},
]


def folder_of(path: Path, config: RunConfig) -> Path:
    """Return a folder with this configuration."""
    path.mkdir()
    (path / "config.yaml").write_text(dump_run_config(config))
    (path / "environment.json").write_text('{"machines": {"engine": "inline"}}')
    return path


@pytest.mark.parametrize("values", NAMED)
def test_code_that_a_folder_names_is_refused_until_it_is_accepted(tmp_path: Path, values: dict[str, object]) -> None:
    config = RunConfig(**values)  # type: ignore[arg-type]
    run = folder_of(tmp_path / "run", config)
    with pytest.raises(ConfigError, match=r"names code of its own, '(evil|hf):\w+'; if you trust this folder"):
        read_config(run, own_code=False)
    assert read_config(run, own_code=True) == config


def test_a_codec_is_no_code(tmp_path: Path) -> None:
    run = folder_of(tmp_path / "run", RunConfig(compression="top-k:0.1"))
    assert read_config(run, own_code=False).compression == "top-k:0.1"


def test_a_data_set_of_a_hub_a_column_or_a_path_with_a_colon_is_no_code(tmp_path: Path) -> None:
    data = DataConfig(
        name="hf:ylecun/mnist?label=digit",
        root="C:/data",
        label="lab:dx",
        owner="of:whom",
        group="of:one",
        schema_file="C:/schema.json",
    )
    run = folder_of(tmp_path / "run", RunConfig(data=data, init_from="runs/12:00-pfedhn"))
    assert read_config(run, own_code=False).data == data


@pytest.mark.parametrize("command", [["--resume"], ["export", "--all"], ["serve"]])
def test_no_command_imports_from_a_folder_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """The module stands where the run would be opened, and says that it was imported."""
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('imported').touch()\nclass Strategy: ...\n")
    run = folder_of(tmp_path / "run", RunConfig(strategy="evil:Strategy"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    assert main([*command, str(run)]) == 2
    assert "names code of its own" in capsys.readouterr().err
    assert not Path("imported").exists() and "evil" not in sys.modules
    assert main([*command, str(run), "--own-code"]) == 2
    assert Path("imported").exists() or command == ["--resume"]  # that finds no checkpoint


def test_before_the_first_evaluation_nobody_is_known_and_nothing_is_selected(tmp_path: Path) -> None:
    assert read_summary(tmp_path) == {}
    assert read_members(tmp_path) == Members([], "classification", 0, ())


def test_what_validation_selected_and_the_clients_are_as_they_were_written(tmp_path: Path) -> None:
    recording = Recording(tmp_path, names=("b", "a"), shares=((0.25, 0.75), (1.0, 0.0)))
    recording.whole()
    found = read_summary(tmp_path)
    assert list(found) == ["pfedhn", "local"] and found["pfedhn"].round == 6
    assert found["pfedhn"].test_accuracy == {"b": 60.0, "a": 61.0}
    members = read_members(tmp_path)
    assert [(each.name, each.row, each.shares) for each in members.clients] == [
        ("b", 0, (0.25, 0.75)),
        ("a", 1, (1.0, 0.0)),
    ]
    assert {each.examples for each in members.clients} == {ABOUT.train_examples}
    assert (members.task, members.outputs) == (ABOUT.task, ABOUT.num_classes)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("summary.json", "{"),
        ("summary.json", '{"pfedhn": {"round": "x", "metrics": {}, "test_accuracy": {}}}'),
        ("summary.json", '{"pfedhn": {"round": 1}}'),
        ("roster.json", '{"clients": [{}]}'),
        ("roster.json", "[]"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, file: str, content: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=f"{file} is damaged") as error:
        (read_summary(tmp_path), read_members(tmp_path))
    assert str(error.value).count("is damaged") == 1
