"""Novel clients without labels: ODPFL-HN against global models and a trained pFedHN (the paper's table 1).

CIFAR-10, 100 clients of which 10 never train, cohorts of 9, LeNet. Each method is a run of `flower-server --engine
inline` whose folder stays under `--work`; a line per result goes into `--results`, and what is there already is not run
again. A run that was killed goes on from its last checkpoint. `pfl-*` take the run of `pfedhn` on the same split and
seed.

    python -m figures.odpfl --root DIR                                        # everything, 500 rounds
    python -m figures.odpfl --root DIR --splits pathological --methods odpfl,fedavg --rounds 100
    python -m figures.odpfl --data mnist --root DIR --clients 50 --rounds 60  # something shorter
    python -m figures.odpfl --table                                           # what there is, as Markdown
"""

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from figures.paper_tables import load_table
from hyperbloom.common.config import load_run_config
from hyperbloom.server.cli import main as flower_server
from hyperbloom.server.runs.checkpoint import has_checkpoint, is_over

SPLITS = {
    "pathological": ["--split", "shards", "--set", "data.classes_per_client=2"],
    "dirichlet-0.1": ["--split", "dirichlet", "--set", "data.alpha=0.1"],
    "dirichlet-1": ["--split", "dirichlet", "--set", "data.alpha=1.0"],
    "dirichlet-10": ["--split", "dirichlet", "--set", "data.alpha=10.0"],
}
PAPER = ["--set", "start=hypernetwork"]
METHODS = {
    "odpfl": ["--strategy", "odpfl", *PAPER],
    "odpfl-scaled": ["--strategy", "odpfl", "--set", "start=scaled"],
    "odpfl-common": ["--strategy", "odpfl"],
    "odpfl-private": ["--strategy", "odpfl", *PAPER, "--set", "encoder=private"],
    "odpfl-two-phase": ["--strategy", "odpfl", *PAPER, "--set", "mode=two-phase"],
    "fedavg": ["--strategy", "fedavg"],
    "fedprox": ["--strategy", "fedprox"],
    "fedma": ["--strategy", "fedma"],
    "pfedhn": ["--strategy", "pfedhn", *PAPER],
    "pfl-sampled": ["--strategy", "pfl-sampled", *PAPER],
    "pfl-nearest": ["--strategy", "pfl-nearest", *PAPER],
    "pfl-ensemble": ["--strategy", "pfl-ensemble", *PAPER],
}
ROWS = {
    "odpfl": "ODPFL-HN",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fedma": "FedMA",
    "pfl-sampled": "PFL-sampled",
    "pfl-nearest": "PFL-nearest",
    "pfl-ensemble": "PFL-ensemble",
}
"""Under which name it has a method."""
SCORES = ("val_mean", "test_mean", "test_std", "novel_test_mean", "novel_test_std")
SETTINGS = ["local.steps=26", "local.batch_size=32"]  # two epochs of 400 images, the paper's


def run(args: argparse.Namespace, split: str, method: str, seed: int) -> dict[str, Any]:
    """Run one method on one split, or go on with it, and return its line."""
    name = f"{args.data}-{args.clients}-{args.rounds}-{split}-{method}-{seed}"
    folder: Path = args.work / name
    flags = ["--engine", "inline", "--run-dir", str(folder), *METHODS[method], *SPLITS[split], "--data", args.data]
    flags += ["--clients", str(args.clients), "--cohort", str(max(1, args.clients * 9 // 100)), "--seed", str(seed)]
    flags += ["--set", "novel=10", "--set", "gains=false", *(["--root", args.root] if args.root else [])]
    for assignment in [*SETTINGS, *args.set]:
        flags += ["--set", assignment]
    if method.startswith("pfl-"):
        trained = args.work / name.replace(method, "pfedhn")
        flags += ["--rounds", "1", "--eval-every", "1", "--init-from", str(trained)]
    else:
        flags += ["--rounds", str(args.rounds), "--eval-every", str(args.every)]
    start = time.perf_counter()
    if has_checkpoint(folder):
        over = is_over(folder, load_run_config(folder / "config.yaml", {}))
        code = 0 if over else flower_server(["--resume", str(folder)])
    else:
        shutil.rmtree(folder, ignore_errors=True)
        code = flower_server(flags)
    if code:
        raise SystemExit(f"{name}: flower-server ended with {code}; {folder} has what was done")
    (selected,) = json.loads((folder / "summary.json").read_text()).values()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = selected["metrics"]
    return {
        "data": args.data,
        "clients": args.clients,
        "rounds": args.rounds,
        "split": split,
        "method": method,
        "seed": seed,
        "set": args.set,
        "selected": selected["round"],
        **{key: round(metrics[key], 2) for key in SCORES},
        "curve": [[x["round"], round(x["novel_test_mean"], 2)] for x in lines if "novel_test_mean" in x],
        "seconds_a_round": round(statistics.median(x["seconds"] for x in lines), 2),
        "seconds": round(time.perf_counter() - start, 1),
    }


def key_of(result: dict[str, Any]) -> tuple[Any, ...]:
    """Return what makes a result the one that was asked for."""
    return (*(result[key] for key in ("data", "clients", "rounds", "split", "method", "seed")), tuple(result["set"]))


def table(results: list[dict[str, Any]]) -> str:
    """Return the mean over seeds of novel clients' accuracy, beside the paper's, as Markdown."""
    table1 = load_table("odpfl-table1")
    rows = ["| method | " + " | ".join(SPLITS) + " |", "|---|" + "---|" * len(SPLITS)]
    for method in METHODS:
        cells = []
        for split in SPLITS:
            found = [r["novel_test_mean"] for r in results if (r["method"], r["split"]) == (method, split)]
            figure = (
                table1.methods[ROWS[method]].figures(f"cifar10-{split.removeprefix('dirichlet-')}").get("")
                if method in ROWS
                else None
            )
            paper = f" ({figure.mean})" if figure else ""
            cells.append(f"{statistics.fmean(found):.1f}{paper}" if found else "")
        rows.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    """Run what is missing, line by line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--root")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--every", type=int, default=25, help="rounds between evaluations")
    parser.add_argument("--splits", default=",".join(SPLITS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of flower-server, for all")
    parser.add_argument("--results", type=Path, default=Path("figures/odpfl.jsonl"), help="file of results")
    parser.add_argument("--work", type=Path, default=Path("runs/odpfl"), help="where the run folders stay")
    parser.add_argument("--table", action="store_true", help="print the results there are with this --set; run nothing")
    args = parser.parse_args()
    results = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    if args.table:
        print(table([result for result in results if result["set"] == args.set]))
        return
    done = {key_of(result) for result in results}
    wanted = [name for name in METHODS if name in args.methods.split(",")]  # pfedhn comes before those that use it
    if any(name.startswith("pfl-") for name in wanted) and "pfedhn" not in wanted:
        wanted.insert(0, "pfedhn")
    for seed in (int(text) for text in args.seeds.split(",")):
        for split in args.splits.split(","):
            for method in wanted:
                asked = (args.data, args.clients, args.rounds, split, method, seed, tuple(args.set))
                if asked in done:
                    continue
                result = run(args, split, method, seed)
                print(json.dumps({key: value for key, value in result.items() if key != "curve"}), flush=True)
                args.results.parent.mkdir(parents=True, exist_ok=True)
                with args.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
