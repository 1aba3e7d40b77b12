"""Four real hospitals: does pFedHN beat training alone and FedAvg on the heart disease data? Ten seeds, no tuning.

Each hospital is a client. The settings: what the programs do by default (100 rounds, cohort 1, 50 steps), the same with
few patients for training, and that of a user who sets 60 rounds of all four hospitals, rate 0.02 and 10 steps. A seed
draws training, validation and test examples anew. Test accuracy is that of the round which validation selected. The
clients are virtual ones. Differences are paired by seed: mean over hospitals, and a bootstrap interval over seeds. The
seeds share patients, so the interval is too short for what other patients would show.

What could a federation gain at most? A second table has logistic regressions, which see what no server sees: the
patients of all hospitals in one place. Their regularisation has the least validation loss, mean over hospitals.

    python -m figures.hospitals             # what `--results` lacks (40 min), and the tables
    python -m figures.hospitals --table     # the tables alone
"""

import argparse
import csv
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from figures.pages import read
from hyperbloom.common.config import make_run_config
from hyperbloom.common.data import DataSpec, load_client_data
from hyperbloom.common.data import table as tables
from hyperbloom.common.gains import interval
from hyperbloom.server.library import run as play

STRATEGIES = ("pfedhn", "local", "fedavg")
SETTINGS: dict[str, dict[str, Any]] = {
    "60 rounds of all, rate 0.02, 10 steps": {
        "rounds": 60,
        "cohort": 4,
        "local": {"learning_rate": 0.02, "steps": 10, "schedule": "constant"},
    },
    "defaults": {},
    **{f"defaults, {most} training patients each": {"data": {"max_train": most}} for most in (20, 40, 80)},
}
ALONE, ONE, OWN = "each alone", "one for all patients", "one for all patients, and deviations of each hospital"
REGRESSION, REGRESSIONS = "logistic regression", (ALONE, ONE, OWN)
PENALTIES = tuple(10 ** (k / 2) for k in range(-5, 2))  # scikit-learn's C, from 0.003 to 3
SCHEMA = Path(tables.__file__).with_name("heart_disease.json")
RESULTS = Path(__file__).with_name("hospitals.jsonl")
Line = dict[str, Any]


def write_table(path: Path) -> str:
    """Write the patients with their two classes; as a user's own table, each seed splits it anew."""
    frame = tables.read_cells(SCHEMA.with_suffix(".csv"))
    columns = {**frame, "num": ["healthy" if cell == "0" else "disease" for cell in frame["num"]]}
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])
    return str(path)


