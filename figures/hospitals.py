"""Four real hospitals: does pFedHN beat training alone and FedAvg on the heart disease data? Ten seeds, no tuning.

Each hospital is a client. Two settings: what the programs do by default (100 rounds, cohort 1, 50 steps), and that of a
user who sets 60 rounds of all four hospitals, rate 0.02 and 10 steps. A seed draws training, validation and test
examples anew. Test accuracy is that of the round which validation selected. The clients are virtual ones.
Differences are paired by seed: mean over hospitals, and a bootstrap interval over seeds. The seeds
share patients, so the interval is too short for what other patients would show.

    python -m figures.hospitals             # what `--results` lacks (12 min), and the table
    python -m figures.hospitals --table     # the table alone
"""

import argparse
import csv
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyperbloom.common.config import make_run_config
from hyperbloom.common.data import table as tables
from hyperbloom.common.gains import interval
from hyperbloom.server.library import run as play

STRATEGIES = ("pfedhn", "local", "fedavg")
SETTINGS: dict[str, dict[str, Any]] = {
    "60 rounds of all, rate 0.02, 10 steps": {
        "rounds": 60,
        "cohort": 4,
        "local": {"learning_rate": 0.02, "steps": 10},
    },
    "defaults": {},
}
SCHEMA = Path(tables.__file__).with_name("heart_disease.json")
Line = dict[str, Any]


def write_table(path: Path) -> str:
    """Write the patients with their two classes; as a user's own table, each seed splits it anew."""
    frame = tables.read_cells(SCHEMA.with_suffix(".csv"))
    columns = {**frame, "num": ["healthy" if cell == "0" else "disease" for cell in frame["num"]]}
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])
    return str(path)


def measure(setting: str, strategy: str, seed: int) -> Line:
    """Run a strategy; return its line: the test accuracy of each hospital in percent."""
    with tempfile.TemporaryDirectory() as folder:
        data = {"name": write_table(Path(folder) / "patients.csv"), "schema_file": str(SCHEMA), "split": "owner"}
        values = {"strategy": strategy, "clients": 4, "seed": seed, "data": data, "gains": False, **SETTINGS[setting]}
        done = play(make_run_config({}, values, "figures.hospitals"), run_dir=Path(folder) / "run")
        rows = sorted(done.accuracy, key=lambda row: row["client"])
    accuracy = [round(row["test_accuracy"], 2) for row in rows]
    return {"setting": setting, "strategy": strategy, "seed": seed, "round": rows[0]["round"], "test": accuracy}


def read(path: Path) -> list[Line]:
    """Return the lines of a file of results, none if it is not there."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


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


def _difference(values: np.ndarray) -> str:
    low, high = interval(lambda rows: float(values[rows].mean()), len(values))
    return f"{values.mean():+.1f} ({low:+.1f} to {high:+.1f})"


def main(words: Sequence[str] | None = None) -> None:
    """Run what is missing, or show what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("hospitals.jsonl"))
    parser.add_argument("--seeds", type=int, nargs="+", default=range(10))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS, help="which of the two")
    parser.add_argument("--table", action="store_true", help="print the table of what there is")
    args = parser.parse_args(words)
    done = {(line["setting"], line["strategy"], line["seed"]) for line in read(args.results)}
    wanted = [(setting, strategy, seed) for setting in args.settings for seed in args.seeds for strategy in STRATEGIES]
    for one in [] if args.table else [one for one in wanted if one not in done]:
        text = json.dumps(measure(*one))
        with args.results.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    print(table(read(args.results)))


if __name__ == "__main__":
    main()
