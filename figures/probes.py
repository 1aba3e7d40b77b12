"""What `flower-server advise` says of three unlike federations, as a user would ask it.

python -m figures.probes
"""

import json
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from figures.pages import table_row
from figures.study import Line, Study
from hyperbloom.server.cli import main

TOP = Path(__file__).parents[1]
PROBES = (
    "--config examples/demo.yaml",
    "--split iid --clients 10 --cohort 5 --max-train 30",
    "--data heart-disease --split owner --clients 4 --cohort 2",
)
"""Flags beside `--engine inline --seed 0`."""


def measure(probe: str) -> Line:
    """Ask for advice in a folder of its own; paths are those of the repository."""
    flags = [str(TOP / word) if (TOP / word).is_file() else word for word in shlex.split(probe)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        code = main(["advise", "--engine", "inline", "--seed", "0", *flags, "--run-dir", str(folder)])
        if code != 0:
            raise RuntimeError(f"flower-server advise {probe}: ended with code {code}")
        advice = json.loads((folder / "advice.json").read_text(encoding="utf-8"))
    return {key: advice[key] for key in ("strategy", "says")}


def table(lines: Sequence[Line]) -> str:
    """Return the recommended strategy and what was said of the scores, as Markdown."""
    rows = [table_row(["clients", "advice", "in its words"]), table_row(["---"] * 3)]
    for line in lines:
        words = "; ".join(each for each in line["says"] if " points" in each)
        rows.append(table_row([f"`{line['probe']}`", f"`{line['strategy']}`", words]))
    return "\n".join(rows)


STUDY = Study("probes", [{"probe": probe} for probe in PROBES], measure, {"table": table})
TABLES = STUDY.pages

if __name__ == "__main__":
    STUDY.main(__doc__)
