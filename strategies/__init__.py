"""Strategies by name: how a federation learns. One paper per file; see `personalised` for what they share."""

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.strategies.fedavg import FedAvg
from hyperbloom.strategies.fedavg_ft import FedAvgFT
from hyperbloom.strategies.fedhenn import FedHeNN
from hyperbloom.strategies.fedma import FedMA
from hyperbloom.strategies.fedper import FedPer
from hyperbloom.strategies.fedprox import FedProx
from hyperbloom.strategies.fedrep import FedRep
from hyperbloom.strategies.ghn import GHN, GHNServer
from hyperbloom.strategies.hafl_distillation import HAFLDistillation
from hyperbloom.strategies.lg_fedavg import LGFedAvg
from hyperbloom.strategies.local import Local
from hyperbloom.strategies.odpfl import ODPFL
from hyperbloom.strategies.per_fedavg import PerFedAvg
from hyperbloom.strategies.personalised import PersonalisedStrategy
from hyperbloom.strategies.pfedhn import PFedHN, PFedHNPC
from hyperbloom.strategies.pfedhn_heads import PFedHNHeads
from hyperbloom.strategies.pfedme import PFedMe
from hyperbloom.strategies.pfl import PFLEnsemble, PFLNearest, PFLSampled
from hyperbloom.strategies.roster import Roster

__all__ = ["STRATEGIES", "make_strategy"]

STRATEGIES: dict[str, type[PersonalisedStrategy]] = {
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedhenn": FedHeNN,
    "fedma": FedMA,
    "fedper": FedPer,
    "fedprox": FedProx,
    "fedrep": FedRep,
    "ghn": GHN,
    "ghn-server": GHNServer,
    "hafl-distillation": HAFLDistillation,
    "lg-fedavg": LGFedAvg,
    "local": Local,
    "odpfl": ODPFL,
    "per-fedavg": PerFedAvg,
    "pfedhn": PFedHN,
    "pfedhn-heads": PFedHNHeads,
    "pfedhn-pc": PFedHNPC,
    "pfedme": PFedMe,
    "pfl-ensemble": PFLEnsemble,
    "pfl-nearest": PFLNearest,
    "pfl-sampled": PFLSampled,
}


def make_strategy(config: RunConfig, run_id: str, roster: Roster) -> PersonalisedStrategy:
    """Return the strategy that `config` names.

    Raises:
        ConfigError: there is no such strategy, or its options are wrong.
    """
    if config.strategy not in STRATEGIES:
        raise ConfigError(f"strategy: expected one of {', '.join(STRATEGIES)}, found {config.strategy!r}")
    return STRATEGIES[config.strategy].for_run(config)(config, run_id, roster)
