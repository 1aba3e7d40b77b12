"""HAFL-GHN on CIFAR-10: the paper's tables at a size that a laptop's core can train.

Narrow versions of the paper's architectures: 8 channels in the first stage where the paper has 64 (size S), on images
averaged down to 16 x 16 pixels, 8,000 training images in all where the paper has 50,000, and `EPOCHS` passes over each
client's where the paper has 500: with all images and as many steps no method comes far enough to be compared. Every
method has the same architectures, data, passes, batches, momentum, weight decay and cosine schedule; the learning rate
is the best of `RATES` on the validation examples, tried with seed 0 (`--rates`). Accuracy is the mean over clients of
the test accuracy, in percent.

    tables 1 and 2   4 or 8 clients with 25 or 12.5 % of the data each, evenly over hafl-0 to hafl-3
    long             the 8 clients once more, with 100 passes
    ablation         plain CNNs of 4, 7, 10 and 13 layers with 25 % each: is the graph of use?
    unseen           three of the four architectures train, then the fourth joins: the weights that it is given on
                     demand (round 0), and what refining them on its own data adds, against training from scratch
    choices          4 clients as in table 1, with what the paper leaves open decided otherwise

Each cell is an ordinary run of `flower-server --engine inline` in a process of its own. Its result is a line in a file;
cells that have one are not run again, so that the study can be stopped and gone on with.

    python -m figures.architectures --root DIR --rates
    python -m figures.architectures --root DIR [--only tables|long|ablation|unseen|choices] [--seeds 3] [--jobs 1]
    python -m figures.architectures --figure docs/ghn.png
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import ttest_1samp

import figures.hafl_distillation
import figures.networks  # noqa: F401 - both register what they have
from figures.pages import read
from hyperbloom.client.app import app
from hyperbloom.client.settings import ClientSettings
from hyperbloom.common.config import LocalConfig, RunConfig
from hyperbloom.common.data import ClientData, DataSpec, Examples, data_source, load_client_data
from hyperbloom.server.grids.inline import InlineGrid
from hyperbloom.server.loop.session import Session
from hyperbloom.server.runs.folder import RunFolder

RESULTS = Path(__file__).with_name("ghn.jsonl")
HAFL = tuple(f"hafl-{number}" for number in range(4))
PLAIN = tuple(f"plain-{layers}" for layers in (4, 7, 10, 13))
DATA = "figures.architectures:small_cifar10"
TRAIN = 8_000  # images that the clients share
EPOCHS, BATCH = 20, 64
FEWER = 0.4  # for the teacher and again to distil, of all passes: 200 and 200 of 500 in the paper
LONG = 60  # passes of the ablation: shared decoders learn slowly at first
LONG_TABLE = 100  # passes of the table's 8 clients once more
RATES = {"upper bound": (0.02, 0.05), "HAFL-GHN": (0.05, 0.1, 0.2), "no graph": (0.05, 0.1, 0.2), "local": (0.02, 0.05)}
LEVELS = (30, 35)  # percent; the newcomers come to some 40
# All inner layers of a plain CNN share a decoder, which takes a step for each of them.
PLAIN_RATES = {"HAFL-GHN": (0.01, 0.02, 0.05), "no graph": (0.01, 0.02, 0.05), "local": (0.02, 0.05)}

METHODS: dict[str, tuple[str, dict[str, Any], str]] = {
    # name: strategy, its options, the federation's own model; the paper's table first
    "upper bound": ("fedavg", {}, "hafl-0"),
    "HAFL-GHN": ("ghn", {}, "auto"),
    "no graph": ("ghn", {"mode": "no-graph"}, "auto"),
    "distillation": ("hafl-distillation", {}, "hafl-0"),
    "distillation, fewer passes": ("hafl-distillation", {}, "hafl-0"),
    "local": ("local", {}, "auto"),
    "ghn-server": ("ghn-server", {}, "auto"),
    "tile 8": ("ghn", {"tile": 8}, "auto"),
    "by place": ("ghn", {"mode": "linear", "latent": 16}, "auto"),  # layers apart without the graph
}
TABLE = tuple(METHODS)[:6]
EIGHT = tuple(range(8))
SAME_RATE = {  # what is trained in the same way
    "distillation": "upper bound",
    "distillation, fewer passes": "upper bound",
    "ghn-server": "local",
    "tile 8": "HAFL-GHN",
    "by place": "HAFL-GHN",
}


def small_cifar10() -> ClientData:
    """Return CIFAR-10 from `$HYPERBLOOM_DATA`: `TRAIN` images for training, every pixel the mean of four."""
    data = load_client_data(DataSpec("cifar10", split="iid", partition=0, max_train=TRAIN))
    train, val, test = (
        Examples(F.avg_pool2d(part.inputs, 2), part.labels) for part in (data.train, data.val, data.test)
    )
    return ClientData(train, val, test, data.num_classes, data.class_names)


@dataclass(frozen=True)
class Cell:
    """One run: the data in as many parts as `clients`, of which `members` take part; architectures are dealt in turn.

    With `unseen` the other clients train first, and the members start from what these have learned.
    """

    experiment: str
    method: str
    seed: int
    rate: float
    architectures: tuple[str, ...] = HAFL
    clients: int = 4
    members: tuple[int, ...] = (0, 1, 2, 3)
    epochs: int = EPOCHS
    curve: bool = False  # evaluate after each pass, not only at the end
    unseen: bool = False

    def config(self, start: Path | None) -> RunConfig:
        """Return the run's description."""
        strategy, options, model = METHODS[self.method]
        if strategy == "hafl-distillation":  # as many passes to distil as for the teacher
            options = {"epochs": self.epochs}
        return RunConfig(
            gains=False,
            strategy=strategy,
            options=options,
            model=model,
            sizes=("S",),
            clients=len(self.members),
            cohort=len(self.members),
            rounds=self.epochs,
            eval_every=1 if self.curve else self.epochs,
            seed=self.seed,
            local=LocalConfig(
                steps=TRAIN // self.clients // BATCH,
                batch_size=BATCH,
                learning_rate=self.rate,
                weight_decay=5e-4,
                schedule="cosine",
            ),
            init_from=str(start) if start else None,
        )

    def settings(self, index: int, folder: Path) -> ClientSettings:
        """Return the settings of the client that owns part `index` of the data."""
        strategy, _, _ = METHODS[self.method]
        return ClientSettings(
            client_id=f"client-{index}",
            data=DataSpec(DATA, split="iid", partition=index, partitions=self.clients, seed=self.seed),
            size="S",
            state_dir=folder / "clients" / f"client-{index}",
            model=None if strategy == "fedavg" else self.architectures[index % len(self.architectures)],
            disclose="graph" if strategy == "ghn-server" else "types",
        )

    def matches(self, line: dict[str, Any]) -> bool:
        """Tell whether a line of results is this cell's."""
        return all(line[name] == getattr(self, name) for name in ("experiment", "method", "seed", "rate", "epochs"))


