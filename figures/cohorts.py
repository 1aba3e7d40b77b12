"""What a cohort costs: accuracy per client step, per round and per second for the cohort rules of pFedHN.

One process, one thread, no network; the server's learner and the clients' training are the shipped ones. The paper's
split and rates, 50 local steps a client step. Each call adds a line to a file of results; `--figure` draws them.
Accuracy is pooled over test examples, in percent, as the authors' code reports it. Seconds are those of a federation
whose clients train side by side: per round the slowest client's and the server's, no network.

    python -m figures.cohorts --data cifar10 --root DIR --rule proximal --cohort 10
    python -m figures.cohorts --data cifar10 --root DIR --cohort 1 --save early.safetensors
    python -m figures.cohorts --data cifar10 --root DIR --rule mean --cohort 10 --load early.safetensors --steps 200
    python -m figures.cohorts --data mnist --root DIR --cohort 10 --asynchronous corrected
    python -m figures.cohorts --figure docs/cohorts.png
"""

import argparse
import heapq
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.measure import sgd_of
from figures.pages import read, table_row
from hyperbloom.client.work.scoring import evaluate
from hyperbloom.client.work.sgd import FlatPart, Network, train
from hyperbloom.common.config import LocalConfig
from hyperbloom.common.data import ClientData, DataSpec, load_client_data
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import ModelSpec, build, full_layout
from hyperbloom.common.seeds import derive
from hyperbloom.strategies.hypernetworks import EmbeddingTable, MLPHypernetwork
from hyperbloom.strategies.hypernetworks.learner import HypernetworkLearner, Reply, UpdateRule
from hyperbloom.strategies.pfedhn import OVERLAP

RESULTS = Path(__file__).with_name("cohorts.jsonl")
ORDER = (*get_args(UpdateRule), "asynchronous, corrected", "asynchronous, plain")


class Study:
    """Virtual clients around one learner, all of them in turn in one network."""

    def __init__(self, clients: list[ClientData], model: str, seed: int) -> None:
        self.clients, self.seed = clients, seed
        spec = ModelSpec(model, "M", clients[0].input_shape, clients[0].num_classes).resolved()
        layout = full_layout(spec)
        self.module = build(spec)
        self.shared = FlatPart(self.module, layout)
        self.network = Network(self.module, self.shared, FlatPart(self.module, Layout(())))
        torch.manual_seed(derive(seed, "hypernetwork"))
        dim = int(1 + len(clients) / 4)
        self.learner = HypernetworkLearner(MLPHypernetwork({"M": layout}, dim), EmbeddingTable(dim, seed))
        for index in range(len(clients)):
            self.learner.grow(f"client-{index}")

    def round(self, number: int, cohort: int, rule: UpdateRule) -> float:
        """Draw a cohort, train its members, learn from what they bring; return seconds if they trained side by side."""
        start = time.perf_counter()
        generator = torch.Generator().manual_seed(derive(self.seed, "cohort", number))
        rows = sorted(torch.randperm(len(self.clients), generator=generator)[:cohort].tolist())
        weights = self.learner.generate(rows, "M")
        server, slowest = time.perf_counter() - start, 0.0
        replies: list[Reply] = []
        for row, sent in zip(rows, weights, strict=True):
            start = time.perf_counter()
            replies.append(self.train(row, number, sent))
            slowest = max(slowest, time.perf_counter() - start)
        start = time.perf_counter()
        self.learner.update(replies, rule)
        return server + slowest + time.perf_counter() - start

    def train(self, row: int, number: int, sent: Tensor) -> Reply:
        """Let a client train from `sent` `(P,)`."""
        self.shared.load(sent)
        seed = derive(self.seed, f"client-{row}", number)
        train(self.network, self.clients[row].train, sgd_of(LocalConfig(learning_rate=0.005)), seed)
        return Reply(row, "M", self.shared.values - sent)

    def asynchronous(self, places: int, corrected: bool) -> Iterator[float]:
        """Train `places` clients at any time, the first of all ten times slower; yield the time of each reply.

        Time is counted in trainings of an ordinary client, which take one, give or take a tenth.
        """
        chance, now = random.Random(self.seed), 0.0
        busy: set[int] = set()
        flying: list[tuple[float, int, int, int, Tensor]] = []  # due, number of the order, row, applied then, weights
        recent: deque[Reply] = deque(maxlen=OVERLAP)
        for applied in count():
            while len(busy) < places:
                row = chance.choice([row for row in range(len(self.clients)) if row not in busy])
                busy.add(row)
                due = now + (10 if row == 0 else 1) * chance.uniform(0.9, 1.1)
                sent = self.learner.generate([row], "M")[0]
                heapq.heappush(flying, (due, 1000 * applied + len(busy), row, applied, sent))
            now, order, row, then, sent = heapq.heappop(flying)
            busy.remove(row)
            reply = self.train(row, order, sent)
            overlap = list(recent)[max(0, len(recent) - (applied - then)) :] if corrected else []
            self.learner.update_asynchronously(reply, overlap)
            recent.append(reply)
            yield now

    def accuracy(self) -> float:
        """Return pooled test accuracy in percent."""
        correct, total = 0.0, 0
        for weights, client in zip(self.learner.generate(range(len(self.clients)), "M"), self.clients, strict=True):
            self.shared.load(weights)
            score = evaluate(self.module, client.test)
            correct, total = correct + score.total * (score.value("accuracy") or 0.0), total + score.total
        return 100 * correct / total


