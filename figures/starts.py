"""What pFedHN and its clients should start at, and whether the local rate carries over: validation accuracy.

The variants change one thing each. Nothing here looks at test examples; a line per run goes into `--results`.

    python -m figures.starts --data-dir DIR            # what `--results` lacks
    python -m figures.starts --page docs/pays.md       # the table, written between the page's marks
"""

import argparse
import json
import math
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.pays_sets import SETS
from hyperbloom.common.config import make_run_config
from hyperbloom.server.library import run as play
from hyperbloom.strategies import pfedhn

AS_WRITTEN = "training begins as written"
VARIANTS: dict[str, dict[str, Any]] = {
    "the paper's start": {"start": "hypernetwork"},
    "scaled": {"strategy": "figures.scaled:PFedHNScaled"},
    "one network for all": {"personal": "written"},
    AS_WRITTEN: {},
    "the default": {},
    "changes clipped": {"clip_deltas": "median"},
    "a fifth of the local rate": {"local.learning_rate": 1e-3},
    "four times the local rate": {"local.learning_rate": 2e-2},
}
RATES = tuple(VARIANTS)[-2:]
SMALL = tuple(SETS)[:3] + tuple(SETS)[4:6]
"""Those with small networks, of which a run takes seconds."""
UNCHANGED = frozenset(SMALL) - {"airline tweets, users"}
"""Those whose clients have at most `pfedhn.FEW` examples, so that training begins as written by default."""
LARGE = tuple(SETS)[6:]
BEGIN, END = "<!-- figures.starts: begin -->", "<!-- figures.starts: end -->"
Line = dict[str, Any]


def measure(args: argparse.Namespace, name: str, variant: str, rounds: int, seed: int) -> Line:
    """Run a variant; return the validation accuracy in percent of the selected round."""
    federation, numbers = SETS[name], (list(SETS).index(name), list(VARIANTS).index(variant), rounds, seed)
    folder = args.work / "-".join(map(str, numbers))
    values: dict[str, Any] = {"rounds": rounds, "seed": seed}
    values |= {"clients": federation.clients, "cohort": federation.cohort}
    values |= {"gains": False, "data": federation.data(args.data_dir, args.shared, args.work)}
    with mock.patch.object(pfedhn, "FEW", math.inf if variant == AS_WRITTEN else pfedhn.FEW):
        done = play(make_run_config(values, VARIANTS[variant], "figures.starts"), run_dir=folder)
    found = [row["val_mean"] for row in done.metrics if "val_mean" in row]
    shutil.rmtree(folder)
    line = {"set": name, "variant": variant, "rounds": rounds, "seed": seed}
    return line | {"selected": round(max(found), 2)}


def variants(name: str) -> list[str]:
    """Return the variants to run of a data set."""
    if name in LARGE:
        return [AS_WRITTEN, "the default", *RATES]
    return [variant for variant in VARIANTS if variant != AS_WRITTEN or name not in UNCHANGED]


def read(path: Path) -> list[Line]:
    """Return the lines of a file of results, none if it is not there."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def table(lines: Sequence[Line]) -> str:
    """Return means over seeds as Markdown, a row for each set and number of rounds."""
    parts = [_row(["data", "rounds", "seeds", *VARIANTS]), _row(["---"] * (3 + len(VARIANTS)))]
    for rounds in sorted({line["rounds"] for line in lines}):
        for name in SMALL + LARGE:
            here = [line for line in lines if (line["set"], line["rounds"]) == (name, rounds)]
            runs = {
                each: {line["seed"]: line["selected"] for line in here if line["variant"] == each} for each in VARIANTS
            }
            if any(runs.values()):
                if name in UNCHANGED:
                    runs[AS_WRITTEN] = runs["the default"]
                seeds = max(len(some) for some in runs.values())
                cells = (_cell(some, runs["the default"], seeds) for some in runs.values())
                parts.append(_row([name, str(rounds), str(seeds), *cells]))
    return "\n".join(parts)


def _cell(some: dict[int, float], default: dict[int, float], seeds: int) -> str:
    """Return a mean; of fewer seeds than others have, with the difference to the default's of the same seeds."""
    if not some:
        return ""
    mean = statistics.fmean(some.values())
    if len(some) == seeds or not some.keys() <= default.keys():
        return f"{mean:.1f}"
    return f"{mean:.1f} ({mean - statistics.fmean(default[seed] for seed in some):+.1f}, {len(some)} of {seeds})"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(words: Sequence[str] | None = None) -> None:
    """Run what is missing, or write what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="folder with the published files")
    parser.add_argument("--shared", type=Path, default=Path("../shared/data"), help="folder with the tables")
    parser.add_argument("--work", type=Path, default=Path("runs/starts"), help="folder for runs that are not over")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("starts.jsonl"))
    parser.add_argument("--rounds", type=int, nargs="+", default=(40,))
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--sets", nargs="+", default=[""], help="how the names of the sets begin")
    parser.add_argument("--page", type=Path, help="write the table into this page")
    args = parser.parse_args(words)
    if args.page:
        before, _, rest = args.page.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        text = f"{before}{BEGIN}\n\n{table(read(args.results))}\n\n{END}{after}"
        args.page.write_text(text, encoding="utf-8")
        return
    args.work.mkdir(parents=True, exist_ok=True)
    done = {(line["set"], line["variant"], line["rounds"], line["seed"]) for line in read(args.results)}
    names = [name for name in SMALL + LARGE if name.startswith(tuple(args.sets))]
    pairs = [(name, variant, rounds) for rounds in args.rounds for name in names for variant in variants(name)]
    wanted = [(*pair, seed) for seed in args.seeds for pair in pairs]
    for one in [one for one in wanted if one not in done]:
        text = json.dumps(measure(args, *one))
        with args.results.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    print(table(read(args.results)))


if __name__ == "__main__":
    main()
