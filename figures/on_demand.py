"""What a trained run of ODPFL-HN does for novel clients: figures 4, 5 and 7 of the paper.

Nothing is trained here: runs as `figures.odpfl` and `flower-server --engine inline` leave them are read, and the
data they name. Each part adds its lines to a file of results in the place of its earlier ones for the same run, and
draws them.

    python -m figures.on_demand privacy RUN             # noise: accuracy against examples described
    python -m figures.on_demand shift RUN FEDAVG_RUN    # blurred and rotated images
    python -m figures.on_demand space RUN               # where the descriptors lie

`privacy` wants a run with `encoder=private`. A novel client describes |D| images, drawn from those on which nobody
trained and its accuracy is not measured, in the proportions of its own classes; noise is drawn anew for each model.
`shift` changes all images of novel clients, those described and those of the test alike, and nobody else's. *Within
reach* moves a descriptor towards the mean of the clients that trained, until it is as near as 95 % of these are.
`space` also says how well the classes of a client can be told from its descriptor.
"""

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import functional as images

from figures.pages import read, table_row
from hyperbloom.client.newcomer.guarantee import Promise, guarantee, privatise
from hyperbloom.client.work.scoring import evaluate
from hyperbloom.common.data import ClientData, Examples, data_source
from hyperbloom.common.encoders import Encoder, build_encoder, encode
from hyperbloom.common.models import build, full_layout
from hyperbloom.server.grids.engine import client_settings
from hyperbloom.server.newcomers.on_demand import ModelMaker
from hyperbloom.server.pages.embedding_map import flatten_by_tsne
from hyperbloom.server.runs.trained import Trained, read_trained
from hyperbloom.strategies.odpfl import ODPFL

RESULTS = Path(__file__).with_name("on-demand.jsonl")
SIZES = (50, 100, 200, 400, 800, 1600, 3200)
NOISES = (
    (0.1, "analytic"),
    (0.3, "analytic"),
    (1.0, "analytic"),
    (0.3, "classical"),
)
DELTA = 0.01
BLURS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
ANGLES = (0.0, 15.0, 30.0, 45.0, 60.0, 90.0)
PROBED = 0.1
"""Share of a client's examples from which on a class counts as one of its own."""


class Study:
    """A trained run with its clients' data, as they were dealt to it."""

    def __init__(self, run: Path, own_code: bool = False) -> None:
        self.trained: Trained = read_trained(run, lambda strategy: None, own_code)
        strategy, config = self.trained.strategy, self.trained.config
        spec = strategy.setting.spec
        specs = [client_settings(config, index, run).data for index in range(config.clients)]
        source = data_source(specs[0])
        self.clients: list[ClientData] = [source.client(spec.partition) for spec in specs]
        roster = {client.client_id: client for client in self.trained.roster}
        self.roster = [roster[f"client-{index}"] for index in range(config.clients)]
        self.novel = [index for index, client in enumerate(self.roster) if config.is_novel(client.row)]
        self.scaling, _ = self.trained.scaling
        self.module, self.layout = build(spec), full_layout(spec)
        self.size = spec.size

    @property
    def encoder(self) -> Encoder:
        """The encoder of the selected round."""
        strategy = self.trained.strategy
        if not isinstance(strategy, ODPFL):
            raise SystemExit(f"{self.trained.run}: expected a run of odpfl, found {strategy.config.strategy}")
        encoder = build_encoder(strategy.encoder.spec).eval()
        values = strategy.encoder.weights
        encoder.load_state_dict(values.layout.views(values.values))
        return encoder

    def write(self, descriptors: Tensor) -> Tensor:
        """Return weights `(n, P)` for descriptors `(n, k)`."""
        strategy = self.trained.strategy
        assert isinstance(strategy, ODPFL)
        return torch.cat([strategy.learner.write(some, self.size) for some in descriptors.split(32)])

    def within_reach(self, descriptors: Tensor) -> Tensor:
        """Return descriptors `(n, k)` moved into the ball around the training clients' mean that holds 95 % of them."""
        strategy = self.trained.strategy
        assert isinstance(strategy, ODPFL)
        known = strategy.descriptors_of_trained()
        mean, away = known.mean(0), descriptors - known.mean(0)
        reach = (known - mean).norm(dim=1).quantile(0.95)
        return mean + away * (reach / away.norm(dim=1, keepdim=True)).clamp_max(1.0)

    def shared(self) -> Tensor:
        """Return the weights `(P,)` of a run that has one model for all."""
        weights = self.trained.strategy.weights([self.roster[self.novel[0]]])
        assert weights is not None
        return weights[0].values

    def accuracy(self, weights: Tensor, test: Examples) -> float:
        """Return the accuracy of the network with `weights` `(P,)`, in percent."""
        for name, value in self.layout.views(weights).items():
            self.module.get_parameter(name).copy_(value)
        return 100 * evaluate(self.module, test).values[0]

    def line(self, figure: str, values: Sequence[float], **more: Any) -> dict[str, Any]:
        """Return a line of results: mean and its standard error over the novel clients, of each client's mean.

        Of one client there is no standard error.
        """
        config = self.trained.config
        return {
            "figure": figure,
            "run": self.trained.run.resolve().name,
            "data": config.data.name,
            "round": self.trained.selection.round,
            **more,
            "accuracy": round(statistics.fmean(values), 2),
            "sem": round(statistics.stdev(values) / len(values) ** 0.5, 2) if len(values) > 1 else None,
        }


