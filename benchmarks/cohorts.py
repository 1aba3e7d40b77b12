"""What a cohort costs: accuracy per client step for the cohort rules of pFedHN.

One process, no network; the server's learner and the clients' training are the shipped ones. The paper's split and
rates, 50 local steps a client step. Prints a Markdown row per 100 client steps' worth of evaluation: pooled test
accuracy in percent, as the authors' code reports it.

    python -m benchmarks.cohorts --data cifar10 --root DIR --rule proximal --cohort 10
    python -m benchmarks.cohorts --data mnist --root DIR --rule mean --cohort 10 --every 200
"""

import argparse
import time
from pathlib import Path
from typing import get_args

import torch

from hyperbloom.client.training import FlatPart, evaluate, train
from hyperbloom.common.data import ClientData, DataSpec, load_client_data
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import TrainOrder
from hyperbloom.common.models import ModelSpec, build, full_layout
from hyperbloom.common.seeds import derive
from hyperbloom.strategies.hypernetworks import EmbeddingTable, MLPHypernetwork
from hyperbloom.strategies.hypernetworks.learner import HypernetworkLearner, Reply, UpdateRule


class Study:
    """Virtual clients around one learner, all of them in turn in one network."""

    def __init__(self, clients: list[ClientData], model: str, seed: int) -> None:
        self.clients, self.seed = clients, seed
        spec = ModelSpec.choose(model, "M", clients[0].input_shape, clients[0].num_classes)
        layout = full_layout(spec)
        self.module = build(spec)
        self.shared, self.personal = FlatPart(self.module, layout), FlatPart(self.module, Layout(()))
        torch.manual_seed(derive(seed, "hypernetwork"))
        dim = int(1 + len(clients) / 4)
        self.learner = HypernetworkLearner(MLPHypernetwork({"M": layout}, dim), EmbeddingTable(dim, seed))
        for index in range(len(clients)):
            self.learner.grow(f"client-{index}")

    def round(self, number: int, cohort: int, rule: UpdateRule) -> None:
        """Draw a cohort, train its members, learn from what they bring."""
        generator = torch.Generator().manual_seed(derive(self.seed, "cohort", number))
        rows = sorted(torch.randperm(len(self.clients), generator=generator)[:cohort].tolist())
        replies = []
        for row, sent in zip(rows, self.learner.generate(rows, "M"), strict=True):
            self.shared.load(sent)
            order = TrainOrder(
                run_id="",
                round=number,
                model="",
                num_classes=0,
                private="none",
                reply="delta",
                seed=derive(self.seed, f"client-{row}", number),
                steps=50,
                batch_size=64,
                learning_rate=5e-3,
                momentum=0.9,
                weight_decay=5e-5,
                clip=50.0,
                weights=None,
            )
            train(self.module, self.shared, self.personal, self.clients[row].train, order)
            replies.append(Reply(row, "M", sent.clone(), self.shared.values - sent))
        self.learner.update(replies, rule)

    def accuracy(self) -> float:
        """Return pooled test accuracy in percent."""
        correct = total = 0
        for weights, client in zip(self.learner.generate(range(len(self.clients)), "M"), self.clients, strict=True):
            self.shared.load(weights)
            score = evaluate(self.module, client.test)
            correct, total = correct + score.correct, total + score.total
        return 100 * correct / total


def main() -> None:
    """Print one Markdown row: rule, cohort, accuracy after so many client steps, rounds, seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--rule", choices=get_args(UpdateRule), default="proximal")
    parser.add_argument("--steps", type=int, default=600, help="client steps in all")
    parser.add_argument("--every", type=int, default=100, help="client steps between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    specs = [
        DataSpec(args.data, args.root, partition=index, partitions=args.clients, seed=args.seed)
        for index in range(args.clients)
    ]
    study = Study([load_client_data(spec) for spec in specs], "mlp" if args.data == "mnist" else "auto", args.seed)
    start, cells = time.perf_counter(), []
    for number in range(1, args.steps // args.cohort + 1):
        study.round(number, args.cohort, args.rule)
        if number * args.cohort % args.every == 0:
            cells.append(f"{study.accuracy():.1f}")
    seconds = time.perf_counter() - start
    print(f"| {args.data} | {args.rule} | {args.cohort} | {' / '.join(cells)} | {number} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
