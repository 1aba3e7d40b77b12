"""The configuration in a run folder, which may come from elsewhere."""

import sys
from pathlib import Path

import pytest

from hyperbloom.common.config import RunConfig, dump_run_config
from hyperbloom.common.errors import ConfigError
from hyperbloom.server.cli import main
from hyperbloom.server.runs.recorded import read_config

NAMED = [
    {"strategy": "evil:Strategy"},
    {"baselines": ("local", "evil:Strategy")},
    {"models": ("mlp", "evil:net")},
    {"model": "evil:net"},
    {"strategy": "fedhenn", "options": {"rad": "evil:data"}},
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
    with pytest.raises(ConfigError, match=r"names code of its own, 'evil:\w+'; if you trust this folder"):
        read_config(run, own_code=False)
    assert read_config(run, own_code=True) == config


def test_a_codec_is_no_code(tmp_path: Path) -> None:
    run = folder_of(tmp_path / "run", RunConfig(compression="top-k:0.1"))
    assert read_config(run, own_code=False).compression == "top-k:0.1"


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
