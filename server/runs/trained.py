"""A finished run read from its folder: the strategy as it was in the round that validation selected."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from hyperbloom.common.config import RunConfig
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.errors import ConfigError, RefusedError, describe
from hyperbloom.server.loop.admission import Admission
from hyperbloom.server.loop.listener import Selection
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.runs.folder import read_run
from hyperbloom.server.runs.recorded import read_config, read_summary
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.algorithm import Algorithm


@dataclass(frozen=True)
class Trained:
    """The result of a run: strategy and tensors are of the selected round."""

    run: Path
    config: RunConfig
    strategy: Algorithm
    roster: Roster
    tensors: Mapping[str, Tensor]
    selection: Selection

    @cached_property  # each card of an export asks
    def scaling(self) -> tuple[Scaling, str]:
        """Return the preprocessing that most clients report, or the usual one, and a sentence on which it is."""
        told = Counter(Scaling(c.about.divisor, c.about.mean, c.about.std) for c in self.roster).most_common(1)
        if told and 2 * told[0][1] > len(self.roster):
            return told[0][0], f"The preprocessing is that of {told[0][1]} of {len(self.roster)} clients, as they told."
        return Scaling(255.0), (
            "The clients differ in their preprocessing; it is that of users' own data: bytes by 255, floats as is."
        )


def read_trained(run: Path, check: Callable[[Algorithm], None], own_code: bool = False) -> Trained:
    """Restore a run's strategy once `check` accepts it; with `own_code`, import what the folder names.

    Raises:
        ConfigError: it is not a run folder, is damaged, or is not suitable.
    """
    config = read_config(run, own_code)
    check(make_algorithm(config))
    tensors, roster = read_run(run, str(run))
    try:
        algorithm = restored(config, tensors, roster)
    except RefusedError as error:
        raise ConfigError(f"{run / 'roster.json'}: {error}") from None
    selection = read_summary(run).get(config.strategy)
    if selection is None:
        raise ConfigError(f"{run / 'summary.json'}: expected the selected round of {config.strategy}, found none")
    with safe_open(run / "hypernetwork.safetensors", framework="pt") as file:
        if (file.metadata() or {}).get("round", str(selection.round)) != str(selection.round):
            raise ConfigError(f"{run} was stopped while it wrote what validation had selected; resume it first")
    return Trained(run, config, algorithm, roster, tensors, selection)


def restored(
    config: RunConfig, tensors: Mapping[str, Tensor], roster: Roster, device: torch.device = Algorithm.device
) -> Algorithm:
    """Return a strategy as it was when its state was `tensors`; clients that have joined since are new to it.

    Raises:
        ConfigError: the strategy does not fit these tensors.
        RefusedError: it refuses a client.
    """
    algorithm = make_algorithm(config)
    algorithm.device = device
    Admission(config, algorithm).begin(roster, len(roster))
    known = algorithm.state()  # what is missing of it is told; a checkpoint may have more
    try:
        algorithm.restore({name: x for name, x in algorithm.checkpoint().items() if name not in known} | {**tensors})
    except (LookupError, RuntimeError) as error:
        raise ConfigError(f"{config.strategy}: its state does not fit its configuration: {describe(error)}") from None
    for client in roster:
        algorithm.join(client, False)
    return algorithm
