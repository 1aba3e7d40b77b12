"""What pFedHN and its clients should start at, and whether the local rate carries over: validation accuracy.

The variants change one thing each. Most were run with `EARLIER`, the default before `STEPS` were compared. Nothing here
looks at test examples; a line per run goes into `--results`.

    python -m figures.starts --data-dir DIR            # what `--results` lacks
"""

import argparse
import itertools
import json
import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.pays_sets import SETS
from figures.pages import read, table_row
from hyperbloom.common.config import RunConfig, make_run_config
from hyperbloom.common.layout import Weights
from hyperbloom.server.library import run as play
from hyperbloom.strategies import pfedhn
from hyperbloom.strategies.algorithm import Algorithm
from hyperbloom.strategies.exchange import Client, Update

AS_WRITTEN = "training begins as written"
CODE: dict[str, Any] = {"local.learning_rate": 5e-3, "local.schedule": "constant"}  # the rate of pFedHN's code
SAME = "0.005, constant"  # everything else as by default
DEFAULT = "the default"
EARLIER = "the earlier default"
FIXED = "r = 1 in all rounds"  # though the rate decays
BODY = "body as written"
MEAN = "and all of the mean"
NEAR = "used near to what is written"
STARTS: dict[str, dict[str, Any]] = {
    "the paper's start": {"start": "hypernetwork", **CODE},
    "scaled": {"strategy": "figures.scaled:PFedHNScaled", **CODE},
    "one network for all": {"personal": "written", **CODE},
    AS_WRITTEN: CODE,
    SAME: CODE,
    "changes clipped": {"clip_deltas": "median", **CODE},
}
RATES: dict[str, dict[str, Any]] = {
    "0.001, constant": {**CODE, "local.learning_rate": 1e-3},
    SAME: CODE,
    "0.01, constant": {**CODE, "local.learning_rate": 1e-2},
    "0.02, constant": {**CODE, "local.learning_rate": 2e-2},
    EARLIER: {},
    "0.02, cosine": {"local.learning_rate": 2e-2},
}
NEARNESS: dict[str, dict[str, Any]] = {FIXED: {}, EARLIER: {}}
STEPS: dict[str, dict[str, Any]] = {EARLIER: {}, BODY: {}, MEAN: {}, NEAR: {}, DEFAULT: {}}
TRAINING: dict[str, dict[str, Any]] = {
    "10 steps": {"local.steps": 10},
    "25 steps": {"local.steps": 25},
    DEFAULT: {},
    "100 steps": {"local.steps": 100},
    "no momentum, rate 0.1": {"local.momentum": 0.0, "local.learning_rate": 0.1},  # as far as steps with momentum 0.9
    "gradients clipped to 1": {"local.clip": 1.0},
    "mean of replies": {"update": "mean"},
    "10 rounds of FedAvg first": {},
    "20 rounds of FedAvg first": {},
}
FEDAVG_FIRST = {"10 rounds of FedAvg first": 10, "20 rounds of FedAvg first": 20}
VARIANTS = STARTS | RATES | NEARNESS | STEPS | TRAINING
ROUNDS = 40
"""Of the runs that compare all variants; shorter ones compare `NEARNESS`, longer ones `STEPS` alone."""
LONG = 5 * ROUNDS
"""Of the runs of the default that say what `PATIENCE` costs."""
PATIENCE = (2, 3, 5, 10)
"""Evaluations after which a run ends in which nothing became better."""
SMALL = tuple(SETS)[:3] + tuple(SETS)[4:6]
"""Those with small networks, of which a run takes seconds."""
UNCHANGED = frozenset(SMALL) - {"airline tweets, users"}
"""Those whose clients have at most `pfedhn.FEW` examples, so that training begins as written at a constant rate."""
SCANS = tuple(SETS)[3:4]
"""Many sites with few X-rays; compared with `NEARNESS` alone."""
LARGE = tuple(SETS)[6:]
RESULTS = Path(__file__).with_name("starts.jsonl")
Line = dict[str, Any]