# ---------------------------------------------------------------------- figure 5


class Unseen:
    """What nobody has trained on: validation and test examples of all, and the training examples of novel clients."""

    def __init__(self, study: Study) -> None:
        parts = [
            (index, examples)
            for index, client in enumerate(study.clients)
            for examples in (client.val, client.test, *([client.train] if index in study.novel else []))
        ]
        self.inputs = torch.cat([examples.inputs for _, examples in parts])
        self.labels = torch.cat([examples.labels for _, examples in parts])
        # Of which client an example is a test example, -1 for none.
        self.tests = torch.cat(
            [
                torch.full((len(examples),), index if examples is study.clients[index].test else -1)
                for index, examples in parts
            ]
        )

    def order(self, index: int, shares: Tensor, seed: int) -> Tensor | None:
        """Return rows in the proportions `shares` `(classes,)`, as many as there are; a beginning is a smaller set."""
        generator = torch.Generator().manual_seed(seed)
        rows, places = [], []
        for label, share in enumerate(shares.tolist()):
            if share > 0:
                found = torch.nonzero((self.labels == label) & (self.tests != index)).flatten()
                rows.append(found[torch.randperm(len(found), generator=generator)])
                places.append((torch.arange(len(found)) + 0.5) / share)  # evenly, at the class's own pace
        until = min(float(place[-1]) for place in places)  # where the first class runs out
        place = torch.cat(places)
        order = place.argsort()
        return torch.cat(rows)[order][place[order] <= until]


def privacy(study: Study, draws: int) -> list[dict[str, Any]]:
    """Accuracy of novel clients whose descriptors have noise, by the number of examples that they describe."""
    encoder, unseen = study.encoder, Unseen(study)
    shares = [study.clients[index].class_shares for index in study.novel]
    orders = [unseen.order(index, share, index) for index, share in zip(study.novel, shares, strict=True)]
    most = min(len(order) for order in orders)
    chance, results = random.Random(0), []
    for count in (size for size in SIZES if size <= most):
        described = torch.stack([encode(encoder, unseen.inputs[order[:count]]) for order in orders])
        open_ = scores(study, described[:, None])
        results.append(study.line("privacy", open_, examples=count, epsilon=None, mechanism=None, sigma=0.0))
        for epsilon, mechanism in NOISES:
            promised = guarantee(encoder, count, Promise(epsilon, DELTA))
            if mechanism == "classical":  # the paper's
                sigma = promised.sensitivity * math.sqrt(2 * math.log(1.25 / DELTA)) / epsilon
                promised = replace(promised, sigma=sigma)
            noisy = torch.stack(
                [torch.stack([privatise(one, promised, chance.randbytes) for _ in range(draws)]) for one in described]
            )
            more = {"examples": count, "epsilon": epsilon, "mechanism": mechanism, "sigma": round(promised.sigma, 3)}
            results.append(study.line("privacy", scores(study, noisy), **more, draws=draws))
        print(*map(json.dumps, results[-1 - len(NOISES) :]), sep="\n", flush=True)
    return results


def scores(study: Study, descriptors: Tensor) -> list[float]:
    """Return each novel client's mean accuracy over its descriptors `(novel clients, draws, k)`."""
    return [
        statistics.fmean(study.accuracy(weights, study.clients[index].test) for weights in study.write(some))
        for index, some in zip(study.novel, descriptors, strict=True)
    ]


# ---------------------------------------------------------------------- figure 4


def blurred(inputs: Tensor, sigma: float) -> Tensor:
    """Return images `(N, C, H, W)` convolved with a Gaussian of `sigma` pixels, cut off at three of these."""
    if not sigma:
        return inputs
    return images.gaussian_blur(inputs, [1 + 2 * min(round(3 * sigma), min(inputs.shape[2:]) - 1)] * 2, [sigma] * 2)