def prepare(args: argparse.Namespace) -> Study:
    """Load the clients' data and make the server."""
    torch.set_num_threads(1)
    specs = [
        DataSpec(args.data, args.root, partition=index, partitions=args.clients, seed=args.seed)
        for index in range(args.clients)
    ]
    clients = [load_client_data(spec) for spec in specs]
    clients = [replace(c, train=c.train.to("cpu"), test=c.test.to("cpu")) for c in clients]
    return Study(clients, "mlp" if args.data == "mnist" else "auto", args.seed)


def study(args: argparse.Namespace) -> dict[str, Any]:
    """Run one rule and return its curve: `client_steps`, `seconds` and `accuracy` are lists of equal length."""
    made = prepare(args)
    if args.load:
        made.learner.load(load_file(args.load))
    seconds, curve = 0.0, {"client_steps": [0.0], "seconds": [0.0], "accuracy": [made.accuracy()]}
    if args.asynchronous:
        for number, now in enumerate(made.asynchronous(args.cohort, args.asynchronous == "corrected"), start=1):
            if number % args.every == 0:
                for key, value in zip(curve, (number, now, made.accuracy()), strict=True):
                    curve[key].append(round(value, 2))
            if number == args.steps:
                break
    for number in range(1, 0 if args.asynchronous else args.steps // args.cohort + 1):
        # Rounds after a loaded state draw other cohorts and batches than the rounds that led to it.
        seconds += made.round(number + (100_000 if args.load else 0), args.cohort, args.rule)
        if number * args.cohort % args.every == 0:
            for key, value in zip(curve, (number * args.cohort, seconds, made.accuracy()), strict=True):
                curve[key].append(round(value, 2))
    if args.save:
        save_file(made.learner.state(), args.save)
    args.rule = f"asynchronous, {args.asynchronous}" if args.asynchronous else args.rule
    words = ("data", "clients", "rule", "cohort", "seed")
    return {key: getattr(args, key) for key in words} | {"late": bool(args.load)} | curve


def retime(args: argparse.Namespace) -> None:
    """Write the seconds of curves anew, rounds times what a round takes now: they may be a busy machine's."""
    results = read(args.results)
    timed = [result for result in results if result["data"] == args.data and result["rule"] in get_args(UpdateRule)]
    made, each = prepare(args), {}
    for cohort, rule in sorted({(result["cohort"], result["rule"]) for result in timed}):
        each[cohort, rule] = statistics.median(made.round(n, cohort, rule) for n in range(max(1, 10 // cohort)))
        print(f"{rule}, C = {cohort}: {each[cohort, rule]:.3f} s a round", flush=True)
    for result in timed:
        seconds = each[result["cohort"], result["rule"]] / result["cohort"]
        result["seconds"] = [round(steps * seconds, 2) for steps in result["client_steps"]]
    args.results.write_text("".join(json.dumps(result) + "\n" for result in results))


def table(results: list[dict[str, Any]], data: str, late: bool) -> str:
    """Return results as Markdown: rule, cohort, accuracy after so many client steps, rounds, seconds side by side.

    The asynchronous ones have no rounds, and their seconds are trainings.
    """
    shown = sorted(
        (x for x in results if (x["data"], x["late"]) == (data, late)),
        key=lambda x: (ORDER.index(x["rule"]), x["cohort"]),
    )
    if not shown:
        return ""
    steps = " / ".join(str(number) for number in shown[0]["client_steps"][1:])
    rows = [table_row(["rule", "C", f"after {steps} client steps", "rounds", "seconds"]), "|---|---:|---|---:|---:|"]
    for result in shown:
        rule, cohort, timed = result["rule"], result["cohort"], result["rule"] in get_args(UpdateRule)
        cells = ["the paper's" if cohort == 1 else f"`{rule}`" if timed else rule, str(cohort)]
        cells.append(" / ".join(f"{value:.1f}" for value in result["accuracy"][1:]))
        rounds, seconds = result["client_steps"][-1] / cohort, result["seconds"][-1]
        rows.append(table_row([*cells, *((f"{rounds:.0f}", f"{seconds:.0f}") if timed else ("-", "-"))]))
    return "\n".join(rows)


def figure(results: list[dict[str, Any]], path: Path) -> None:
    """Draw accuracy over client steps, rounds and seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [result for result in results if not result["late"] and result["rule"] in get_args(UpdateRule)]
    shown.sort(key=lambda result: (result["rule"] == "mean", result["cohort"]))  # as in the page's table
    canvas, axes = pyplot.subplots(1, 3, figsize=(15, 4.6), sharey=True, constrained_layout=True)
    cohorts = sorted({result["cohort"] for result in shown})
    colours = dict(zip(cohorts, ("black", "tab:blue", "tab:green", "tab:red", "tab:purple"), strict=False))
    styles = {"proximal": "-", "mean": "--"}
    for result in shown:
        rounds = [steps / result["cohort"] for steps in result["client_steps"]]
        label = "the paper, C = 1" if result["cohort"] == 1 else f"{result['rule']}, C = {result['cohort']}"
        for axis, x in zip(axes, (result["client_steps"], rounds, result["seconds"]), strict=True):
            style = styles[result["rule"]]
            axis.plot(x, result["accuracy"], style, color=colours[result["cohort"]], label=label, marker=".")
    for axis, label in zip(axes, ("client steps", "rounds", "seconds, clients side by side"), strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        if label != "client steps":
            axis.set_xscale("symlog", linthresh=1)
    axes[0].set_ylabel("pooled test accuracy, percent")
    axes[0].legend(fontsize=8)
    title = f"{shown[0]['data']}, {shown[0]['clients']} clients, pFedHN: what a cohort of C clients a round costs"
    canvas.suptitle(title)
    canvas.savefig(path, dpi=110)


def main() -> None:
    """Run one rule and keep its curve, or draw what is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--rule", choices=get_args(UpdateRule), default="proximal")
    parser.add_argument(
        "--asynchronous",
        choices=["corrected", "plain"],
        help="no rounds, one client ten times slower; plain: every reply is the paper's step; seconds are trainings",
    )
    parser.add_argument("--steps", type=int, default=600, help="client steps in all")
    parser.add_argument("--every", type=int, default=100, help="client steps between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="keep the server's state at the end")
    parser.add_argument("--load", type=Path, help="start from a state that --save kept: the late phase")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of results")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw the results instead of adding to them")
    parser.add_argument("--retime", action="store_true", help="write the seconds of all results of these data anew")
    args = parser.parse_args()
    if args.retime:
        retime(args)
        return
    if args.figure:
        results = read(args.results)
        figure([result for result in results if result["data"] == args.data], args.figure)
        return
    result = study(args)
    print(table([result], args.data, bool(args.load)), flush=True)
    with args.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


TABLES = {
    "early": lambda: table(read(RESULTS), "cifar10", False),
    "late": lambda: table(read(RESULTS), "cifar10", True),
    "mnist": lambda: table(read(RESULTS), "mnist", False),
}

if __name__ == "__main__":
    main()