def changed(variant: str) -> ExitStack:
    """Return what changes the strategy where no option does."""
    found = ExitStack()
    if variant in (BODY, MEAN):
        found.enter_context(mock.patch.object(pfedhn.PFedHN, "_mix", body_as_written))
    elif variant == NEAR:
        found.enter_context(mock.patch.object(pfedhn.PFedHN, "_mix", near_to_written))
    elif variant not in TRAINING:
        found.enter_context(mock.patch.object(pfedhn.PFedHN, "_mix", all_near))
    if variant == MEAN:
        found.enter_context(mock.patch.object(pfedhn, "shrunk_mean", lambda deltas, clients: deltas.mean(0)))
    elif variant not in (NEAR, *TRAINING):
        found.enter_context(mock.patch.object(pfedhn, "shrunk_mean", lambda deltas, clients: deltas.sum(0) / clients))
    if variant == AS_WRITTEN:
        found.enter_context(mock.patch.object(pfedhn, "FEW", math.inf))
    if variant in FEDAVG_FIRST:
        found.enter_context(mock.patch.object(pfedhn.PFedHN, "learn", learn_after(FEDAVG_FIRST[variant])))
    if variant == FIXED:
        found.enter_context(mock.patch.object(pfedhn.PFedHN, "round", Algorithm.round))
    return found


def learn_after(rounds: int) -> Callable[[pfedhn.PFedHN, Sequence[Update]], None]:
    """Return a way to learn that in the first rounds only averages the network for all, as FedAvg does.

    Deviations from it are zero until then. All clients have one size.
    """
    learn, cohorts = pfedhn.PFedHN.learn, dict[pfedhn.PFedHN, int]()

    def learn_or_average(self: pfedhn.PFedHN, updates: Sequence[Update]) -> None:
        cohorts[self] = cohorts.get(self, 0) + 1
        if cohorts[self] > rounds:
            learn(self, updates)
            return
        shares = torch.tensor([float(each.examples) for each in updates])
        deltas = torch.stack([each.returned for each in updates if each.returned is not None])  # (C, P)
        self.learner.hypernetwork.move_start(self.head_of(updates[0].client), shares / shares.sum() @ deltas)

    return learn_or_average


def all_near(self: Any, client: Client, written: Weights, own: Tensor | None, start: Tensor, rate: float) -> Weights:
    """Begin with the body as near to a client's own as its head, and score its own weights: the earlier default."""
    if own is None:
        return written
    return replace(written, values=torch.lerp(written.values, own, 1 - rate * pfedhn.few_of(client)))


def body_as_written(
    self: Any, client: Client, written: Weights, own: Tensor | None, start: Tensor, rate: float
) -> Weights:
    """Begin with the body at what is written, and score a client's own weights."""
    near = all_near(self, client, written, own, start, rate)
    if rate:
        for name, part, _ in written.layout.slices():
            if name not in self._heads[client.about.size]:
                near.values[part] = written.values[part]
    return near


def near_to_written(
    self: Any, client: Client, written: Weights, own: Tensor | None, start: Tensor, rate: float
) -> Weights:
    """Begin, and score, with the body near to what is written, where the default has it near to the network for all."""
    near = all_near(self, client, written, own, start, rate)
    if own is not None:
        body = torch.lerp(written.values, own, (1 - rate) * pfedhn.few_of(client))
        for name, part, _ in written.layout.slices():
            if name not in self._heads[client.about.size]:
                near.values[part] = body[part]
    return near


def measure(args: argparse.Namespace, name: str, variant: str, rounds: int, seed: int) -> Line:
    """Run a variant; return the validation accuracy in percent of the selected round."""
    federation, numbers = SETS[name], (list(SETS).index(name), list(VARIANTS).index(variant), rounds, seed)
    folder = args.work / "-".join(map(str, numbers))
    values: dict[str, Any] = {"rounds": rounds, "seed": seed}
    values |= {"clients": federation.clients, "cohort": federation.cohort}
    values |= {"gains": False, "data": federation.data(args.data_dir, args.shared, args.work)}
    config = make_run_config(values, VARIANTS[variant], "figures.starts")
    with changed(variant):
        done = play(config, run_dir=folder)
    found = {row["round"]: row["val_mean"] for row in done.metrics if "val_mean" in row}
    shutil.rmtree(folder)
    line = {"set": name, "variant": variant, "rounds": rounds, "seed": seed}
    line |= {"selected": round(max(found.values()), 2)}
    return line | ({"patience": stops(config, found)} if variant == DEFAULT and rounds == LONG else {})


