"""The personal share of a model: every client's head on every client's feature extractor (figure 3 of pFedHN).

    value[i, j] on client i's test examples, with the head of client i on the feature extractor of client j

    python -m figures.mix_and_match RUN --root /data    # draws RUN/mix-and-match.png

If a row looks the same throughout, extractors are not personal; blocks are clients that could share one. Each row is
shaded from its least to its greatest value, as in the paper. Of more than 30 clients the first 30 are mixed.

This needs the test examples of all clients, so their data must be those of the run's `data` section. In pFedHN, the
server generates the heads. In pFedHN-PC, the paper's case, clients keep them. They must then be in the run folder,
where clients on the server's machine keep their state; the matrix is then of the last round.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call

from hyperbloom.common.config import RunConfig
from hyperbloom.common.data import Examples, data_source
from hyperbloom.common.errors import ConfigError, HyperbloomError
from hyperbloom.common.metrics import scale_of, title_of
from hyperbloom.common.models import build, head_layout
from hyperbloom.common.program.names import check_name
from hyperbloom.server.grids.local_clients import client_settings
from hyperbloom.server.loop.admission import Admission
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.runs.folder import read_run
from hyperbloom.server.runs.recorded import read_config
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.exchange import Client
from hyperbloom.strategies.pfedhn import PFedHN

MOST = 30
"""Most clients that are mixed, since the work grows with the square; others are left out."""

AT_ONCE = 256
"""Examples per forward pass."""

Parameters = Mapping[str, Tensor]


class Mixed(NamedTuple):
    """Names of clients, and the selecting metric `(clients, clients)` by client of the head and of the rest.

    It belongs to the selected round, or to the last one if clients kept the heads.
    """

    names: list[str]
    values: npt.NDArray[np.float64]
    of_last_round: bool
    metric: str

    @property
    def own(self) -> float:
        """Return the mean of heads on their own client's feature extractor."""
        return float(np.diag(self.values).mean())

    @property
    def others(self) -> float:
        """Return the mean on other clients' feature extractors; `own` for a single client."""
        count = len(self.names)
        return float(self.values[~np.eye(count, dtype=bool)].mean()) if count > 1 else self.own


def _environment(folder: Path) -> Mapping[str, Any]:
    try:
        return {**json.loads((folder / "environment.json").read_text())}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder}: environment.json is missing or damaged ({error})") from None


def mix_and_match(folder: Path, config: RunConfig, root: Path | None) -> Mixed:
    """Test every client's head on the feature extractors of all clients, with its own test examples.

    Args:
        folder: the run's folder.
        config: of the run.
        root: folder with the data set's files; None: as in the run.

    Raises:
        ConfigError: the matrix is impossible; the message says why.
        DataError: the data set is missing.
    """
    tensors, roster = read_run(folder)
    if len(config.sizes) > 1:
        raise ConfigError("its clients have networks of several sizes, whose parts do not fit each other")
    config = config.model_copy(update={"init_from": None})
    strategy = make_algorithm(config)
    if not isinstance(strategy, PFedHN) or strategy.private not in ("none", "head"):
        raise ConfigError(f"{config.strategy} writes no feature extractor for each client")
    clients, kept = list(roster)[:MOST], strategy.private == "head"
    heads: list[Tensor] = []
    if kept:
        run_id = f"{_environment(folder).get('run_id')}-{config.strategy}"
        heads = [_kept_head(folder, client, run_id) for client in clients]
        tensors = _last_state(folder)
    strategy.check_start(tensors)
    Admission(config, strategy, tensors).begin(roster, len(roster))
    written = [weights.layout.views(weights.values) for weights in strategy.personal(clients)]
    spec = strategy.setting.spec
    own = [head_layout(spec).views(head) for head in heads] if kept else written
    module, rows = build(spec).eval(), []
    for head, test in zip(own, _test_examples(config, root, roster, clients), strict=True):
        only = {name: head[name] for name, _ in head_layout(spec).shapes}
        test = test.under(strategy.setting.task)
        rows.append([_value(module, {**body, **only}, test, strategy.metrics[0]) for body in written])
    if np.isnan(rows).any():
        raise ConfigError(f"{strategy.metrics[0]} is undefined on the test examples of a client")
    return Mixed([client.client_id for client in clients], np.array(rows), kept, strategy.metrics[0])