def rotated(inputs: Tensor, degrees: float, black: Sequence[float]) -> Tensor:
    """Return images `(N, C, H, W)` turned, with `black` in the corners."""
    if not degrees:
        return inputs
    return images.rotate(inputs, degrees, images.InterpolationMode.BILINEAR, fill=list(black))


def shift(study: Study, other: Study) -> list[dict[str, Any]]:
    """Accuracy of novel clients all of whose images are changed: on demand, and of one model for all."""
    keys = {"data", "clients", "seed", "novel"}
    ours, theirs = (each.trained.config.model_dump(include=keys) for each in (study, other))
    if ours != theirs:
        raise SystemExit("the two runs deal different data")
    encoder, shared, generator = study.encoder, other.shared(), ModelMaker(study.trained)
    scaling, channels = study.scaling, study.clients[0].input_shape[0]
    black = [(0.0 - mean) / std for mean, std in zip(scaling.mean or [0.0], scaling.std or [1.0], strict=True)]
    black = black * channels if len(black) == 1 else black
    clients = [study.clients[index] for index in study.novel]
    before = torch.stack([encode(encoder, client.train.inputs) for client in clients])
    kinds: list[tuple[str, Sequence[float], Callable[[Tensor, float], Tensor]]] = [
        ("blur", BLURS, blurred),
        ("rotation", ANGLES, partial(rotated, black=black)),
    ]
    results = []
    for kind, amounts, change in kinds:
        for amount in amounts:
            tests = [Examples(change(client.test.inputs, amount), client.test.labels) for client in clients]
            after = torch.stack([encode(encoder, change(client.train.inputs, amount)) for client in clients])
            moved = (after - before).norm(dim=1).mean() / (before - before.mean(0)).norm(dim=1).mean()
            for method, rows in (
                ("odpfl", study.write(after)),
                ("odpfl, described before", study.write(before)),
                ("odpfl, within reach", study.write(study.within_reach(after))),
                ("fedavg", shared.expand(len(clients), -1)),
            ):
                found = [study.accuracy(weights, test) for weights, test in zip(rows, tests, strict=True)]
                line = study.line("shift", found, kind=kind, amount=amount, method=method)
                if method == "odpfl":
                    told = statistics.fmean(generator.unlike(list(after)))
                    line |= {"moved": round(float(moved), 2), "unlike": round(100 * told)}
                results.append(line)
            print(*map(json.dumps, results[-4:]), sep="\n", flush=True)
    return results


# ---------------------------------------------------------------------- figure 7


@dataclass(frozen=True)
class Space:
    """Descriptors `(clients, k)` of all clients, and the shares of their classes `(clients, classes)`."""

    descriptors: Tensor
    shares: Tensor
    novel: Sequence[int]

    @classmethod
    def of(cls, study: Study) -> "Space":
        encoder = study.encoder
        descriptors = torch.stack([encode(encoder, client.train.inputs) for client in study.clients])
        return cls(descriptors, torch.stack([client.class_shares for client in study.clients]), study.novel)

    def neighbours(self) -> tuple[float, float]:
        """Return how often, in percent, a client's nearest has a class in common with it, and how often any other."""
        own = (self.shares >= PROBED).float()
        common = (own @ own.T) > 0
        distances = torch.cdist(self.descriptors, self.descriptors).fill_diagonal_(torch.inf)
        nearest = common[torch.arange(len(own)), distances.argmin(1)].float().mean()
        apart = ~torch.eye(len(own), dtype=torch.bool)
        return 100 * float(nearest), 100 * float(common[apart].float().mean())

    def probe(self, ridge: float = 1.0) -> float:
        """Return which part of the variance of novel clients' class shares a linear map from descriptors explains.

        The map is fitted to the clients that trained, by ridge regression; 1 is all of it, 0 as good as their mean.
        """
        novel = torch.zeros(len(self.shares), dtype=torch.bool)
        novel[list(self.novel)] = True
        mean, deviation = self.descriptors[~novel].mean(0), self.descriptors[~novel].std(0).clamp_min(1e-9)
        x = torch.cat([(self.descriptors - mean) / deviation, torch.ones(len(novel), 1)], 1).double()
        centre = self.shares[~novel].double().mean(0)
        y = self.shares.double() - centre
        penalty = ridge * torch.eye(x.shape[1], dtype=torch.float64)
        fitted = torch.linalg.solve(x[~novel].T @ x[~novel] + penalty, x[~novel].T @ y[~novel])
        return float(1 - (x[novel] @ fitted - y[novel]).square().sum() / y[novel].square().sum())