def play(cell: Cell) -> dict[str, Any]:
    """Run a cell in this process and return its line of results."""
    torch.set_num_threads(1)
    source = data_source(cell.settings(0, Path()).data)  # held, so that it is read once
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder, start = Path(name) / "run", None
        if cell.unseen:
            start = Path(name) / "others"
            others = tuple(index for index in range(cell.clients) if index not in cell.members)
            run(replace(cell, members=others, curve=False), start, None)
        run(cell, folder, start)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        (selected,) = json.loads((folder / "summary.json").read_text()).values()
    del source
    return {
        **{name: getattr(cell, name) for name in ("experiment", "method", "seed", "rate", "epochs")},
        "validation": round(selected["metrics"]["val_mean"], 2),
        "test": {name: round(value, 2) for name, value in selected["test_accuracy"].items()},
        "curve": [[line["round"], round(line["test_mean"], 2)] for line in lines if "test_mean" in line],
        "seconds": round(time.perf_counter() - begin, 1),
    }


def run(cell: Cell, folder: Path, start: Path | None) -> None:
    """Run the federation of a cell into a run folder."""
    folder.mkdir()
    config = cell.config(start)
    grid = InlineGrid(app, [cell.settings(index, folder).to_node_config() for index in cell.members])
    Session(config, grid, folder.name, [RunFolder(folder, config, folder.name)]).run()


def study(cells: Sequence[Cell], results: Path, jobs: int) -> None:
    """Run the cells that have no line yet, each in a process of its own."""
    done = read(results)
    left = [cell for cell in cells if not any(cell.matches(line) for line in done)]
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        for number, future in enumerate(as_completed([pool.submit(play, cell) for cell in left]), start=1):
            line = future.result()
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            what = f"{line['experiment']}, {line['method']}, seed {line['seed']}, rate {line['rate']}"
            print(f"{number}/{len(left)} {what}: {mean(line):.1f} % in {line['seconds']:.0f} s", flush=True)


