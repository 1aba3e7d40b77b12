"""What a newcomer without labels gets, against the number of clients that trained: generated, common or a mixture.

A quarter of the clients never trains. These score the model for all, the one written from their descriptor, and
mixtures; validation chooses (docs/on-demand.md). FedAvg's model is of a run of its own, with the same clients.

    python -m figures.newcomers                                # what is missing
    python -m figures.newcomers --only study=heart seed=0      # some of it
"""

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pays_sets import SETS
from figures.pages import table_row
from figures.study import Line, Study
from hyperbloom.common.config import make_run_config
from hyperbloom.common.newcomers import SHARES
from hyperbloom.server.library import run as play

NOVEL = 25
STUDIES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "chests": ({"rounds": 40}, (8,)),
    "heart": ({"data.name": "heart-disease", "data.split": "dirichlet", "data.alpha": 0.5, "rounds": 40}, (8,)),
    "digits": ({"data.name": "digits", "data.split": "shards", "local.steps": 20, "rounds": 60}, (8, 16, 32, 64)),
    "digits-alike": (
        {"data.name": "digits", "data.split": "dirichlet", "data.alpha": 1.0, "local.steps": 20, "rounds": 60},
        (8, 16, 32, 64),
    ),
}
"""By name: the run, and the numbers of clients. Cohorts are of 4; all else is the default."""

TITLES = {
    "chests": "chest X-rays, patients",
    "heart": "heart disease, Dirichlet 0.5",
    "digits": "digits, two classes each",
    "digits-alike": "digits, Dirichlet 1",
}
METHODS: dict[str, dict[str, Any]] = {
    "odpfl-common": {"strategy": "odpfl"},
    "odpfl-faster": {"strategy": "odpfl", "options.learning_rate": 0.01},
    "odpfl-private": {"strategy": "odpfl", "options.encoder": "private"},
    "fedavg": {"strategy": "fedavg"},
}
STARTS = {
    "odpfl-common": "`common`",
    "odpfl-faster": "`common`, rate 0.01",
    "odpfl-private": "`common`, `encoder=private`",
}


def measure(study: str, clients: int, method: str, seed: int) -> Line:
    """Run one method; accuracies are in percent, those by share are means over the novel clients."""
    values = {**STUDIES[study][0], "clients": clients, "cohort": 4, "novel": NOVEL, "seed": seed, "eval_every": 20}
    with tempfile.TemporaryDirectory() as name:
        folder, files = Path(name) / "run", {}
        if study == "chests":  # the thousand X-rays of the benchmark `pays`
            files = {"data": SETS["chest X-rays, patients"].data(Path("data"), Path("../shared/data"), Path(name))}
        values |= METHODS[method] | {"gains": False}
        play(make_run_config(files, values, "figures.newcomers"), run_dir=folder)
        (summary,) = json.loads((folder / "summary.json").read_text(encoding="utf-8")).values()
    line = {key: round(summary["metrics"][key], 2) for key in ("val_mean", "test_mean", "novel_test_mean")}
    if told := summary["newcomers"]:
        line |= {"share": told["share"], "by_share": [round(mean, 2) for mean in told["test"]]}
        line |= {"trained": told["trained"], "held_out": told["held_out"]}
    return line


def table(lines: Sequence[Line]) -> str:
    """Return test accuracies of novel clients as Markdown: means over the seeds that all methods of a row have."""
    heads = ["data", "clients that train", "seeds", "start"]
    heads += ["for all", "written", "chosen", "shares chosen", "FedAvg", "those who train"]
    rows = [table_row(heads), table_row(["---"] * len(heads))]
    runs: dict[tuple[str, int, str], dict[int, Line]] = defaultdict(dict)
    for line in lines:
        runs[line["study"], line["clients"], line["method"]][line["seed"]] = line
    for study, (_, numbers) in STUDIES.items():
        for clients in numbers:
            average = runs[study, clients, "fedavg"]
            for method, start in STARTS.items():
                mine = runs[study, clients, method]
                if seeds := sorted(mine.keys() & average.keys()):
                    some = [mine[seed] for seed in seeds]
                    cells = [TITLES[study], str(some[0]["trained"]), str(len(seeds)), start]
                    for at in (0, -1):
                        cells.append(_mean([line["by_share"][at] for line in some]))
                    cells.append(_mean([line["by_share"][SHARES.index(line["share"])] for line in some]))
                    cells.append(", ".join(f"{line['share']:g}" for line in some))
                    cells.append(_mean([average[seed]["novel_test_mean"] for seed in seeds]))
                    cells.append(_mean([line["test_mean"] for line in some]))
                    rows.append(table_row(cells))
    return "\n".join(rows) + "\n"


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f}"


STUDY = Study(
    "newcomers",
    [
        {"study": study, "clients": clients, "method": method, "seed": seed}
        for seed in range(3)
        for study, (_, numbers) in STUDIES.items()
        for clients in numbers
        for method in METHODS
    ],
    measure,
    {"table": table},
)

TABLES = STUDY.pages

if __name__ == "__main__":
    STUDY.main(__doc__)