def space(study: Study) -> tuple[list[dict[str, Any]], Space]:
    """How much of the clients' classes their descriptors tell."""
    found = Space.of(study)
    nearest, any_ = found.neighbours()
    accuracies = scores(study, found.descriptors[study.novel][:, None])
    numbers = {"nearest_in_common": nearest, "any_in_common": any_, "explained": 100 * found.probe()}
    return [study.line("space", accuracies, **{key: round(value, 1) for key, value in numbers.items()})], found


# ---------------------------------------------------------------------- drawing


def draw_privacy(results: Sequence[Mapping[str, Any]], axes: Sequence[Any]) -> None:
    (axis,) = axes
    for epsilon, mechanism in ((None, None), *NOISES):
        chosen = [r for r in results if (r["epsilon"], r["mechanism"]) == (epsilon, mechanism)]
        label = "no noise" if epsilon is None else f"ε = {epsilon:g}, {mechanism}"
        _curve(axis, chosen, "examples", label)
    axis.set_xscale("log")
    axis.set_xlabel("images that a novel client describes, |D|")
    axis.legend(fontsize=8)


def draw_shift(results: Sequence[Mapping[str, Any]], axes: Sequence[Any]) -> None:
    for axis, kind, label in zip(axes, ("blur", "rotation"), ("sigma of the blur, pixels", "degrees"), strict=True):
        for method in dict.fromkeys(result["method"] for result in results):
            chosen = [r for r in results if (r["kind"], r["method"]) == (kind, method)]
            _curve(axis, chosen, "amount", method)
        axis.set_xlabel(label)
    axes[0].legend(fontsize=8)


def _curve(axis: Any, results: Sequence[Mapping[str, Any]], x: str, label: str) -> None:
    y, error = [result["accuracy"] for result in results], [result["sem"] or 0.0 for result in results]
    axis.errorbar([result[x] for result in results], y, error, marker=".", capsize=2, label=label)
    axis.set_ylabel("accuracy of novel clients, percent")
    axis.grid(alpha=0.3)


def draw_space(found: Space, axes: Sequence[Any]) -> None:
    """Draw each client as a disc, in the colours of its two most common classes; novel ones have a star around."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    (axis,) = axes
    flat = flatten_by_tsne(found.descriptors.double().numpy())
    if flat is None:
        raise SystemExit("too few clients, or too many, for a map")
    colours = colormaps["tab10" if found.shares.shape[1] <= 10 else "tab20"]
    for index, (point, shares) in enumerate(zip(flat, found.shares, strict=True)):
        first, second = shares.topk(2).indices.tolist()
        second = second if shares[second] >= PROBED else first
        halves = {"markerfacecolor": colours(first), "markerfacecoloralt": colours(second), "fillstyle": "left"}
        if index in found.novel:
            axis.plot(*point, marker="*", markersize=26, color="black", zorder=1)
        axis.plot(*point, marker="o", markersize=10, markeredgewidth=0.5, markeredgecolor="white", **halves, zorder=2)
    names = [Line2D([], [], marker="o", ls="", color=colours(c), label=str(c)) for c in range(found.shares.shape[1])]
    novel = Line2D([], [], marker="*", ls="", markersize=12, color="black", label="novel")
    axis.legend(handles=[*names, novel], fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), title="class")
    axis.set_xticks([])
    axis.set_yticks([])


def draw(path: Path, count: int, title: str, fill: Callable[[Sequence[Any]], None]) -> None:
    """Write a picture with `count` axes side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(1, count, figsize=(2.4 + 4.2 * count, 4.4), constrained_layout=True, squeeze=False)
    fill(list(axes[0]))
    canvas.suptitle(title, fontsize=10)
    canvas.savefig(path, dpi=110)
    pyplot.close(canvas)


