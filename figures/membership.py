"""How well an attacker tells from a model which examples it was trained on, with and without differential privacy.

The attack is the loss threshold of Yeom, Giacomelli, Fredrikson, Jha: Privacy Risk in Machine Learning, CSF 2018,
https://arxiv.org/abs/1709.01604: examples with a small loss are called members. The attacker has the weights that the
server generates for a client (pfedhn) or that all share (fedavg) after the last round, the client's training examples
as members, and its test examples, which nothing was trained on, as others.

* AUC: how often a member has a smaller loss than another example; 0.5 is a guess.
* advantage: the largest difference of true and false positives over all thresholds; 0 is a guess. Chosen on the same
  examples, so that a guess has some advantage, too: `untrained` shows how much, on the weights before the first round.

A mean over clients and seeds. Eight virtual clients with few of the digits each, all asked in each round.

    python -m figures.membership [--seeds 3] [--rounds 40] [--examples 40]
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor
from torch.func import functional_call

from hyperbloom.client.work.client import Client, client_for
from hyperbloom.common.config import DataConfig, LocalConfig, PrivacyConfig, RunConfig
from hyperbloom.common.data import Examples
from hyperbloom.common.models import build
from hyperbloom.common.secrecy.noise import epsilon_of
from hyperbloom.server.grids.engine import client_settings, inline_grid
from hyperbloom.server.loop.listener import Listener
from hyperbloom.server.loop.session import Session
from hyperbloom.strategies.algorithm import Algorithm

CLIENTS = 8
CASES = (
    ("pfedhn", None),
    ("pfedhn", PrivacyConfig(where="client", noise=1e-6)),
    ("pfedhn", PrivacyConfig(where="client", noise=0.03)),
    ("pfedhn", PrivacyConfig(where="client", noise=0.3)),
    ("pfedhn", PrivacyConfig(where="client", noise=3.0)),
    ("fedavg", None),
    ("fedavg", PrivacyConfig(where="server", noise=1e-6)),
    ("fedavg", PrivacyConfig(where="server", noise=0.3)),
    ("fedavg", PrivacyConfig(where="server", noise=3.0)),
    ("fedavg", PrivacyConfig(where="server", noise=20.0)),
)


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


def play(strategy: str, privacy: PrivacyConfig | None, rounds: int, examples: int, seed: int) -> tuple[Attack, Attack]:
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
        data=DataConfig(split="iid", max_train=examples),
        privacy=privacy or PrivacyConfig(),
    )
    kept = Keep()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Session(config, inline_grid(config, folder), "benchmark", [kept]).run()
        workers = [client_for(client_settings(config, index, folder)) for index in range(CLIENTS)]
        after = attack(kept.strategy, kept.weights(), workers)
        return attack(kept.strategy, kept.untrained, workers), after


def run(rounds: int, examples: int, seeds: int) -> dict[str, list[Attack]]:
    """Play all cases and print a row for each; returns the attacks of each seed."""
    found: dict[str, list[Attack]] = {}
    print("| strategy | noise | epsilon | AUC | advantage | accuracy on members | on others |\n|" + "---|" * 7)
    for strategy, privacy in CASES:
        pairs = [play(strategy, privacy, rounds, examples, seed) for seed in range(seeds)]
        if privacy is None:
            _print(f"{strategy} | untrained | 0", [before for before, _ in pairs])
        epsilon = epsilon_of([privacy.noise] * rounds, privacy.delta) if privacy else float("inf")
        noise = f"{privacy.noise:g}, {privacy.where}" if privacy else "none"
        label = f"{strategy} | {noise} | {epsilon:.3g}"
        found[label] = [after for _, after in pairs]
        _print(label, found[label])
    return found


def _print(label: str, attacks: Sequence[Attack]) -> None:
    means = [statistics.fmean(column) for column in zip(*(vars(each).values() for each in attacks), strict=True)]
    print(f"| {label} | {means[0]:.3f} | {means[1]:.3f} | {means[2]:.1f} | {means[3]:.1f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--examples", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run(args.rounds, args.examples, args.seeds)
