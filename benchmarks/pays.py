"""Does the federation pay for its sites? Strategies with their defaults on data sets that are unlike each other.

The defaults were chosen on validation examples of nine of them. The three unseen ones have tables of their own.

Only the data, the number of clients, the cohort (half of them), the rounds and the seed are set. Each run asks its
clients for their gain over training alone (docs/pays.md). A line per run goes into `--results`; what is there already
is not run again, and a run that was killed goes on from its last checkpoint.

    python -m benchmarks.pays --data-dir DIR                       # everything: 40 rounds first, then 200
    python -m benchmarks.pays --data-dir DIR --rounds 40 --seeds 0 --sets heart digits
    python -m benchmarks.pays --table                              # what there is, as Markdown

Two figures decide: the mean gain over the better of `local` and `fedavg` (the better one by mean test accuracy, which
favours it), over all sets and for the default on each, with an interval over sites; and the share of sites that lose
more than a point against training alone, where the site keeps the model that it chose by validation, and where it takes
the federation's model of the selected round. In the interval a site counts once, with its mean over seeds, if it is the
same with every seed; else, and in the share, it counts once for each seed. These share examples.
"""

import argparse
import json
import math
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from benchmarks.pays_sets import LASTING, SETS, UNSEEN
from figures.pages import read, table_row
from hyperbloom.common.config import make_run_config
from hyperbloom.server.library import run as play
from hyperbloom.server.runs.lines import read_gains

PAPER = {"start": "hypernetwork"}  # as the paper's hypernetwork starts; the default starts at one network for all
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("local", "fedavg", "fedavg-ft", "fedper", "ditto")},
    "pfedhn, the paper's": ("pfedhn", PAPER),
    "pfedhn-pc, the paper's": ("pfedhn-pc", PAPER),
    "pfedhn": ("pfedhn", {}),
    "pfedhn-pc": ("pfedhn-pc", {}),
}
"""By the names of the columns: strategies and their options."""
STILL = "pfedhn, no hypernetwork"
"""The default with a hypernetwork that learns nothing, and so stays zero: what does the hypernetwork add?"""
RUNS = STRATEGIES | {STILL: ("pfedhn", {"learning_rate": 1e-12})}
DEFAULT = "pfedhn"
"""What a run without `--strategy` takes; only its clients are asked for their choice."""
DECIDING = ("local", "fedavg", DEFAULT)
"""A row of the table has the seeds that all of these have, as far as they were run."""
PERSONAL = ("fedavg-ft", "fedper", "ditto")
"""The other strategies whose clients end with models of their own."""
BUDGETS = (40, 200)
ALL = SETS | UNSEEN
RESULTS = Path(__file__).parents[1] / "figures" / "pays.jsonl"
POINT = 1.0
Line = dict[str, Any]


def measure(args: argparse.Namespace, name: str, rounds: int, strategy: str, seed: int) -> Line:
    """Run one strategy, or go on with it, and return its line; accuracies and gains are in percent."""
    number = list(RUNS).index(strategy)
    federation, folder = ALL[name], args.work / f"{list(ALL).index(name)}-{rounds}-{number}-{seed}"
    values = {
        "strategy": RUNS[strategy][0],
        "rounds": rounds,
        "clients": federation.clients,
        "cohort": federation.cohort,
        "seed": seed,
        "gains": strategy == DEFAULT and not args.without_gains,
        "data": federation.data(args.data_dir, args.shared, args.work),
    }
    done = play(make_run_config(values, RUNS[strategy][1], "benchmarks.pays"), run_dir=folder)
    selected = {row["client"]: row["test_accuracy"] for row in done.accuracy}
    sites, gains = sorted(selected), {site: gain for site, (_, gain) in read_gains(folder).items()}
    (summary,) = json.loads((folder / "summary.json").read_text(encoding="utf-8")).values()
    line = {"set": name, "rounds": rounds, "strategy": strategy, "seed": seed, "selected": summary["round"]}
    line |= {"val": round(summary["metrics"]["val_mean"], 2), "test": [round(selected[site], 2) for site in sites]}
    if gains:
        line["chosen"] = [gains[site].chosen for site in sites]
        line["gain"] = [round(100 * gains[site].value, 2) for site in sites]
        line["alone"] = [round(100 * gains[site].test[gains[site].models.index("alone")], 2) for site in sites]
    shutil.rmtree(folder)
    return line