def measure(setting: str, strategy: str, seed: int) -> Line:
    """Run a strategy; return its line: the test accuracy of each hospital in percent at the selected round.

    `last` is the mean over hospitals at the last round, `later` that over the evaluations of the later half as well.
    """
    with tempfile.TemporaryDirectory() as folder:
        data = {"name": write_table(Path(folder) / "patients.csv"), "schema_file": str(SCHEMA), "split": "owner"}
        own = {**SETTINGS[setting], "data": data | SETTINGS[setting].get("data", {})}
        values = {"strategy": strategy, "clients": 4, "seed": seed, "gains": False, **own}
        done = play(make_run_config({}, values, "figures.hospitals"), run_dir=Path(folder) / "run")
        rows = sorted(done.accuracy, key=lambda row: row["client"])
        means = [row["test_mean"] for row in done.metrics if "test_mean" in row]
    accuracy = [round(row["test_accuracy"], 2) for row in rows]
    line = {"setting": setting, "strategy": strategy, "seed": seed, "round": rows[0]["round"], "test": accuracy}
    return line | {"last": round(means[-1], 2), "later": round(float(np.mean(means[len(means) // 2 :])), 2)}


Part = tuple[np.ndarray, np.ndarray]  # inputs (N, D) and labels (N,)


def measure_regressions(seed: int) -> list[Line]:
    """Return the lines of the three regressions, of the same patients for training, validation and test."""
    with tempfile.TemporaryDirectory() as folder:
        spec = DataSpec(
            write_table(Path(folder) / "patients.csv"), split="owner", partitions=4, seed=seed, schema=SCHEMA
        )
        hospitals = [load_client_data(replace(spec, partition=row)) for row in range(4)]
    parts = [
        [(part.inputs.flatten(1).numpy(), part.labels.numpy()) for part in (h.train, h.val, h.test)] for h in hospitals
    ]
    return [
        {
            "setting": REGRESSION,
            "strategy": name,
            "seed": seed,
            "test": [round(100 * x, 2) for x in regress(parts, name)],
        }
        for name in REGRESSIONS
    ]


def regress(hospitals: Sequence[Sequence[Part]], name: str) -> list[float]:
    """Return the test accuracy of each hospital, given its parts, of the regression with the least validation loss."""

    def losses(found: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
        return float(
            np.mean([log_loss(part[1][1], val, labels=[0, 1]) for part, (val, _) in zip(hospitals, found, strict=True)])
        )

    found = min(_fits(hospitals, name), key=losses)
    return [float(((test > 0.5) == part[2][1]).mean()) for part, (_, test) in zip(hospitals, found, strict=True)]


def _fits(hospitals: Sequence[Sequence[Part]], name: str) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Yield for each regularisation what it says of each hospital's validation and test patients."""
    for penalty in PENALTIES:
        for scale in (0.3, 1.0) if name == OWN else (0.0,):  # how cheap deviations are

            def widened(inputs: np.ndarray, row: int, scale: float = scale) -> np.ndarray:
                biased = np.column_stack([inputs, np.ones(len(inputs))])
                own = [scale * biased * (row == k) for k in range(len(hospitals) if scale else 0)]
                return np.concatenate([inputs, *own], axis=1)

            wide = [[(widened(x, row), y) for x, y in parts] for row, parts in enumerate(hospitals)]
            groups = [[each] for each in wide] if name == ALONE else [wide]
            found = []
            for group in groups:
                train = [np.concatenate(each) for each in zip(*(parts[0] for parts in group), strict=True)]
                model = LogisticRegression(C=penalty, max_iter=5000).fit(*train)
                found += [(model.predict_proba(p[1][0])[:, 1], model.predict_proba(p[2][0])[:, 1]) for p in group]
            yield found


def table(lines: Sequence[Line]) -> str:
    """Return means over hospitals, and the differences to pFedHN, of those seeds that all strategies have."""
    parts = ["| setting | seeds | pFedHN | local | FedAvg | over local | over FedAvg |", f"|{' --- |' * 7}"]
    for setting in SETTINGS:
        found: dict[str, dict[int, float]] = {strategy: {} for strategy in STRATEGIES}
        for line in lines:
            if line["setting"] == setting:
                found[line["strategy"]][line["seed"]] = float(np.mean(line["test"]))
        seeds = sorted(set.intersection(*(set(runs) for runs in found.values())))
        if len(seeds) > 1:
            mine, *others = (np.array([found[strategy][seed] for seed in seeds]) for strategy in STRATEGIES)
            cells = [setting, str(len(seeds)), *(f"{each.mean():.1f}" for each in (mine, *others))]
            cells += [_difference(mine - other) for other in others]
            parts.append(f"| {' | '.join(cells)} |")
    return "\n".join(parts)


def rounds(lines: Sequence[Line]) -> str:
    """Return what the choice of a round on few validation patients is worth: means over hospitals and seeds."""
    heads = [
        "setting",
        "strategy",
        "seeds",
        "selected round",
        "last round",
        "mean of the later half",
        "selected over it",
    ]
    parts = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for setting, strategy in itertools.product(SETTINGS, STRATEGIES):
        some = [line for line in lines if (line["setting"], line["strategy"]) == (setting, strategy) and "last" in line]
        if len(some) > 1:
            selected = np.array([np.mean(line["test"]) for line in some])
            last, later = (np.array([line[key] for line in some]) for key in ("last", "later"))
            cells = [setting, strategy, str(len(some)), *(f"{each.mean():.1f}" for each in (selected, last, later))]
            parts.append(f"| {' | '.join([*cells, _difference(selected - later)])} |")
    return "\n".join(parts)


def regressions(lines: Sequence[Line]) -> str:
    """Return means over hospitals of the regressions, and how far they are ahead of each hospital's own."""
    parts = ["| logistic regression | seeds | accuracy | over each alone |", f"|{' --- |' * 4}"]
    found = {name: [line for line in lines if line["strategy"] == name] for name in REGRESSIONS}
    means = {name: np.array([np.mean(line["test"]) for line in some]) for name, some in found.items()}
    for name, values in means.items():
        ahead = "" if name == ALONE else _difference(values - means[ALONE])
        parts.append(f"| {name} | {len(values)} | {values.mean():.1f} | {ahead} |")
    return "\n".join(parts)


def _difference(values: np.ndarray) -> str:
    low, high = interval(lambda rows: float(values[rows].mean()), len(values))
    return f"{values.mean():+.1f} ({low:+.1f} to {high:+.1f})"


def main(words: Sequence[str] | None = None) -> None:
    """Run what is missing, or show what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=range(10))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS, help="names of rows")
    parser.add_argument("--table", action="store_true", help="print the table of what there is")
    args = parser.parse_args(words)
    done = {(line["setting"], line["strategy"], line["seed"]) for line in read(args.results)}
    wanted = [(setting, strategy, seed) for setting in args.settings for seed in args.seeds for strategy in STRATEGIES]
    for one in [] if args.table else [one for one in wanted if one not in done]:
        _append(args.results, [measure(*one)])
    for seed in [] if args.table else [seed for seed in args.seeds if (REGRESSION, OWN, seed) not in done]:
        _append(args.results, measure_regressions(seed))
    found = read(args.results)
    print(f"{table(found)}\n\n{regressions(found)}" if any(x["setting"] == REGRESSION for x in found) else table(found))


def _append(path: Path, lines: Sequence[Line]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


TABLES = {
    "hospitals": lambda: table(read(RESULTS)),
    "rounds": lambda: rounds(read(RESULTS)),
    "regressions": lambda: regressions(read(RESULTS)),
}

if __name__ == "__main__":
    main()