def keep(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Add results to a file, in the place of those of the same figure and run."""
    lines = read(path)
    mine = {(result["figure"], result["run"]) for result in results}
    lines = [line for line in lines if (line["figure"], line["run"]) not in mine] + list(results)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


# ---------------------------------------------------------------------- tables


def noise_table(lines: Sequence[Mapping[str, Any]], runs: Mapping[str, str]) -> str:
    """Return as Markdown the accuracy with each noise by the number of images described, of runs by their titles."""
    labels = {(None, None): "no noise"} | {(epsilon, "analytic"): f"epsilon {epsilon:g}" for epsilon in (1.0, 0.3, 0.1)}
    labels[0.3, "classical"] = "epsilon 0.3, the paper's formula"
    heads = ["images described", *map(str, SIZES[:-1])]
    rows = [table_row(heads), table_row(["---"] * len(heads))]
    for title, run in runs.items():
        for (epsilon, mechanism), label in labels.items():
            keys = {"figure": "privacy", "run": run, "epsilon": epsilon, "mechanism": mechanism}
            found = {line["examples"]: line["accuracy"] for line in lines if line.items() >= keys.items()}
            rows.append(table_row([f"{title}, {label}", *(f"{found[size]:.1f}" for size in SIZES[:-1])]))
    return "\n".join(rows)


SHIFTS = [("blur", 0.0), ("blur", 0.5), ("blur", 1.0), ("blur", 2.0), *(("rotation", each) for each in ANGLES[1:])]
FEW_SHIFTS = [*(("blur", each) for each in (0.0, 1.0, 2.0, 3.0)), ("rotation", 30.0), ("rotation", 60.0)]
Shifts = Sequence[tuple[str, float]]
Rows = Mapping[str, tuple[Sequence[str], str]]
"""Runs, which differ in their seeds, and a method of them, by title."""


def shift_table(lines: Sequence[Mapping[str, Any]], rows: Rows, shifts: Shifts, unlike: bool = False) -> str:
    """Return as Markdown the accuracy of each run after each change of images.

    With `unlike`, the percentage of clients that are told that nobody like them has trained stands in brackets.
    """
    heads = ["", "as it is", *(f"{kind} {amount:g}" for kind, amount in shifts[1:])]
    made = [table_row(heads), table_row(["---"] * len(heads))]
    for title, (runs, method) in rows.items():
        found = {
            (line["run"], line["kind"], line["amount"]): f"{line['accuracy']:.1f}"
            + (f" ({line['unlike']})" if unlike and "unlike" in line else "")
            for line in lines
            if line["figure"] == "shift" and line["method"] == method
        }
        made.append(table_row([title, *(", ".join(found[run, *shift] for run in runs) for shift in shifts)]))
    return "\n".join(made)


PRIVATE = {"CIFAR-10": "cifar10-private", "MNIST": "mnist-private"}
TRAINED = "cifar10-100-150-pathological-odpfl"
CHANGED = {
    "odpfl": ([f"{TRAINED}-0"], "odpfl"),
    "odpfl, `encoder=private`": ([f"{TRAINED}-private-0"], "odpfl"),
    "fedavg": ([f"{TRAINED}-0"], "fedavg"),
}
SEEDS = [f"mnist-deepset{seed}" for seed in ("", "-101", "-102")]
CHANGED_DIGITS = {
    "`odpfl`": (SEEDS, "odpfl"),
    "the same, within reach": (SEEDS, "odpfl, within reach"),
    "one factor": ([run.replace("deepset", "one-factor") for run in SEEDS], "odpfl"),
    "`odpfl`, described before": (SEEDS, "odpfl, described before"),
    "`fedavg`": (SEEDS, "fedavg"),
}
TABLES = {
    "noise": lambda: noise_table(read(RESULTS), PRIVATE),
    "shift": lambda: shift_table(read(RESULTS), CHANGED, SHIFTS, unlike=True),
    "digits": lambda: shift_table(read(RESULTS), CHANGED_DIGITS, FEW_SHIFTS),
}


@torch.no_grad()
def main() -> None:
    """Compute one figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["privacy", "shift", "space"])
    parser.add_argument("run", type=Path, help="run folder of odpfl")
    parser.add_argument("other", type=Path, nargs="?", help="shift: run folder of fedavg, on the same data")
    parser.add_argument("--draws", type=int, default=20, help="privacy: noises for each client and number of examples")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of results")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="by default beside the results")
    parser.add_argument("--own-code", action="store_true", help="trust the code that the runs name")
    args = parser.parse_args()
    if (args.part == "shift") != (args.other is not None):
        parser.error("expected a second run for shift, and for shift only")
    torch.set_num_threads(1)
    study = Study(args.run, args.own_code)
    config = study.trained.config
    title = (
        f"{config.data.name}, {config.clients} clients of which {len(study.novel)} novel, "
        f"round {study.trained.selection.round}"
    )
    if args.part == "privacy":
        results = privacy(study, args.draws)
        count, fill = 1, partial(draw_privacy, results)
    elif args.part == "shift":
        results = shift(study, Study(args.other, args.own_code))
        count, fill = 2, partial(draw_shift, results)
    else:
        results, found = space(study)
        print(json.dumps(results[0]))
        count, fill = 1, partial(draw_space, found)
    keep(args.results, results)
    draw(args.figure or args.results.with_name(f"on-demand-{args.part}.png"), count, title, fill)


if __name__ == "__main__":
    main()