def key(line: Line) -> tuple[Any, ...]:
    """Return what tells a run from all others."""
    return line["set"], line["rounds"], line["strategy"], line["seed"]


def of_sites(gains: Sequence[Any], name: str) -> np.ndarray:
    """Return the gains on a set, `(seeds, sites)`, as one of each site: its mean, if it is the same with every seed."""
    found = np.array(gains)
    return found.mean(0) if name in LASTING else found.reshape(-1)


def over_better(lines: Sequence[Line], strategy: str) -> np.ndarray | None:
    """Return the gains over the better of `local` and `fedavg` on one set, of its sites; None without all three."""
    runs: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for line in lines:
        runs[line["strategy"]][line["seed"]] = line["test"]
    seeds = sorted(runs[strategy].keys() & runs["local"].keys() & runs["fedavg"].keys())
    if not seeds:
        return None
    mine, *others = (np.array([runs[name][seed] for seed in seeds]) for name in (strategy, "local", "fedavg"))
    better: np.ndarray = max(others, key=lambda each: float(each.mean()))
    return of_sites(mine - better, lines[0]["set"])


def over(lines: Sequence[Line], strategy: str, other: str) -> np.ndarray | None:
    """Return the gains of a strategy over another on one set, of its sites; None if they share no seed."""
    runs = {name: {x["seed"]: x["test"] for x in lines if x["strategy"] == name} for name in (strategy, other)}
    seeds = sorted(runs[strategy].keys() & runs[other].keys())
    gains = [np.subtract(runs[strategy][seed], runs[other][seed]) for seed in seeds]
    return of_sites(gains, lines[0]["set"]) if gains else None


def by_choice(lines: Sequence[Line]) -> np.ndarray | None:
    """Return the gains over training alone of the models that sites of one set chose, if asked."""
    gains = [line["gain"] for line in lines if "gain" in line]
    return of_sites(gains, lines[0]["set"]) if gains else None


def losers(lines: Iterable[Line]) -> tuple[float, float, int] | None:
    """Return which percent of sites lose more than a point with and without the choice, and the number of sites."""
    pairs = [
        pair for line in lines if "gain" in line for pair in zip(line["gain"], line["test"], line["alone"], strict=True)
    ]
    if not pairs:
        return None
    chosen = sum(gain < -POINT for gain, _, _ in pairs)
    taken = sum(test - alone < -POINT for _, test, alone in pairs)
    return 100 * chosen / len(pairs), 100 * taken / len(pairs), len(pairs)


def table(lines: Sequence[Line], sets: Iterable[str] = tuple(SETS)) -> str:
    """Return what there is of some sets, as Markdown: accuracies by set, then the figures that decide."""
    parts, mine = [], [line for line in lines if line["set"] in sets]
    for rounds in sorted({line["rounds"] for line in mine}):
        some = [line for line in mine if line["rounds"] == rounds]
        parts += _accuracies(some, sets, rounds)
        heads = ["gain over the better of local and FedAvg", "sets", "sites that lose, by choice", "without", "sites"]
        parts += ["", table_row([f"{rounds} rounds", *heads, f"{DEFAULT} over it"]), table_row(["---"] * 7)]
        rows = [
            (name, _deciding(some, name, sets), _lead_over(some, name, sets)) for name in STRATEGIES if name != "local"
        ]
        parts += [table_row([name, *figures, behind]) for name, figures, behind in rows] + [""]
    return "\n".join(parts)


def _accuracies(lines: Sequence[Line], sets: Iterable[str], rounds: int) -> list[str]:
    parts = [f"{rounds} rounds, mean test accuracy in percent at the round that validation selected:\n"]
    parts += [table_row(["data", "seeds", *STRATEGIES, f"gain of {DEFAULT}", "by choice"])]
    parts += [table_row(["---"] * (4 + len(STRATEGIES)))]
    for name in sets:
        here = {each: [x for x in lines if (x["set"], x["strategy"]) == (name, each)] for each in STRATEGIES}
        there = [runs for each, runs in here.items() if runs and each in DECIDING] or [*filter(None, here.values())]
        seeds = set.intersection(*({line["seed"] for line in runs} for runs in there or [[]]))
        if seeds:
            gain = _gain(over_better([line for runs in here.values() for line in runs], DEFAULT))
            means = [_mean(runs, seeds) + _mark(runs, here[DEFAULT]) for runs in here.values()]
            parts.append(table_row([name, str(len(seeds)), *means, gain, _chosen(here[DEFAULT])]))
    return parts


