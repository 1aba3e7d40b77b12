"""Strategies by name: how a federation learns. One paper per file; see `personalised` for what they share."""

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.strategies.fedavg import FedAvg
from hyperbloom.strategies.ghn import GHN, GHNServer
from hyperbloom.strategies.hafl_distillation import HAFLDistillation
from hyperbloom.strategies.local import Local
from hyperbloom.strategies.odpfl import ODPFL
from hyperbloom.strategies.personalised import PersonalisedStrategy
from hyperbloom.strategies.pfedhn import PFedHN, PFedHNPC
from hyperbloom.strategies.pfedhn_heads import PFedHNHeads
from hyperbloom.strategies.roster import Roster

__all__ = ["STRATEGIES", "make_strategy"]

STRATEGIES: dict[str, type[PersonalisedStrategy]] = {
    "fedavg": FedAvg,
    "ghn": GHN,
    "ghn-server": GHNServer,
    "hafl-distillation": HAFLDistillation,
    "local": Local,
    "odpfl": ODPFL,
    "pfedhn": PFedHN,
    "pfedhn-heads": PFedHNHeads,
    "pfedhn-pc": PFedHNPC,
}


def make_strategy(config: RunConfig, run_id: str, roster: Roster) -> PersonalisedStrategy:
    """Return the strategy that `config` names.

    Raises:
        ConfigError: there is no such strategy, or its options are wrong.
    """
    if config.strategy not in STRATEGIES:
        raise ConfigError(f"strategy: expected one of {', '.join(STRATEGIES)}, found {config.strategy!r}")
    return STRATEGIES[config.strategy](config, run_id, roster)
