"""A finished run as its folder keeps it: the strategy as it was in the round that validation selected."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hyperbloom.common.config import RunConfig, load_run_config
from hyperbloom.common.data import DATASETS
from hyperbloom.common.data.registry import SCALINGS
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.errors import ConfigError, RefusedError
from hyperbloom.common.messages import Introduction
from hyperbloom.server.run_folder import read_run
from hyperbloom.strategies import make_strategy
from hyperbloom.strategies.fedavg import FedAvg
from hyperbloom.strategies.personalised import PersonalisedStrategy
from hyperbloom.strategies.roster import Roster

__all__ = ["Trained", "read_trained"]


@dataclass(frozen=True)
class Trained:
    """What a run has learned.

    Attributes:
        run: its folder.
        strategy: with the selected round's state.
        round: the number of that round.
        metrics: what it scored.
        test_accuracy: of each client, in percent.
    """

    run: Path
    config: RunConfig
    strategy: PersonalisedStrategy
    roster: Roster
    tensors: Mapping[str, Tensor]
    round: int
    metrics: Mapping[str, float]
    test_accuracy: Mapping[str, float]

    @property
    def scaling(self) -> tuple[Scaling, str]:
        """What the clients did to stored numbers, as far as the server can know; and how it knows, in a sentence."""
        config, spec = self.config, self.strategy.spec
        assert spec is not None
        told = Counter(_scaling(client.about) for client in self.roster if client.about.divisor is not None)
        scaling, many = told.most_common(1)[0] if told else (Scaling(), 0)
        if 2 * many > len(self.roster):
            return scaling, f"The preprocessing is that of {many} of {len(self.roster)} clients, as they told."
        info = DATASETS.get(config.data.name)
        if info and (info.input_shape, info.num_classes) == (spec.input_shape, spec.num_classes):
            return SCALINGS[info.name], (
                f"The preprocessing is that of {info.name}, which the run names and whose shape fits; the server has "
                "not seen the data. For clients with data of their own it is: bytes by 255, floats as they are."
            )
        return Scaling(255.0), "The preprocessing is that of clients' own data: bytes by 255, floats as they are."


def _scaling(about: Introduction) -> Scaling:
    assert about.divisor is not None
    return Scaling(about.divisor, about.mean, about.std)


def read_trained(run: Path, check: Callable[[PersonalisedStrategy], None]) -> Trained:
    """Rebuild a run's strategy.

    Args:
        run: the run folder.
        check: raises a ConfigError if the strategy is of no use; called before anything large is read.

    Raises:
        ConfigError: it is no run folder, damaged, or of no use.
    """
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"expected a run folder with config.yaml, found {run}")
    config = load_run_config(run / "config.yaml", {})
    roster = Roster(config.seed)
    check(make_strategy(config, "", roster))
    tensors, roster = read_run(run, str(run))
    strategy = make_strategy(config, "", roster)
    one_model = isinstance(strategy, FedAvg)  # from whose runs no other may start
    if not one_model:
        strategy.check_initial(tensors)
    try:
        for client in roster:
            strategy.check_newcomer(client.about)
    except RefusedError as error:
        raise ConfigError(f"{run / 'roster.json'}: {error}") from None
    if one_model:
        strategy.restore(tensors)
    else:
        strategy.load(tensors)
    return Trained(run, config, strategy, roster, tensors, *_selection(run, config.strategy))


def _selection(run: Path, strategy: str) -> tuple[int, dict[str, float], dict[str, float]]:
    try:
        one = json.loads((run / "summary.json").read_text(encoding="utf-8"))[strategy]
        return int(one["round"]), dict(one["metrics"]), dict(one["test_accuracy"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run / 'summary.json'}: expected the selected round of {strategy} ({error!r})") from None