def _mark(runs: Sequence[Line], default: Sequence[Line]) -> str:
    """Return an arrow if the interval over the default on one set lies on one side of 0."""
    found = over([*runs, *default], runs[0]["strategy"], DEFAULT) if runs and runs != default else None
    if found is None:
        return ""
    _, low, high = interval([found])
    return " ▲" if low > 0 else " ▼" if high < 0 else ""


def _lead_over(lines: Sequence[Line], strategy: str, sets: Iterable[str]) -> str:
    """Return the mean gain of the default over a strategy on the sets that both were run on."""
    found = [over([x for x in lines if x["set"] == name], DEFAULT, strategy) for name in sets]
    sites = [one for one in found if one is not None]
    return _shown(*interval(sites)) if sites and strategy != DEFAULT else ""


def _deciding(lines: Sequence[Line], strategy: str, sets: Iterable[str]) -> list[str]:
    found = [over_better([x for x in lines if x["set"] == name], strategy) for name in sets]
    sites = [one for one in found if one is not None]
    if not sites:
        return [""] * 5
    mean, low, high = interval(sites)
    lost = losers([line for line in lines if line["strategy"] == strategy])
    shares = [f"{lost[0]:.1f} %", f"{lost[1]:.1f} %", str(lost[2])] if lost else [""] * 3
    return [_shown(mean, low, high), str(len(sites)), *shares]


def interval(sets: Sequence[np.ndarray], level: float = 0.95) -> tuple[float, float, float]:
    """Return the mean over sets of their means over sites, and Student's interval for it.

    Sites vary within their set, and sets are fixed. A variance is estimated for each set, from few sites, so the
    interval has the degrees of freedom of Welch and Satterthwaite. It is wider than that of a bootstrap within sets,
    which does not reach beyond four sites. It is not defined (nan) if a set has a single site, whose variance is not
    known, or if no site differs from the others of its set.
    """
    mean = float(np.mean([each.mean() for each in sets]))
    if any(len(each) < 2 for each in sets):
        return mean, math.nan, math.nan
    variances = np.array([each.var(ddof=1) / len(each) for each in sets]) / len(sets) ** 2  # of each part of the mean
    if not variances.any():
        return mean, math.nan, math.nan
    freedom = variances.sum() ** 2 / sum(v**2 / (len(each) - 1) for v, each in zip(variances, sets, strict=True))
    half = float(student.ppf((1 + level) / 2, freedom) * np.sqrt(variances.sum()))
    return mean, mean - half, mean + half


def _gain(found: np.ndarray | None) -> str:
    """Return the mean of the sites' gains with Student's interval, as these may be few."""
    if found is None:
        return ""
    return _shown(*interval([found]))


def _shown(mean: float, low: float, high: float) -> str:
    return f"{mean:+.1f}" + ("" if math.isnan(low) else f" ({low:+.1f} to {high:+.1f})")


def _chosen(lines: Sequence[Line]) -> str:
    """Return the gain by choice; where every site kept training alone there is no gain to measure."""
    asked = [line for line in lines if "gain" in line]
    taken = any(name != "alone" for line in asked for name in line["chosen"])
    return _gain(by_choice(asked)) if taken or not asked else "none took it"


def _mean(runs: Sequence[Line], seeds: set[int]) -> str:
    """Return the mean over these seeds; with a remark over those that there are, and nothing if there are none."""
    found = [statistics.mean(line["test"]) for line in runs if line["seed"] in seeds]
    few = f" ({len(found)} of {len(seeds)})" if len(found) < len(seeds) else ""
    return f"{statistics.mean(found):.1f}{few}" if found else ""


