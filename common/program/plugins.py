"""Plug-ins: installed packages that add strategies, models, data sets or tasks under short names, by entry points.

    [project.entry-points."hyperbloom.strategies"]
    momentum = "hospital_plugins.momentum:FedAvgM"

The groups are `hyperbloom.strategies`, `hyperbloom.models`, `hyperbloom.datasets`, `hyperbloom.tasks` and
`hyperbloom.trackers`. A plug-in's name is a short form of its `package.module:name`. A plug-in is imported only when
its name is used.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Literal

from hyperbloom.common.errors import HyperbloomError
from hyperbloom.common.program.importing import find_function

Kind = Literal["strategies", "models", "datasets", "tasks", "trackers"]


@dataclass(frozen=True)
class Plugin:
    """A plug-in: its name, its target `package.module:name`, and the distribution with version that provides it."""

    name: str
    target: str
    origin: str

    def load(self, what: str, error: type[HyperbloomError]) -> Callable[..., object]:
        """Import the plug-in's function or class; `what` and `error` as in `find_function`.

        Raises:
            error: it cannot be imported, or is not callable.
        """
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
