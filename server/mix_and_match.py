"""How much of a model is personal: every client's head on every other client's feature extractor (figure 3 of pFedHN).

    accuracy[i, j] of client i's test examples, with h's feature extractor for client j and its head for client i

Possible where the server writes whole models, and where the data are those of the run's `data` section: virtual clients
are made of them as for the inline engine, and must say of their data what the clients of the run have said.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.models import HEAD
from hyperbloom.server.engine import inline_grid
from hyperbloom.server.federation import Federation
from hyperbloom.server.run_folder import read_run
from hyperbloom.strategies import make_strategy
from hyperbloom.strategies.personalised import PersonalisedStrategy
from hyperbloom.strategies.pfedhn import PFedHN
from hyperbloom.strategies.roster import Client, Roster

__all__ = ["MOST", "mix_and_match"]

MOST = 30
"""Clients beyond which only the first ones are mixed: the work grows with the square."""

_SAME = ("size", "input_shape", "num_classes", "train_examples", "val_examples", "test_examples")


def mix_and_match(folder: Path, config: RunConfig, root: Path | None) -> tuple[list[str], npt.NDArray[np.float64]]:
    """Return names of clients, and the accuracy `(clients, clients)` in percent: rows have the head, columns the rest.

    Args:
        folder: the run's.
        config: of the run.
        root: folder with the data set's files; as in the run, if None.

    Raises:
        ConfigError: says why there can be no such matrix.
        DataError: the data set is not there.
    """
    tensors, stored = read_run(folder)
    if len(config.sizes) > 1:
        raise ConfigError("its clients have networks of several sizes, whose parts do not fit each other")
    data = config.data if root is None else config.data.model_copy(update={"root": str(root)})
    # What a run had before it began plays no part in what it has learned.
    config = config.model_copy(update={"data": data, "init_from": None, "baselines": (), "clients": len(stored)})
    roster = Roster(config.seed)
    strategy = make_strategy(config, "mix", roster)
    if not isinstance(strategy, PFedHN) or strategy.private != "none":
        raise ConfigError(f"the server has no whole models of its clients with {config.strategy}")
    with TemporaryDirectory() as scratch:
        federation = Federation(inline_grid(config, Path(scratch)), roster, lambda text: None)
        strategy.check_initial(tensors)
        federation.gather(strategy, config.clients, config.join_timeout_s)
        roster.sort(0)
        _check_same(stored, roster)
        strategy.load(tensors)
        clients = list(roster)[:MOST]
        own = strategy.weights_for(clients)
        mixed = [
            _scores(strategy, federation, clients, [_mix(strategy, clients[0], body, head) for head in own])
            for body in own
        ]
    return [client.client_id for client in clients], np.array(mixed).T


def _check_same(stored: Roster, roster: Roster) -> None:
    for then, now in zip(stored, roster, strict=True):
        if then.client_id != now.client_id or any(getattr(then.about, n) != getattr(now.about, n) for n in _SAME):
            raise ConfigError(
                f"its clients' data are not those of its data section ({then.client_id} had "
                f"{then.about.train_examples} examples to train on)"
            )


def _mix(strategy: PersonalisedStrategy, client: Client, body: Tensor, head: Tensor) -> Tensor:
    layout = strategy.layout_for(client)
    of_body, of_head = layout.views(body), layout.views(head)
    return layout.flatten({name: (of_head if name.startswith(HEAD) else of_body)[name] for name in of_body})


def _scores(
    strategy: PersonalisedStrategy, federation: Federation, clients: Sequence[Client], weights: Sequence[Tensor]
) -> list[float]:
    """Return the test accuracy of each client with weights of its own, percent."""
    by_row = {client.row: values for client, values in zip(clients, weights, strict=True)}
    chosen = partial(_chosen, by_row)
    scores = {}
    for reply in federation.exchange([strategy.score_orders(0, chosen, clients)], 600.0):
        if score := strategy.accept_score(reply):
            scores[score[0]] = 100 * score[1].score("test").accuracy
    missing = [client.client_id for client in clients if client.client_id not in scores]
    if missing:
        raise ConfigError(f"{missing[0]} could not be evaluated: {strategy.round.refused.get(missing[0])}")
    return [scores[client.client_id] for client in clients]


def _chosen(by_row: dict[int, Tensor], clients: Sequence[Client]) -> list[Tensor]:
    return [by_row[client.row] for client in clients]
