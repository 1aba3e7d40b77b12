"""How much of a model is personal: every client's head on every other client's feature extractor (figure 3 of pFedHN).

    accuracy[i, j] of client i's test examples, with the head of client i on what h writes for client j

Possible where the data are those of the run's `data` section: virtual clients are made of them as for the inline
engine, and must say of their data what the clients of the run have said. Heads are h's own in pFedHN; in pFedHN-PC, the
paper's case, they are the clients', and must lie in the run folder, where clients of the server's machine keep them.
"""

from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.models import HEAD
from hyperbloom.common.names import check_name
from hyperbloom.common.wire import Scope, Weights
from hyperbloom.server.engine import inline_grid
from hyperbloom.server.loop.admission import Admission
from hyperbloom.server.loop.exchange import Outcome
from hyperbloom.server.loop.federation import Federation
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.loop.rounds import Run
from hyperbloom.server.loop.session import greeting_of
from hyperbloom.server.run_folder import read_run
from hyperbloom.server.watching import read_environment
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.exchange import Client
from hyperbloom.strategies.pfedhn import PFedHN

__all__ = ["MOST", "Mixed", "mix_and_match"]

MOST = 30
"""Clients beyond which only the first ones are mixed: the work grows with the square."""

_SAME = ("size", "input_shape", "num_classes", "train_examples", "val_examples", "test_examples")


class Mixed(NamedTuple):
    """Names of clients, and the accuracy `(clients, clients)` in percent: rows have the head, columns the rest.

    Of the selected round, or of the last one, from which the heads are that clients have kept.
    """

    names: list[str]
    values: npt.NDArray[np.float64]
    of_last_round: bool


def mix_and_match(folder: Path, config: RunConfig, root: Path | None) -> Mixed:
    """Try every client's head on the feature extractors of all, on its own test examples.

    Args:
        folder: the run's.
        config: of the run.
        root: folder with the data set's files; as in the run, if None.

    Raises:
        ConfigError: says why there can be no such matrix.
        DataError: the data set is not there.
    """
    tensors, stored = read_run(folder)
    run_id = f"{read_environment(folder).get('run_id')}-{config.strategy}"
    if len(config.sizes) > 1:
        raise ConfigError("its clients have networks of several sizes, whose parts do not fit each other")
    data = config.data if root is None else config.data.model_copy(update={"root": str(root)})
    # What a run had before it began plays no part in what it has learned.
    config = config.model_copy(update={"data": data, "init_from": None, "baselines": (), "clients": len(stored)})
    roster = Roster(config.seed)
    strategy = make_algorithm(config)
    if not isinstance(strategy, PFedHN) or strategy.private not in ("none", "head"):
        raise ConfigError(f"{config.strategy} writes no feature extractor for each client")
    with TemporaryDirectory() as scratch:
        if strategy.private == "head":
            tensors = _take_heads(folder, Path(scratch), run_id, stored)
        federation = Federation(inline_grid(config, Path(scratch)), roster, lambda text: None)
        federation.admission, federation.greeting = Admission(config, strategy, tensors), greeting_of(strategy)
        federation.gather(config.clients, config.join_timeout_s)
        roster.sort(0)
        _check_same(stored, roster)
        run = Run(config, strategy, federation, (), Scope(run_id, 0, config.seed))
        clients = list(roster)[:MOST]
        own = strategy.weights(clients)
        mixed = [_scores(run, clients, [_mix(strategy, body, head) for head in own]) for body in own]
    return Mixed([client.client_id for client in clients], np.array(mixed).T, strategy.private == "head")


def _take_heads(folder: Path, scratch: Path, run_id: str, stored: Roster) -> dict[str, Tensor]:
    """Copy what the clients have kept, and return the server's state of then, that of the last round."""
    for client in stored:
        state = Path("clients") / check_name(client.client_id, "a client's name")
        if not (folder / state / "personal" / f"{run_id}.safetensors").is_file():
            raise ConfigError(f"{client.client_id} keeps its head, or has none: there is none in {folder / state}")
        copytree(folder / state, scratch / state)
    try:
        return load_file(folder / "hypernetwork-last.safetensors")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"heads are those of the last round, of which the server has no state ({error})") from None


def _check_same(stored: Roster, roster: Roster) -> None:
    for then, now in zip(stored, roster, strict=True):
        if then.client_id != now.client_id or any(getattr(then.about, n) != getattr(now.about, n) for n in _SAME):
            raise ConfigError(
                f"its clients' data are not those of its data section ({then.client_id} had "
                f"{then.about.train_examples} examples to train on)"
            )


def _mix(strategy: PFedHN, body: Weights, head: Weights) -> Weights:
    if strategy.private == "head":  # it is on the client
        return body
    layout = body.layout
    of_body, of_head = layout.views(body.values), layout.views(head.values)
    mixed = {name: (of_head if name.startswith(HEAD) else of_body)[name] for name in of_body}
    return Weights(layout, layout.flatten(mixed))


def _scores(run: Run, clients: Sequence[Client], weights: Sequence[Weights]) -> list[float]:
    """Return the test accuracy of each client with weights of its own, percent."""
    by_row = {client.row: values for client, values in zip(clients, weights, strict=True)}
    outcome = Outcome()
    scores = run.director.play(
        run.algorithm.score(run.turn(0), clients, lambda some: [by_row[client.row] for client in some]), outcome
    )
    missing = [client.client_id for client in clients if client.client_id not in scores]
    if missing:
        raise ConfigError(f"{missing[0]} could not be evaluated: {outcome.refused.get(missing[0])}")
    return [100 * scores[client.client_id].test.accuracy for client in clients]