def stops(config: RunConfig, scores: Mapping[int, float]) -> dict[str, tuple[int, float]]:
    """Return where each of `PATIENCE` ends a run with these scores by round, and the best score until then.

    Nothing else depends on patience: the rate decays over all rounds that the run may have.
    """
    ends = {}
    for patience in PATIENCE:
        patient, best = config.model_copy(update={"patience": patience}), 0
        for number, score in scores.items():
            best = best if best and scores[best] >= score else number
            if patient.has_lost_patience(best, number):
                break
        ends[str(patience)] = (number, round(scores[best], 2))
    return ends


def variants(name: str, seed: int, rounds: int = ROUNDS) -> list[str]:
    """Return the variants to run of a data set; those with large networks have other rates with the first seed only."""
    if rounds < ROUNDS:
        return [] if name in SCANS + LARGE else list(NEARNESS)
    if rounds > ROUNDS:
        return [DEFAULT] if name in SMALL and rounds == LONG else list(STEPS) if name in LARGE[2:] else []
    if name in LARGE:
        rates = (each for each in RATES if each not in (SAME, EARLIER) and seed == 0)
        return [AS_WRITTEN, SAME, *rates, *NEARNESS, DEFAULT]
    if name in SCANS:
        return [*NEARNESS, DEFAULT]
    return [variant for variant in VARIANTS if variant != AS_WRITTEN or name not in UNCHANGED]


def table(lines: Sequence[Line]) -> str:
    """Return means over seeds as Markdown: starts, rates, `r`, steps; a row for each set.

    A row has the seeds that were run with all variants of the row.
    """
    parts = list[str]()
    for columns in (STARTS, RATES, NEARNESS, STEPS, TRAINING):
        parts += ["", table_row(["data", "rounds", "seeds", *columns]), table_row(["---"] * (3 + len(columns)))]
        for rounds, name in itertools.product(sorted({line["rounds"] for line in lines}), SMALL + SCANS + LARGE):
            here = [line for line in lines if (line["set"], line["rounds"]) == (name, rounds)]
            runs = {each: {x["seed"]: x["selected"] for x in here if x["variant"] == each} for each in columns}
            if AS_WRITTEN in columns and name in UNCHANGED:
                runs[AS_WRITTEN] = runs[SAME]
            some = [set(each) for each in runs.values() if each]
            if len(some) > 1 and (seeds := set.intersection(*some)):
                means = (f"{statistics.fmean(run[seed] for seed in seeds):.1f}" if run else "" for run in runs.values())
                parts.append(table_row([name, str(rounds), str(len(seeds)), *means]))
    return "\n".join(parts[1:])


def patience(lines: Sequence[Line]) -> str:
    """Return as Markdown what patience costs: means over seeds of the score, and of the rounds until the end."""
    parts = [table_row(["data", "seeds", f"{LONG} rounds", *(f"patience {each}" for each in PATIENCE)])]
    parts.append(table_row(["---"] * (3 + len(PATIENCE))))
    for name in SMALL:
        if some := [line for line in lines if line["set"] == name and "patience" in line]:
            cells = [name, str(len(some)), f"{statistics.fmean(line['selected'] for line in some):.1f}"]
            for each in PATIENCE:
                ends, scores = zip(*(line["patience"][str(each)] for line in some), strict=True)
                cells.append(f"{statistics.fmean(scores):.1f} ({statistics.fmean(ends):.0f})")
            parts.append(table_row(cells))
    return "\n".join(parts)


def main(words: Sequence[str] | None = None) -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="folder with the published files")
    parser.add_argument("--shared", type=Path, default=Path("../shared/data"), help="folder with the tables")
    parser.add_argument("--work", type=Path, default=Path("runs/starts"), help="folder for runs that are not over")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, nargs="+", default=(10, 20, ROUNDS, 2 * ROUNDS, LONG))
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--sets", nargs="+", default=[""], help="how the names of the sets begin")
    args = parser.parse_args(words)
    args.work.mkdir(parents=True, exist_ok=True)
    done = {(line["set"], line["variant"], line["rounds"], line["seed"]) for line in read(args.results)}
    names = [name for name in SMALL + SCANS + LARGE if name.startswith(tuple(args.sets))]
    places = itertools.product(args.seeds, args.rounds, names)
    wanted = [(name, each, rounds, seed) for seed, rounds, name in places for each in variants(name, seed, rounds)]
    for one in [one for one in wanted if one not in done]:
        text = json.dumps(measure(args, *one))
        with args.results.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    print(table(read(args.results)))


TABLES = {"table": lambda: table(read(RESULTS)), "patience": lambda: patience(read(RESULTS))}

if __name__ == "__main__":
    main()