def mean(line: dict[str, Any]) -> float:
    """Return the mean test accuracy over clients."""
    return statistics.fmean(line["test"].values())


def trials() -> Iterator[Cell]:
    """Yield what decides the learning rates: five passes with the first seed."""
    for name, architectures, rates in (("rates", HAFL, RATES), ("rates, plain CNNs", PLAIN, PLAIN_RATES)):
        for method in rates:
            yield from (Cell(name, method, 0, rate, architectures, epochs=5) for rate in rates[method])


def best_rates(results: Path, experiment: str) -> dict[str, float]:
    """Return the rate with the best accuracy on validation examples, by method."""
    tried: dict[str, dict[float, float]] = {}
    for line in read(results):
        if line["experiment"] == experiment:
            tried.setdefault(line["method"], {})[line["rate"]] = line["validation"]
    rates = {method: max(scores, key=lambda rate: scores[rate]) for method, scores in tried.items()}
    return rates | {method: rates[other] for method, other in SAME_RATE.items() if other in rates}


def cells(rates: dict[str, float], plain: dict[str, float], only: str | None, seeds: int) -> Iterator[Cell]:
    """Yield the study seed by seed, so that one that is stopped has all methods."""
    for seed in range(seeds):
        if only in (None, "tables"):
            yield from (Cell("4 clients", m, seed, rates[m], epochs=passes(m, EPOCHS)) for m in TABLE)
            yield from (Cell("8 clients", m, seed, rates[m], HAFL, 8, EIGHT, passes(m, EPOCHS)) for m in TABLE)
        if only in (None, "long"):
            name = f"8 clients, {LONG_TABLE} passes"
            for m in ("HAFL-GHN", "distillation, fewer passes", "upper bound", "local", "no graph"):
                yield Cell(name, m, seed, rates[m], HAFL, 8, EIGHT, passes(m, LONG_TABLE))
        if only in (None, "ablation"):
            for epochs, name in ((EPOCHS, "plain CNNs"), (LONG, f"plain CNNs, {LONG} passes")):
                for method in ("HAFL-GHN", "no graph", "local", "by place"):
                    yield Cell(name, method, seed, plain[method], PLAIN, epochs=epochs)
        if only in (None, "unseen"):
            for index, name in enumerate(HAFL):
                for method, unseen in (("HAFL-GHN", True), ("local", False)):
                    rate = rates[method]
                    yield Cell(name, method, seed, rate, members=(index,), curve=True, unseen=unseen)
        if only in (None, "choices"):
            yield from (Cell("4 clients", m, seed, rates[m]) for m in METHODS if m not in TABLE and m != "by place")


def passes(method: str, epochs: int) -> int:
    """Return how many passes a method gets where the others get `epochs`."""
    return round(FEWER * epochs) if method.endswith("fewer passes") else epochs


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return results as Markdown: mean over seeds, standard deviation between them, each architecture."""
    rows = ["| experiment | method | rate | seeds | mean | deviation | by architecture |", "|" + "---|" * 7]
    for experiment in sorted({line["experiment"] for line in lines}):
        for method in METHODS:
            chosen = [line for line in lines if (line["experiment"], line["method"]) == (experiment, method)]
            if not chosen or experiment.startswith("rates"):
                continue
            means = [mean(line) for line in chosen]
            deviation = f"{statistics.stdev(means):.1f}" if len(means) > 1 else ""
            each = " / ".join(f"{statistics.fmean(scores):.1f}" for scores in by_architecture(chosen))
            rows.append(
                f"| {experiment} | {method} | {chosen[0]['rate']} | {len(chosen)} | {statistics.fmean(means):.1f} | "
                f"{deviation} | {each} |"
            )
    return "\n".join(rows)


def paired(lines: Sequence[dict[str, Any]]) -> str:
    """Return as Markdown what the graph adds: the paired differences over seeds, with Student's interval and p."""
    rows = ["| experiment | seeds | graph over no graph | p |", "|" + "---|" * 4]
    for experiment in dict.fromkeys(line["experiment"] for line in lines):
        means: dict[str, dict[int, float]] = {"HAFL-GHN": {}, "no graph": {}}
        for line in lines:
            if line["experiment"] == experiment and line["method"] in means:
                means[line["method"]][line["seed"]] = mean(line)
        seeds = sorted(set.intersection(*map(set, means.values())))
        if len(seeds) > 1 and not experiment.startswith("rates"):
            test = ttest_1samp([means["HAFL-GHN"][seed] - means["no graph"][seed] for seed in seeds], 0)
            low, high = test.confidence_interval()
            gap = (low + high) / 2
            rows.append(f"| {experiment} | {len(seeds)} | {gap:+.1f} ({low:+.1f} to {high:+.1f}) | {test.pvalue:.3f} |")
    return "\n".join(rows)


