"""How should a site choose between the federation's models and one trained alone? Rules, on small sets, by many seeds.

Each run is one of `benchmarks.pays` with its defaults. A client compares its models, and every rule chooses among
the same ones by their answers to its validation examples. A line has, for each rule, what each site gains on its test
examples over training alone, in points. The rule that is taken was suggested by runs with seeds 0 to 2, and is measured
with others.

    python -m benchmarks.choice --sets heart "digits, two codes" --seeds 0 1 2
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.pays import Line
from benchmarks.pays_sets import SETS
from figures.hospitals import SCHEMA, write_table
from figures.pages import read, table_row
from hyperbloom.client.work import comparison
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import make_run_config
from hyperbloom.common.gains import MODELS, interval
from hyperbloom.server.library import run as play

RESULTS = Path(__file__).parents[1] / "figures" / "choice.jsonl"
HEART = "heart disease, hospitals"
ENDS = [name for name in MODELS if ":" not in name and name != "alone"]
Trials = Mapping[str, Any]


def best(trials: Trials, names: Sequence[str], by_loss: bool = False) -> str:
    """Return the best of some models on validation examples, by accuracy and then by loss, or by loss alone."""
    rank = {name: comparison._rank(trials[name].val, "accuracy") for name in names if name in trials}
    return max(rank, key=lambda name: rank[name][1:] if by_loss else rank[name])


def surely(trials: Trials, names: Sequence[str], data: Any, share: float) -> str:
    """Return the best of some models if at most a `share` of resamples of groups says that alone is as good."""
    chosen = best(trials, names)
    right = [(trials[name].answers[0].argmax(1) == data.labels.cpu()).double().numpy() for name in (chosen, "alone")]
    gained = np.array([(right[0] - right[1])[rows].mean() for rows in comparison._units(data)])
    return chosen if interval(lambda rows: float(gained[rows].mean()), len(gained), 1000, share)[0] > 0 else "alone"


def surely_by_loss(trials: Trials, names: Sequence[str], errors: float) -> str:
    """Return the best of some models by loss, if it is no worse by accuracy and its loss surely smaller than alone."""
    chosen = best(trials, names, by_loss=True)
    gained = (trials["alone"].losses - trials[chosen].losses).numpy()
    sure = gained.mean() > errors * gained.std(ddof=1) / np.sqrt(len(gained))
    no_worse = trials[chosen].val.value("accuracy") >= trials["alone"].val.value("accuracy")
    return chosen if sure and no_worse else "alone"


TAKEN = "the same, by 1.5"
"""The rule of the clients."""
FEDERATION = [name for name in MODELS if name != "alone"]
RULES: dict[str, Callable[[Trials, Any], str]] = {
    "the federation's model, always": lambda trials, data: "personal",
    "the best by accuracy": lambda trials, data: best(trials, [*FEDERATION, "alone"]),
    "the best by loss": lambda trials, data: best(trials, [*FEDERATION, "alone"], by_loss=True),
    "without mixtures, the best by accuracy": lambda trials, data: best(trials, [*ENDS, "alone"]),
    "the best, if surely better by 1 standard error": lambda trials, data: surely(trials, FEDERATION, data, 0.159),
    "the best, if surely better by 1.5": lambda trials, data: surely(trials, FEDERATION, data, 0.067),
    "the best, if surely better by 2": lambda trials, data: surely(trials, FEDERATION, data, 0.023),
    "the best by loss, if no worse by accuracy": lambda trials, data: surely_by_loss(trials, FEDERATION, 0.0),
    "the same, if its loss is surely smaller by 1": lambda trials, data: surely_by_loss(trials, FEDERATION, 1.0),
    TAKEN: lambda trials, data: surely_by_loss(trials, FEDERATION, 1.5),
    "the federation's model, if surely better by 1.5": lambda trials, data: surely(trials, ["personal"], data, 0.067),
}


def measure(args: argparse.Namespace, name: str, strategy: str, seed: int) -> Line:
    """Run a strategy; return a line with what each rule gains its sites, and how many of them take a model of it."""
    found: dict[str, list[float]] = {rule: [] for rule in RULES}
    taken = dict.fromkeys(RULES, 0)
    compared = comparison._trials

    def spy(client: Any, order: Any) -> Iterator[tuple[str, Any]]:
        trials, data = dict(compared(client, order)), client.val_data
        lone = trials["alone"].test.value("accuracy")
        for rule, chooses in RULES.items():
            chosen = chooses(trials, data)
            found[rule].append(round(100 * (trials[chosen].test.value("accuracy") - lone), 2))
            taken[rule] += chosen != "alone"
        yield from trials.items()

    federation = SETS[name]
    client_for.cache_clear()
    with tempfile.TemporaryDirectory() as folder, patch.object(comparison, "_trials", spy):
        data = federation.data(args.data_dir, args.shared, args.work)
        if name == HEART:  # as a user's own table, which each seed splits anew
            data = {"name": write_table(Path(folder) / "patients.csv"), "schema_file": str(SCHEMA), "split": "owner"}
        values = {"strategy": strategy, "rounds": 40, "clients": federation.clients, "cohort": federation.cohort}
        values |= {"seed": seed, "gains": True, "data": data, "options": {"start": args.start}}
        play(make_run_config({}, values, "benchmarks.choice"), run_dir=Path(folder) / "run")
    return {"set": name, "strategy": strategy, "start": args.start, "seed": seed, "gain": found, "taken": taken}


def table(lines: Sequence[Line]) -> str:
    """Return the mean gain of each rule, and how many sites lose more than a point, by set and in all."""
    names = [name for name in SETS if any(line["set"] == name for line in lines)]
    counts = {name: sorted({line["seed"] for line in lines if line["set"] == name}) for name in names}
    heads = [f"{name} ({len(counts[name])} seeds)" for name in names]
    rows = [["rule", *heads, "all sites lose", "take it"], ["---"] * (len(heads) + 3)]
    for rule in RULES:
        gains = {
            name: np.array([g for line in lines if line["set"] == name for g in line["gain"][rule]]) for name in names
        }
        every = np.concatenate(list(gains.values()))
        cells = [f"{each.mean():+z.1f}, {100 * (each < -1).mean():.0f} % lose" for each in gains.values()]
        taken = sum(line["taken"][rule] for line in lines)
        rows.append(
            [
                f"**{rule}**" if rule == TAKEN else rule,
                *cells,
                f"{100 * (every < -1).mean():.0f} % of {len(every)}",
                f"{100 * taken / len(every):.0f} %",
            ]
        )
    return "\n".join(map(table_row, rows))


def main(words: Sequence[str] | None = None) -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="folder with the published files")
    parser.add_argument("--shared", type=Path, default=Path("../shared/data"), help="folder with tables and X-rays")
    parser.add_argument("--work", type=Path, default=Path("runs/pays"), help="folder for data sets that are made")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=range(3, 9))
    parser.add_argument("--sets", nargs="+", default=["heart", "digits", "chest", "airline"])
    parser.add_argument("--strategies", nargs="+", default=["pfedhn"], help="of those with options.start")
    parser.add_argument("--start", default="common", help="what the hypernetwork starts from")
    args = parser.parse_args(words)
    args.work.mkdir(parents=True, exist_ok=True)
    names = [name for name in SETS if name.startswith(tuple(args.sets))]
    done = {(line["set"], line["strategy"], line["seed"], line["start"]) for line in read(args.results)}
    wanted = [(name, strategy, seed) for seed in args.seeds for name in names for strategy in args.strategies]
    for one in [one for one in wanted if (*one, args.start) not in done]:
        text = json.dumps(measure(args, *one))
        with args.results.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    print(table(read(args.results)))


TABLES = {"table": lambda: table(read(RESULTS))}

if __name__ == "__main__":
    main()
