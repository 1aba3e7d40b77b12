"""Novel clients without labels: ODPFL-HN against global models and a trained pFedHN (the paper's table 1).

CIFAR-10 or CIFAR-100, 100 clients of which 10 never train, cohorts of 9, LeNet. Each method is a run of
`flower-server --engine inline` whose folder stays under `--work`; a line per result goes into `--results`, and what is
there already is not run again. A run that was killed goes on from its last checkpoint. `pfl-*` take the run of `pfedhn`
on the same split and seed.

    python -m figures.odpfl --root DIR                                        # everything, 500 rounds
    python -m figures.odpfl --root DIR --splits pathological --methods odpfl,fedavg --rounds 100
    python -m figures.odpfl --root DIR --data cifar100 --methods odpfl,fedavg
    python -m figures.odpfl --data mnist --root DIR --clients 50 --rounds 60  # something shorter
    python -m figures.odpfl --table                                           # what there is, as Markdown
"""

import argparse
import json
import math
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from figures.pages import read
from figures.paper_tables import load_table
from hyperbloom.server.cli import main as flower_server
from hyperbloom.server.runs.checkpoint import has_begun
from hyperbloom.server.runs.recorded import has_ended

SPLITS = {
    "pathological": ["--split", "shards"],
    "dirichlet-0.1": ["--split", "dirichlet", "--set", "data.alpha=0.1"],
    "dirichlet-1": ["--split", "dirichlet", "--set", "data.alpha=1.0"],
    "dirichlet-10": ["--split", "dirichlet", "--set", "data.alpha=10.0"],
}
SHARDS = {"cifar100": 5}
"""Shards of a client in the pathological split, where they are not two."""
RATE = ["--set", "learning_rate=0.01"]  # of the hypernetwork, the paper's
PAPER = ["--set", "start=hypernetwork", *RATE]
METHODS = {
    "odpfl": ["--strategy", "odpfl", *PAPER],
    "odpfl-scaled": ["--strategy", "figures.scaled:ODPFLScaled", *RATE],
    "odpfl-common": ["--strategy", "odpfl", *RATE],
    "odpfl-momentum": ["--strategy", "figures.shared_momentum:ODPFLMomentum", *RATE],
    "odpfl-uncalibrated": ["--strategy", "figures.one_factor:ODPFLUncalibrated", *PAPER],
    "odpfl-one-model": ["--strategy", "figures.one_factor:ODPFLOneModel", *PAPER],
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
    "odpfl-common": "ODPFL-HN",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fedma": "FedMA",
    "pfl-sampled": "PFL-sampled",
    "pfl-nearest": "PFL-nearest",
    "pfl-ensemble": "PFL-ensemble",
}
"""Under which name it has a method."""
TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
SCORES = ("val_mean", "test_mean", "test_std", "novel_test_mean", "novel_test_std")
NOVEL = 10
"""Percent of the clients that never train."""
RESULTS = Path(__file__).with_name("odpfl.jsonl")
SETTINGS = ["local.steps=26", "local.batch_size=32"]  # two epochs of 400 images, the paper's
SETTINGS += ["local.learning_rate=0.005", "local.schedule=constant"]