def by_architecture(lines: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Return the test accuracies of all seeds and clients for each of the four architectures, in order."""
    groups: dict[int, list[float]] = {}
    for line in lines:
        for name, accuracy in line["test"].items():
            groups.setdefault(int(name.removeprefix("client-")) % 4, []).append(accuracy)
    return [groups[index] for index in sorted(groups)]


def passes_table(lines: Sequence[dict[str, Any]]) -> str:
    """Return as Markdown after how many passes the architecture that never trained has so many percent."""
    rows = ["| unseen | accuracy | weights on demand | from scratch |", "|" + "---|" * 4]
    for name in HAFL:
        curves = [curve(lines, name, method) for method in ("HAFL-GHN", "local")]
        for level in LEVELS if all(curves) else ():
            first = [next((str(number) for number, score in each if score >= level), "never") for each in curves]
            rows.append(f"| {name} | {level} % | {first[0]} | {first[1]} |")
    return "\n".join(rows)


def curve(lines: Sequence[dict[str, Any]], experiment: str, method: str) -> list[tuple[int, float]]:
    """Return passes and mean test accuracy over seeds of a cell with a curve; nothing if it was not run."""
    curves = [line["curve"] for line in lines if (line["experiment"], line["method"]) == (experiment, method)]
    points = zip(*curves, strict=True)
    return [(same[0][0], statistics.fmean(score for _, score in same)) for same in points]


def figure(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the accuracy of the architecture that never trained over passes, given its weights and from scratch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(1, 4, figsize=(15, 4), sharey=True, constrained_layout=True)
    for axis, name in zip(axes, HAFL, strict=True):
        for method, label in (("HAFL-GHN", "weights on demand, then refined"), ("local", "from scratch")):
            points = curve(lines, name, method)
            if points:
                seeds = sum((line["experiment"], line["method"]) == (name, method) for line in lines)
                axis.plot(
                    *zip(*points, strict=True), marker=".", label=f"{label} ({seeds} seed{'' if seeds == 1 else 's'})"
                )
        axis.set_title(f"{name}, unseen")
        axis.set_xlabel("passes over the newcomer's data")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy, percent")
    axes[0].legend(fontsize=8)
    canvas.savefig(path, dpi=110)


def main() -> None:
    """Run what has no result yet, or show what has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder with CIFAR-10 (default: $HYPERBLOOM_DATA)")
    parser.add_argument("--rates", action="store_true", help="try the learning rates; comes first")
    parser.add_argument(
        "--only", choices=["tables", "long", "ablation", "unseen", "choices"], help="a part of the study"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="cells that run at a time, one thread each")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of results")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="print the tables and draw the curves; runs nothing")
    args = parser.parse_args()
    if args.root:
        os.environ["HYPERBLOOM_DATA"] = str(args.root.resolve())
    if args.figure:
        print(*(make(read(args.results)) for make in (table, paired, passes_table)), sep="\n\n")
        figure(read(args.results), args.figure)
        return
    rates, plain = (best_rates(args.results, name) for name in ("rates", "rates, plain CNNs"))
    if not args.rates and (len(rates) < len(METHODS) or len(plain) < len(PLAIN_RATES)):
        parser.error("run with --rates first: it finds each method's learning rate")
    study(list(trials() if args.rates else cells(rates, plain, args.only, args.seeds)), args.results, args.jobs)


def of_newcomers(new: bool) -> list[dict[str, Any]]:
    """Return the committed results of architectures that nobody trained, or all others."""
    return [line for line in read(RESULTS) if (line["experiment"] in HAFL) == new]


TABLES = {
    "runs": lambda: table(of_newcomers(False)),
    "graph": lambda: paired(of_newcomers(False)),
    "passes": lambda: passes_table(of_newcomers(True)),
    "unseen": lambda: table(of_newcomers(True)),
}

if __name__ == "__main__":
    main()