def still(lines: Sequence[Line]) -> str:
    """Return as Markdown what the hypernetwork adds: the default, and the same with one that learns nothing."""
    parts = [table_row(["data", "seeds", "without", "default", "it adds"]), table_row(["---"] * 5)]
    pairs = [x for x in lines if x["rounds"] == BUDGETS[0] and x["strategy"] in (DEFAULT, STILL)]
    found: list[np.ndarray] = []
    for name in ALL:
        here = {each: [x for x in pairs if (x["set"], x["strategy"]) == (name, each)] for each in (STILL, DEFAULT)}
        seeds = set.intersection(*({x["seed"] for x in runs} for runs in here.values()))
        gains = over([x for runs in here.values() for x in runs], DEFAULT, STILL)
        if gains is not None:
            found.append(gains)
            parts.append(
                table_row([name, str(len(seeds)), *(_mean(runs, seeds) for runs in here.values()), _gain(gains)])
            )
    if found:
        parts.append(table_row([f"mean over {len(found)} sets", "", "", "", _shown(*interval(found))]))
    return "\n".join(parts)


def _rivals(lines: Sequence[Line]) -> str:
    return ", ".join(f"{_lead_over(lines, name, SETS)} over `{name}`" for name in PERSONAL)


def sentence(lines: Sequence[Line]) -> str:
    """Return the figures that decide for the default: of both budgets, and with the smaller one of the unseen sets."""
    some = [line for line in lines if line["rounds"] == BUDGETS[0]]
    (gain, sets, lost, _, sites), (unseen, others, few, _, their) = (
        _deciding([line for line in some if line["set"] in group], DEFAULT, group) for group in (SETS, UNSEEN)
    )
    more = (
        f"On {others} federations on which no default was chosen it is {unseen} points ahead, and\n"
        f"{few} of {their} sites lose more than a point with the model that they chose.\n"
    )
    rivals, longer = _rivals(some), [line for line in lines if line["rounds"] == BUDGETS[1]]
    later = (
        f"With {BUDGETS[1]} rounds it is {_deciding(longer, DEFAULT, SETS)[0]} points ahead of the better of the two,\n"
        f"and its mean lead is {_rivals(longer)}.\n"
        "(Those on published images are older than [a correction](docs/start.md#a-correction).)\n"
    )
    return (
        f"With defaults and {BUDGETS[0]} rounds, `{DEFAULT}` is {gain} points ahead of the better of `local` and\n"
        f"`fedavg`: the mean over {sets} federations, with a 95 % interval that holds for their sites only.\n"
        f"Its mean lead there is {rivals}.\n"
        f"{later if longer else ''}"
        "Where an interval contains 0, no difference can be seen (+0.0 is above 0, -0.0 below).\n"
        "Its defaults were chosen on their validation examples (but for `update`, on test examples of two published\n"
        "data sets that were split otherwise); the options of the others were not searched.\n"
        "With the model that each site chose on its validation examples,\n"
        f"{lost} of {sites} sites are more than a point behind training alone (a site counts once for each seed).\n"
        f"{more if others else ''}"
        "[Strategies on thirteen federations](docs/federations.md) has every data set and strategy.\n"
    )


def main(words: Sequence[str] | None = None) -> None:
    """Run what is missing, or show what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="folder with the published files")
    parser.add_argument("--shared", type=Path, default=Path("../shared/data"), help="folder with tables and X-rays")
    parser.add_argument("--work", type=Path, default=Path("runs/pays"), help="folder for runs that are not over")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--sets", nargs="+", default=[""], help="how the names of the sets begin")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument(
        "--without-gains", action="store_true", help="do not ask clients for their choice: half the time"
    )
    parser.add_argument("--table", action="store_true", help="print the table of what there is")
    args = parser.parse_args(words)
    if not args.table:
        args.work.mkdir(parents=True, exist_ok=True)
        names = [name for name in ALL if name.startswith(tuple(args.sets))]
        wanted = [(n, r, s, seed) for r in args.rounds for seed in args.seeds for n in names for s in args.strategies]
        for name, rounds, strategy, seed in wanted:
            if (name, rounds, strategy, seed) not in {key(x) for x in read(args.results)}:
                line = measure(args, name, rounds, strategy, seed)
                with args.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    lines = read(args.results)
    print(table(lines), table(lines, UNSEEN), still(lines), sep="\n")


TABLES = {
    "sets": lambda: table(read(RESULTS)),
    "unseen": lambda: table(read(RESULTS), UNSEEN),
    "still": lambda: still(read(RESULTS)),
    "sentence": lambda: sentence(read(RESULTS)),
}

if __name__ == "__main__":
    main()