def run(args: argparse.Namespace, split: str, method: str, seed: int) -> dict[str, Any]:
    """Run one method on one split, or go on with it, and return its line."""
    name = "-".join([f"{args.data}-{args.clients}-{args.rounds}-{split}-{method}-{seed}", *args.set]).replace("/", "_")
    folder: Path = args.work / name
    flags = ["--engine", "inline", "--run-dir", str(folder), *METHODS[method], *SPLITS[split], "--data", args.data]
    flags += ["--clients", str(args.clients), "--cohort", str(max(1, args.clients * 9 // 100)), "--seed", str(seed)]
    flags += ["--set", f"data.classes_per_client={SHARDS.get(args.data, 2)}"] if split == "pathological" else []
    flags += ["--set", f"novel={NOVEL}", "--set", "gains=false", *(["--root", args.root] if args.root else [])]
    for assignment in [*SETTINGS, *args.set]:
        flags += ["--set", assignment]
    if method.startswith("pfl-"):
        trained = args.work / name.replace(method, "pfedhn")
        flags += ["--rounds", "1", "--eval-every", "1", "--init-from", str(trained)]
    else:
        flags += ["--rounds", str(args.rounds), "--eval-every", str(args.every)]
    start = time.perf_counter()
    if has_begun(folder):
        code = 0 if has_ended(folder) else flower_server(["--resume", str(folder), "--own-code"])
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
        **({"search": True} if args.search else {}),
        "selected": selected["round"],
        **{key: round(metrics[key], 2) for key in SCORES},
        "curve": [[x["round"], round(x["novel_test_mean"], 2)] for x in lines if "novel_test_mean" in x],
        "losses": [
            [x["round"], round(x["loss"], 3), round(x["val_loss"], 3)]
            for x in lines
            if {"loss", "val_loss"} <= x.keys()
        ],
        "seconds_a_round": round(statistics.median(x["seconds"] for x in lines), 2),
        "seconds": round(time.perf_counter() - start, 1),
    }


def key_of(result: dict[str, Any]) -> tuple[Any, ...]:
    """Return what makes a result the one that was asked for."""
    keys = ("data", "clients", "rounds", "split", "method", "seed")
    return (*(result[key] for key in keys), tuple(result["set"]), result.get("search", False))


def tables(results: list[dict[str, Any]]) -> str:
    """Return the accuracy on novel clients as Markdown, by data set and number of rounds, and what was searched."""
    found = [result for result in results if result.get("search")]
    parts = ["Validation accuracy of the clients that train, in percent:", search(found)] if found else []
    for data, rounds in sorted({(result["data"], result["rounds"]) for result in results if result not in found}):
        here = [r for r in results if (r["data"], r["rounds"]) == (data, rounds) and r not in found]
        about = f"{TITLES.get(data, data)}, {rounds} rounds, accuracy on"
        parts += [f"{about} novel clients in percent:", table(here, "novel_test")]
        parts += [f"{about} the clients that train:", table(here, "test")]
    return "\n\n".join(parts)


def search(results: list[dict[str, Any]]) -> str:
    """Return validation accuracy by rounds, split, method, and the settings that were tried."""
    rows = ["| split | rounds | method | settings | seed | validation |", "|---|---|---|---|---|---|"]
    for one in sorted(results, key=lambda x: (x["split"], x["rounds"], list(METHODS).index(x["method"]), x["set"])):
        about = (one["split"], str(one["rounds"]), f"`{one['method']}`", ", ".join(one["set"]), str(one["seed"]))
        rows.append(f"| {' | '.join(about)} | {one['val_mean']:.1f} |")
    return "\n".join(rows)


def table(results: list[dict[str, Any]], metric: str) -> str:
    """Return the mean over seeds of the accuracy on novel clients, or on those that train, as Markdown.

    With one seed there is the standard error over these clients, as in the paper, with more seeds their deviation. The
    paper's accuracy on novel clients is in brackets.
    """
    table1, data = load_table("odpfl-table1"), results[0]["data"]
    rows = ["| method | " + " | ".join(SPLITS) + " |", "|---|" + "---|" * len(SPLITS)]
    kinds = {(result["method"], *result["set"]) for result in results}
    for method, *own in sorted(kinds, key=lambda kind: (list(METHODS).index(kind[0]), kind)):
        cells = []
        for split in SPLITS:
            found = [r for r in results if (r["method"], r["set"], r["split"]) == (method, own, split)]
            column = f"{data}-{split.removeprefix('dirichlet-')}"
            named = method in ROWS and metric == "novel_test" and data in TITLES
            figure = table1.methods[ROWS[method]].figures(column).get("") if named else None
            cells.append(_cell(found, metric) + (f" ({figure.mean})" if figure and found else ""))
        rows.append(f"| {', '.join([f'`{method}`', *own])} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _cell(found: list[dict[str, Any]], metric: str) -> str:
    values = [result[f"{metric}_mean"] for result in found]
    if len(values) > 1:
        return f"{statistics.fmean(values):.1f} +- {statistics.stdev(values):.1f} ({len(values)} seeds)"
    error = standard_error(found[0], metric) if found else None
    return (f"{values[0]:.1f}" if found else "") + ("" if error is None else f" +- {error:.1f}")


def standard_error(result: dict[str, Any], metric: str) -> float | None:
    """Return that of one run's mean over its novel clients, or over those that train; None of a single client."""
    share = NOVEL if metric == "novel_test" else 100 - NOVEL
    clients = round(result["clients"] * share / 100)
    deviation: float = result[f"{metric}_std"]  # of these clients, so divided by their number and not by one less
    return deviation / math.sqrt(clients - 1) if clients > 1 else None


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
    parser.add_argument("--search", action="store_true", help="what is run serves to choose settings, on validation")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of results")
    parser.add_argument("--work", type=Path, default=Path("runs/odpfl"), help="where the run folders stay")
    parser.add_argument("--table", action="store_true", help="print the results there are; run nothing")
    args = parser.parse_args()
    results = read(args.results)
    if args.table:
        print(tables(results))
        return
    done = {key_of(result) for result in results}
    wanted = [name for name in METHODS if name in args.methods.split(",")]  # pfedhn comes before those that use it
    if any(name.startswith("pfl-") for name in wanted) and "pfedhn" not in wanted:
        wanted.insert(0, "pfedhn")
    for seed in (int(text) for text in args.seeds.split(",")):
        for split in args.splits.split(","):
            for method in wanted:
                asked = (args.data, args.clients, args.rounds, split, method, seed, tuple(args.set), args.search)
                if asked in done:
                    continue
                result = run(args, split, method, seed)
                print(json.dumps({key: value for key, value in result.items() if key != "curve"}), flush=True)
                args.results.parent.mkdir(parents=True, exist_ok=True)
                with args.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")


TABLES = {"tables": lambda: tables(read(RESULTS))}

if __name__ == "__main__":
    main()
