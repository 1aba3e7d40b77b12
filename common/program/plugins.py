"""Code of users: functions that the command line names as `package.module:function`, and plug-ins.

A plug-in is an installed package that adds strategies, models, data sets or tasks under short names, by entry points.

    [project.entry-points."hyperbloom.strategies"]
    momentum = "hospital_plugins.momentum:FedAvgM"

The groups are `hyperbloom.strategies`, `hyperbloom.models`, `hyperbloom.datasets`, `hyperbloom.tasks` and
`hyperbloom.trackers`. A plug-in's name is a short form of its `package.module:name`. A plug-in is imported only when
its name is used.
"""

import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

from hyperbloom.common.errors import HyperbloomError, describe

Kind = Literal["strategies", "models", "datasets", "tasks", "trackers"]


@contextmanager
def current_directory() -> Iterator[None]:
    """Make the current directory importable. An installed command does not search the folder in which it starts."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def find_function(name: str, what: str, error: type[HyperbloomError]) -> Callable[..., object]:
    """Import and return the function `package.module:function`; `what` describes the expected one in errors.

    Raises:
        error: the function cannot be imported, or is not callable.
    """
    try:
        found: Any = resolve_name(name)
    except Exception as cause:
        raise error(f"{name}: expected {what}, found {describe(cause)}; searched from {Path.cwd()}") from cause
    if not callable(found):
        raise error(f"{name}: expected {what}, found {describe(found)}")
    return found


@dataclass(frozen=True)
class Plugin:
    """A plug-in: its name, its target `package.module:name`, and the distribution with version that provides it."""

    name: str
    target: str
    origin: str

    def load(self, what: str, error: type[HyperbloomError]) -> Callable[..., object]:
        """Import the plug-in's function or class; `what`, `error` and when it is raised as in `find_function`."""
        try:
            return find_function(self.target, what, error)
        except error as cause:
            raise error(f"plug-in {self.name!r} of {self.origin} is broken: {cause}") from cause


@cache
def plugins(kind: Kind) -> Mapping[str, tuple[Plugin, ...]]:
    """Return the plug-ins of a kind by name, sorted. A name has several if several packages claim it."""
    found: dict[str, tuple[Plugin, ...]] = {}
    for entry in sorted(entry_points(group=f"hyperbloom.{kind}"), key=lambda entry: (entry.name, entry.value)):
        origin = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
        found[entry.name] = (*found.get(entry.name, ()), Plugin(entry.name, entry.value, origin))
    return found


def find_plugin(kind: Kind, name: str, built_in: Container[str], error: type[HyperbloomError]) -> Plugin | None:
    """Return the plug-in with this name, or None if there is none.

    Raises:
        error: the name is ambiguous, because it is also built in, or several packages claim it.
    """
    claims = plugins(kind).get(name, ())
    if claims and (len(claims) > 1 or name in built_in):
        raise error(f"{name}: expected one meaning, found {_conflict(claims, name in built_in)}")
    return claims[0] if claims else None


def plugin_lines(kind: Kind, built_in: Container[str]) -> dict[str, str]:
    """Return a line for each plug-in's name: its target and its origin, or why it cannot be used."""
    lines = {}
    for name, claims in plugins(kind).items():
        if len(claims) == 1 and name not in built_in:
            lines[name] = f"plug-in of {claims[0].origin}: {claims[0].target}"
        else:
            lines[name] = f"cannot be used: {_conflict(claims, name in built_in)}"
    return lines


def _conflict(claims: tuple[Plugin, ...], built_in: bool) -> str:
    said = [*(["a built-in one"] if built_in else []), *(f"{claim.target} of {claim.origin}" for claim in claims)]
    return f"{' and '.join(said)}; uninstall a package, or rename its entry point"
