"""The strategies by name, one paper per file. `algorithm` has what they share."""

import inspect

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import ConfigError, describe
from hyperbloom.common.program.plugins import current_directory, find_function, find_plugin, plugins
from hyperbloom.strategies.algorithm import Algorithm
from hyperbloom.strategies.ditto import Ditto
from hyperbloom.strategies.fedavg import FedAvg
from hyperbloom.strategies.fedavg_ft import FedAvgFT
from hyperbloom.strategies.fedhenn import FedHeNN, FedHeNNHomogeneous
from hyperbloom.strategies.fedper import FedPer
from hyperbloom.strategies.fedprox import FedProx
from hyperbloom.strategies.fedrep import FedRep
from hyperbloom.strategies.ghn import GHN, GHNServer
from hyperbloom.strategies.hyperfl import HyperFL
from hyperbloom.strategies.local import Local
from hyperbloom.strategies.odpfl import ODPFL
from hyperbloom.strategies.pfedhn import PFedHN, PFedHNPC

STRATEGIES: dict[str, type[Algorithm]] = {
    "ditto": Ditto,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedhenn": FedHeNN,
    "fedhenn-homogeneous": FedHeNNHomogeneous,
    "fedper": FedPer,
    "fedprox": FedProx,
    "fedrep": FedRep,
    "ghn": GHN,
    "ghn-server": GHNServer,
    "hyperfl": HyperFL,
    "local": Local,
    "odpfl": ODPFL,
    "pfedhn": PFedHN,
    "pfedhn-pc": PFedHNPC,
}

_WHAT = "a subclass of hyperbloom.strategies.algorithm.Algorithm"


def strategy_names() -> tuple[str, ...]:
    """Return the names of all strategies: the built-in ones, then those of plug-ins."""
    return tuple(dict.fromkeys([*STRATEGIES, *plugins("strategies")]))


def find_strategy(name: str, where: str = "strategy") -> type[Algorithm]:
    """Return the strategy class for a name, a plug-in's name or `package.module:Class`.

    The current directory can be imported from while the class is loaded. `where` names the setting in messages.

    Raises:
        ConfigError: there is no such strategy, it cannot be imported, or it is not a complete `Algorithm`.
    """
    plugin = find_plugin("strategies", name, STRATEGIES, ConfigError)
    if name in STRATEGIES:
        return STRATEGIES[name]
    if plugin is None and ":" not in name:
        known = ", ".join(strategy_names())
        raise ConfigError(f"{where}: expected one of {known}; or package.module:Class; found {name!r}")
    with current_directory():
        found = plugin.load(_WHAT, ConfigError) if plugin else find_function(name, _WHAT, ConfigError)
    if not isinstance(found, type) or not issubclass(found, Algorithm):
        raise ConfigError(f"{where}: expected {name} to be {_WHAT}, found {describe(found)}")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"{where}: expected {name} to define {missing} as well")
    return found


def make_algorithm(config: RunConfig) -> Algorithm:
    """Return the algorithm that `config` names; ConfigError if no strategy has this name, or its options are wrong."""
    return find_strategy(config.strategy)(config)
