"""How well an attacker tells from a model which examples it was trained on, with and without differential privacy.

The attack is the loss threshold of Yeom, Giacomelli, Fredrikson, Jha: Privacy Risk in Machine Learning, CSF 2018,
https://arxiv.org/abs/1709.01604: examples with a small loss are called members. The attacker has the weights that the
server generates for a client (pfedhn) or that all share (fedavg) after the last round, the client's training examples
as members, and its test examples, which nothing was trained on, as others.

* AUC: how often a member has a smaller loss than another example; 0.5 is a guess.
* advantage: the largest difference of true and false positives over all thresholds; 0 is a guess. Chosen on the same
  examples, so that a guess has some advantage, too: `untrained` shows how much, on the weights before the first round.

A mean over clients and seeds. Eight virtual clients with few of the digits each, all asked in each round.

    python -m figures.membership                               # what is missing (5 min)
"""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor
from torch.func import functional_call

from figures.pages import table_row
from figures.study import Line, Study
from hyperbloom.client.work.client import Client, client_for
from hyperbloom.common.config import DataConfig, LocalConfig, PrivacyConfig, RunConfig
from hyperbloom.common.data import Examples
from hyperbloom.common.models import build
from hyperbloom.common.secrecy.noise import epsilon_of
from hyperbloom.server.grids.engine import client_settings, inline_grid
from hyperbloom.server.loop.listener import Listener
from hyperbloom.server.loop.session import Session
from hyperbloom.strategies.algorithm import Algorithm

CLIENTS, ROUNDS, EXAMPLES, DELTA = 8, 40, 20, 1e-5
PLACES = {"pfedhn": "client", "fedavg": "server"}
"""Who clips and adds noise."""
NOISES: dict[str, tuple[float | None, ...]] = {
    "pfedhn": (None, 1e-6, 0.03, 0.3, 3.0),
    "fedavg": (None, 1e-6, 0.3, 3.0, 20.0),
}
"""By strategy; none: no clipping either. 1e-6 is clipping alone."""


@dataclass(frozen=True)
class Attack:
    """What came of it, a mean over clients."""

    auc: float
    advantage: float
    train_accuracy: float
    test_accuracy: float


class Keep(Listener):
    """Keeps the strategy, and the weights of all clients before the first round."""

    def phase(self, strategy: Algorithm, name: str) -> None:
        """Take both."""
        self.strategy = strategy
        self.untrained = [weights.clone() for weights in self.weights()]

    def weights(self) -> Sequence[Tensor]:
        """Return the weights `(P,)` of each client."""
        made = self.strategy.weights(list(self.strategy.clients.values()))
        assert made is not None
        return [weights.values for weights in made]


def threshold(members: Tensor, others: Tensor) -> tuple[float, float]:
    """Return AUC and advantage of calling those a member whose loss is small.

    Args:
        members: `(M,)` losses of examples that were trained on.
        others: `(N,)` losses of examples that were not.
    """
    truth = [1] * len(members) + [0] * len(others)
    score = (-torch.cat([members, others])).nan_to_num(neginf=-1e30).tolist()
    false, true, _ = roc_curve(truth, score)
    return float(roc_auc_score(truth, score)), float((true - false).max())


def attack(strategy: Algorithm, weights: Sequence[Tensor], workers: Sequence[Client]) -> Attack:
    """Attack the model of each client."""
    found = []
    module = build(strategy.setting.spec)
    for client, theta, worker in zip(strategy.clients.values(), weights, workers, strict=True):
        parameters = strategy.layout(client).views(theta)
        members, others = (losses(module, parameters, part) for part in (worker.train_data, worker.test_data))
        found.append((*threshold(members[0], others[0]), members[1], others[1]))
    return Attack(*(statistics.fmean(column) for column in zip(*found, strict=True)))


@torch.no_grad()
def losses(module: torch.nn.Module, parameters: dict[str, Tensor], data: Examples) -> tuple[Tensor, float]:
    """Return the loss `(N,)` of each example, and the accuracy in percent."""
    logits = functional_call(module, parameters, (data.inputs,))
    right = (logits.argmax(1) == data.labels).double().mean()
    return F.cross_entropy(logits, data.labels, reduction="none").double(), 100 * float(right)


def play(strategy: str, noise: float | None, rounds: int, seed: int) -> tuple[Attack, Attack]:
    """Run once; returns the attack before the first round and after the last."""
    client_for.cache_clear()
    config = RunConfig(
        gains=False,
        strategy=strategy,
        options={"start": "hypernetwork"} if strategy == "pfedhn" else {},
        clients=CLIENTS,
        cohort=CLIENTS,
        rounds=rounds,
        eval_every=rounds,
        seed=seed,
        checkpoint_every=0,
        model="mlp",
        local=LocalConfig(learning_rate=0.05, schedule="constant"),
        data=DataConfig(split="iid", max_train=EXAMPLES),
        privacy=PrivacyConfig(where=PLACES[strategy], noise=noise, delta=DELTA) if noise else PrivacyConfig(),
    )
    kept = Keep()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Session(config, inline_grid(config, folder), "benchmark", [kept]).run()
        workers = [client_for(client_settings(config, index, folder)) for index in range(CLIENTS)]
        after = attack(kept.strategy, kept.weights(), workers)
        return attack(kept.strategy, kept.untrained, workers), after


def measure(strategy: str, noise: float | None, seed: int) -> Line:
    """Run once; returns the attacks."""
    torch.set_num_threads(1)
    before, after = play(strategy, noise, ROUNDS, seed)
    return {"untrained": asdict(before), "trained": asdict(after)}


def table(lines: Sequence[Line]) -> str:
    """Return what there is as Markdown, means over seeds."""
    heads = ["strategy", "noise", "epsilon", "AUC", "advantage", "accuracy on members", "on others"]
    rows = [table_row(heads), table_row(["---"] * len(heads))]
    for strategy, noises in NOISES.items():
        for noise in noises:
            some = [line for line in lines if (line["strategy"], line["noise"]) == (strategy, noise)]
            if some and noise is None:
                rows.append(_row([strategy, "untrained", "0"], [line["untrained"] for line in some]))
            if some:
                epsilon = f"{epsilon_of([noise] * ROUNDS, DELTA):.3g}" if noise else "inf"
                label = f"{noise:g}, {PLACES[strategy]}" if noise else "none"
                rows.append(_row([strategy, label, epsilon], [line["trained"] for line in some]))
    return "\n".join(rows) + "\n"


def _row(heads: Sequence[str], attacks: Sequence[Line]) -> str:
    auc, advantage, members, others = (statistics.fmean(each[key] for each in attacks) for key in attacks[0])
    return table_row([*heads, f"{auc:.3f}", f"{advantage:.3f}", f"{members:.1f}", f"{others:.1f}"])


STUDY = Study(
    "membership",
    [
        {"strategy": strategy, "noise": noise, "seed": seed}
        for strategy, noises in NOISES.items()
        for noise in noises
        for seed in range(3)
    ],
    measure,
    {"table": table},
)

TABLES = STUDY.pages

if __name__ == "__main__":
    STUDY.main(__doc__)
