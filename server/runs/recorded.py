"""The configuration in a run folder. A folder may come from elsewhere, so no code that it names is run unasked."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hyperbloom.common.config import RunConfig, load_run_config
from hyperbloom.common.errors import ConfigError


def read_config(folder: Path, own_code: bool = True) -> RunConfig:
    """Return a run's configuration; without `own_code` it may name no `package.module:name`, which a run imports.

    Raises:
        ConfigError: the folder holds no run, or names code that is not accepted.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"expected the folder of a run, found no {path}")
    config = load_run_config(path, {})
    words = _words(config.model_dump(exclude={"adapt", "compression"}))
    named = [] if own_code else [name for name in words if ":" in name and not name.startswith("hf:")]
    if named:
        raise ConfigError(f"{path}: names code of its own, {named[0]!r}; if you trust this folder, add --own-code")
    return config


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each value of nested mappings as text, with its dotted key."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _words(part)