def _kept_head(folder: Path, client: Client, run_id: str) -> Tensor:
    """Return the head `(P,)` that a client on this machine has kept. Raise a ConfigError if there is none."""
    state = folder / "clients" / check_name(client.client_id, "a client's name")
    try:
        return load_file(state / "personal" / f"{run_id}.safetensors")["values"]
    except (OSError, SafetensorError, KeyError):
        raise ConfigError(f"{client.client_id} keeps its head, or has none: there is none in {state}") from None


def _last_state(folder: Path) -> dict[str, Tensor]:
    """Return the server's state after the last round, to which the kept heads belong."""
    try:
        return load_file(folder / "hypernetwork-last.safetensors")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"heads are those of the last round, of which the server has no state ({error})") from None


def _test_examples(config: RunConfig, root: Path | None, roster: Roster, clients: Sequence[Client]) -> list[Examples]:
    """Return the clients' test examples. Raise a ConfigError if their data are not those of the data section."""
    data = config.data if root is None else config.data.model_copy(update={"root": str(root)})
    config = config.model_copy(update={"data": data, "clients": len(roster)})
    virtual = [client_settings(config, index, Path()) for index in range(len(roster))]
    settings = {each.client_id: each for each in virtual}
    found = []
    for client in clients:
        about, here = client.about, settings.get(client.client_id)
        theirs = (about.train_examples, about.val_examples, about.test_examples, about.input_shape, about.num_classes)
        own = None if here is None else data_source(here.data).client(here.data.partition)
        if own is None or theirs != (len(own.train), len(own.val), len(own.test), own.input_shape, own.num_classes):
            raise ConfigError(
                f"its clients' data are not those of its data section ({client.client_id} had "
                f"{about.train_examples} examples to train on)"
            )
        found.append(own.test)
    return found


@torch.no_grad()
def _value(module: nn.Module, weights: Parameters, test: Examples, metric: str) -> float:
    """Return the metric of a network with these weights, a share in percent; NaN if it is undefined."""
    outputs = torch.cat([functional_call(module, dict(weights), (inputs,)) for inputs in test.inputs.split(AT_ONCE)])
    value = test.task.measure(test.task.answers(outputs), test.labels, outputs.shape[1], [metric]).values.get(metric)
    return math.nan if value is None else scale_of(metric).factor * value


def draw(mixed: Mixed, path: Path) -> None:
    """Write the matrix as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, values, metric = mixed.names, mixed.values, mixed.metric
    least, most = values.min(axis=1, keepdims=True), values.max(axis=1, keepdims=True)
    canvas, axis = pyplot.subplots(figsize=(7.2, 6.6), constrained_layout=True)
    axis.imshow((values - least) / np.maximum(most - least, 1e-12), cmap="Blues")
    if len(names) <= 15:
        for (i, j), value in np.ndenumerate(values):
            axis.text(j, i, scale_of(metric).cell(value), ha="center", va="center", fontsize=7)
    ticks = range(len(names))
    axis.set_xticks(ticks, names, rotation=90, fontsize=7)
    axis.set_yticks(ticks, names, fontsize=7)
    axis.set_xlabel("feature extractor of")
    axis.set_ylabel("head of")
    axis.set_title(f"{title_of(metric)} on the test examples of the head's client", fontsize=10)
    canvas.savefig(path, dpi=110)
    pyplot.close(canvas)


def main() -> None:
    """Print the means on the diagonal and beside it, and draw the matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder of pfedhn or pfedhn-pc")
    parser.add_argument("--root", type=Path, help="folder with the data set's files, by default as in the run")
    parser.add_argument("--own-code", action="store_true", help="import what RUN names as package.module:name")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="by default in the run's folder")
    args = parser.parse_args()
    try:
        config = read_config(args.run, args.own_code)
        mixed = mix_and_match(args.run, config, args.root)
    except HyperbloomError as error:
        raise SystemExit(f"no matrix: {error}") from None
    draw(mixed, args.figure or args.run / "mix-and-match.png")
    show = scale_of(mixed.metric).show
    print(f"on their own feature extractor {show(mixed.own)}, on others' {show(mixed.others)}")


if __name__ == "__main__":
    main()
