"""A run in Flower's run config, and the project of a Flower app that `flower-server app new` writes.

A run config has flat keys and plain values. So a key of a section has its dotted name (`local.steps`), and a list or a
mapping is text in YAML: `sizes = '["S", "M"]'`, `options = '{"embedding_dim": 8}'`. Empty text is the default.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from hyperbloom import __version__
from hyperbloom.common.config import RunConfig, Section, make_run_config, parse_assignment
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.files.storage import write_bytes

RUN_DIR = "run-dir"
"""The key of the run config that names the run folder. It is no key of a run."""

_APP = """\
from hyperbloom.server.flower_app import client, server
__all__ = ["client", "server"]
"""


def make_project(folder: Path, config: RunConfig) -> None:
    """Write the project of a Flower app, whose run config is `config`, into a new folder.

    Raises:
        ConfigError: the folder exists, or its name cannot be an app's.
    """
    name = folder.resolve().name
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]{0,39}", name):
        raise ConfigError(f"DIR: expected a name of at most 40 letters, digits and hyphens, found {name!r}")
    if folder.exists():
        raise ConfigError(f"DIR: expected a new folder, found {folder}")
    module = name.lower().replace("-", "_") + "_app"
    usual = make_run_config({}, config.model_dump(include={"rounds", "asynchronous"}), "defaults")
    if config.eval_every == usual.eval_every:
        config = config.model_copy(update={"eval_every": None})  # the default follows the number of rounds
    if config.local.schedule == usual.local.schedule:  # and this one the mode
        config = config.model_copy(update={"local": config.local.model_copy(update={"schedule": None})})
    keys = "\n".join(line for key in _lines(config) for line in key)
    about = {"name": name, "module": module, "version": "1.0.0", "needs": f'"hyperbloom=={__version__}"'}
    text = Path(__file__).with_name("app.toml").read_text(encoding="utf-8").format(**about, keys=keys)
    write_bytes(folder / "pyproject.toml", text.encode())
    write_bytes(folder / f"{module}.py", _APP.encode())


def run_of(values: Mapping[str, Any]) -> RunConfig:
    """Return the run that a run config describes; missing keys have their defaults. Errors as in `make_run_config`."""
    given = {key: value for key, value in values.items() if key != RUN_DIR and value != ""}
    read = {
        key: parse_assignment(f"{key}={value}")[1] if isinstance(value, str) and not _is_text(key) else value
        for key, value in given.items()
    }
    return make_run_config({}, read, "the run config")


def _is_text(key: str) -> bool:
    """Return whether the value of a key of a run is text, or one of some words, and so never YAML."""
    kind: Any = RunConfig
    for name in key.split("."):
        field = getattr(kind, "model_fields", {}).get(name)
        kind = field.annotation if field else None
    parts = get_args(kind) if get_origin(kind) in (Literal, Union, UnionType) else (kind,)
    return any(part is str or isinstance(part, str) for part in parts)


def _lines(section: Section, prefix: str = "") -> Iterator[list[str]]:
    """Yield a comment and an assignment in TOML for each key."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _lines(value, f"{prefix}{name}.")
        else:
            # JSON is YAML, and JSON of text, numbers and truth values is TOML.
            plain = value if isinstance(value, str | int | float) else "" if value is None else json.dumps(value)
            value = json.dumps(plain, ensure_ascii=False).replace("\x7f", r"\u007f")  # which TOML lacks
            yield [f"# {field.description}", f"{prefix}{name} = {value}"]
