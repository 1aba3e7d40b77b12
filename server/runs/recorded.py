"""What a run folder says of its run beside the lines that grow: configuration, clients, and what validation selected.

A folder may come from elsewhere, so no code that it names is run unasked.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hyperbloom.common.config import RunConfig, load_run_config
from hyperbloom.common.errors import ConfigError
from hyperbloom.server.loop.listener import Selection


@dataclass(frozen=True)
class Member:
    """A client of the roster; `shares` is empty if it did not disclose its classes, `own` if it has its own network."""

    name: str
    row: int
    examples: int
    size: str
    shares: tuple[float, ...]
    own: bool = False


@dataclass(frozen=True)
class Members:
    """The clients by row, and what they learn. Clients standardise targets by `moments`."""

    clients: Sequence[Member]
    task: str
    outputs: int
    moments: tuple[float, ...]


@contextmanager
def sound(path: Path) -> Iterator[None]:
    """Raise a ConfigError for what reading a damaged file raises."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"{path} is damaged ({error!r})") from None


def read_json(path: Path, otherwise: Any) -> Any:
    """Return the content of a file, or `otherwise` if it does not exist; ConfigError if it is damaged."""
    with sound(path):
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else otherwise


def has_ended(folder: Path) -> bool:
    """Return whether all of a run is over: its strategy, its baselines and what clients compare at the end."""
    return "ended" in read_json(folder / "environment.json", {})


def read_summary(folder: Path) -> dict[str, Selection]:
    """Return what validation selected of each strategy that has been evaluated; ConfigError if the file is damaged."""
    path = folder / "summary.json"
    stored = read_json(path, {})
    with sound(path):
        return TypeAdapter(dict[str, Selection]).validate_python(stored)


def read_members(folder: Path) -> Members:
    """Return the clients of a run, nobody before its first evaluation; ConfigError if the file is damaged."""
    path = folder / "roster.json"
    roster = read_json(path, {"clients": []})
    with sound(path):
        entries = sorted(roster["clients"], key=lambda entry: int(entry["row"]))
        told = next((entry["about"] for entry in entries), {"num_classes": 0})
        learned = str(told.get("task", "classification")), int(told["num_classes"]), tuple(roster.get("moments", ()))
        clients = []
        for entry, about in ((entry, entry["about"]) for entry in entries):
            shares = tuple(about.get("class_shares") or ())
            own = about.get("types") is not None or about.get("graph") is not None
            known = entry["client_id"], entry["row"], about["train_examples"], about["size"]
            clients.append(Member(*known, shares, own))
        return Members(clients, *learned)


def read_config(folder: Path, own_code: bool = True) -> RunConfig:
    """Return a run's configuration; without `own_code` it may name no `package.module:name`, which a run imports.

    Raises:
        ConfigError: the folder holds no run, or names code that is not accepted.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        runs = "; name one of the runs in it" if any(folder.glob("*/config.yaml")) else ""
        raise ConfigError(f"expected the folder of a run, found no {path}{runs}")
    config = load_run_config(path, {})
    plain = _PLAIN | ({"name"} if config.data.name.startswith("hf:") else set())  # a strategy so named is code
    run = config.model_dump(mode="json", exclude={"adapt": True, "compression": True, "init_from": True, "data": plain})
    named = [] if own_code else [word for _, text in flat(run) for word in text.split() if ":" in word]
    if named:
        raise ConfigError(f"{path}: names code of its own, {named[0]!r}; if you trust this folder, add --own-code")
    return config


_PLAIN = {"root", "label", "owner", "group", "schema_file"}
"""Keys of the data that never name code: paths and columns."""


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each value of nested mappings as text, with its dotted key."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", " ".join(map(str, value)) if isinstance(value, list) else str(value)
