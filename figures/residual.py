r"""What a correction of the default changed: the hypernetwork learns what it lacks, not what training changed.

Both rules are the same where training begins at the written weights. Elsewhere the earlier one let them drift away,
which clients that have not trained are given. Lines with `rule: earlier` were measured before the correction, in the
same way as those with `rule: now`:

    python -m benchmarks.pays --data-dir DIR --rounds 40 --strategies pfedhn --sets ... --results FILE   # federations
    flower-server --engine inline --strategy pfedhn --data fashion-mnist --root DIR --clients 8 --cohort 1 \
        --rounds 200 --eval-every 50 --split dirichlet --set data.alpha=1 --set data.max_train=4000 --set novel=25 \
        --set local.steps=20 --set gains=false --set model=mlp --seed S --run-dir RUN                    # newcomers
    python -m figures.residual --rule now [--pays FILE] [--newcomers RUN...]    # adds lines
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures.pages import read, table_row
from hyperbloom.common.files.storage import write_bytes

RESULTS = Path(__file__).with_suffix(".jsonl")
RULES = ("earlier", "now")
Line = dict[str, Any]


def federation(line: Line, rule: str) -> Line:
    """Return the line of a run of `benchmarks.pays`, with the mean over clients."""
    about = {"rule": rule, "set": line["set"], "seed": line["seed"]}
    return about | {"val": line["val"], "test": round(statistics.fmean(line["test"]), 2)}


def newcomers(run: Path, rule: str) -> Line:
    """Return the line of a run with novel clients: their accuracy and loss after the last round."""
    last = [json.loads(text) for text in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()][-1]
    seed = int(next(t for t in (run / "config.yaml").read_text().splitlines() if t.startswith("seed:")).split()[1])
    kept = {name: round(last[name], 3) for name in ("test_mean", "novel_test_mean", "novel_test_loss")}
    return {"rule": rule, "set": "newcomers", "seed": seed, "round": last["round"], **kept}


def federations_table(lines: Sequence[Line]) -> str:
    """Return validation and test accuracy by both rules as Markdown: the mean over the seeds that both have."""
    head = ("data", "seeds", "validation, earlier", "now", "test, earlier", "now")
    text = [table_row(head), "|" + " --- |" * len(head)]
    for name in dict.fromkeys(line["set"] for line in lines if line["set"] != "newcomers"):
        runs = {rule: {x["seed"]: x for x in lines if x["set"] == name and x["rule"] == rule} for rule in RULES}
        if seeds := sorted(runs["earlier"].keys() & runs["now"].keys()):
            means = [
                statistics.fmean(runs[rule][seed][key] for seed in seeds) for key in ("val", "test") for rule in RULES
            ]
            text.append(table_row((name, str(len(seeds)), *(f"{mean:.1f}" for mean in means))))
    return "\n".join(text)


def newcomers_table(lines: Sequence[Line]) -> str:
    """Return what clients that never trained are given, by both rules, as Markdown, a row for each seed."""
    head = ("rule", "seed", "clients that train", "novel clients", "their loss")
    text = [table_row(head), "|" + " --- |" * len(head)]
    for line in sorted((x for x in lines if x["set"] == "newcomers"), key=lambda x: (x["seed"], x["rule"])):
        scores = f"{line['test_mean']:.1f}", f"{line['novel_test_mean']:.1f}", f"{line['novel_test_loss']:.2f}"
        text.append(table_row((line["rule"], str(line["seed"]), *scores)))
    return "\n".join(text)


def main(words: Sequence[str] | None = None) -> None:
    """Add runs to the results, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", choices=RULES, default="now")
    parser.add_argument("--pays", type=Path, help="results of benchmarks.pays with pfedhn and 40 rounds")
    parser.add_argument("--newcomers", type=Path, nargs="*", default=(), help="folders of runs with novel clients")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(words)
    found = [x for x in (read(args.pays) if args.pays else []) if (x["strategy"], x["rounds"]) == ("pfedhn", 40)]
    new = [federation(x, args.rule) for x in found] + [newcomers(run, args.rule) for run in args.newcomers]
    lines = {(x["rule"], x["set"], x["seed"]): x for x in [*read(args.results), *new]}
    if new:
        write_bytes(args.results, "".join(json.dumps(line) + "\n" for line in lines.values()).encode())
    print(federations_table([*lines.values()]), newcomers_table([*lines.values()]), sep="\n\n")


TABLES = {
    "federations": lambda: federations_table(read(RESULTS)),
    "newcomers": lambda: newcomers_table(read(RESULTS)),
}

if __name__ == "__main__":
    main()
