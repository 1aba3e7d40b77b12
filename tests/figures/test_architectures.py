"""The study of HAFL-GHN: what its tables say, from lines of results."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from scipy.stats import ttest_rel

from figures.architectures import paired, passes_table

ROOT = Path(__file__).resolve().parents[2]


def line(method: str, seed: int, curve: list[tuple[int, float]]) -> dict[str, Any]:
    """Return a line of results of the first architecture."""
    return {"experiment": "hafl-0", "method": method, "seed": seed, "curve": [list(point) for point in curve]}


def test_passes_are_counted_to_the_first_at_which_the_mean_over_seeds_is_there() -> None:
    lines = [
        line("HAFL-GHN", 0, [(0, 10.0), (1, 32.0), (2, 36.0), (3, 29.0)]),
        line("HAFL-GHN", 1, [(0, 12.0), (1, 26.0), (2, 34.0), (3, 29.0)]),  # means: 11, 29, 35, 29
        line("local", 0, [(1, 20.0), (2, 29.9), (3, 30.0)]),
        {"experiment": "hafl-1", "method": "local", "seed": 0, "curve": [[1, 99.0]]},  # nothing to compare with
    ]
    assert passes_table(lines).splitlines()[2:] == ["| hafl-0 | 30 % | 2 | 3 |", "| hafl-0 | 35 % | 2 | never |"]


def test_a_process_of_its_own_finds_every_method() -> None:
    """Cells run in fresh processes, which have imported nothing else of the figures."""
    code = (
        "from figures.architectures import METHODS; from hyperbloom.strategies import find_strategy\n"
        "for strategy, _, _ in METHODS.values(): find_strategy(strategy)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_what_the_graph_adds_is_paired_by_seed() -> None:
    scores = {"HAFL-GHN": [42.0, 38.0, 40.5, 43.0], "no graph": [38.0, 37.5, 38.0, 37.0], "local": [41.0, 41.0]}
    lines = [
        {
            "experiment": "plain CNNs",
            "method": method,
            "seed": seed,
            "test": {"client-0": each - 1, "client-1": each + 1},
        }
        for method, found in scores.items()
        for seed, each in enumerate(found)
    ]
    wanted = ttest_rel(scores["HAFL-GHN"], scores["no graph"])
    low, high = wanted.confidence_interval()
    row = f"| plain CNNs | 4 | +3.2 ({low:+.1f} to {high:+.1f}) | {wanted.pvalue:.3f} |"
    assert paired([*lines, {**lines[0], "seed": 9}]).splitlines()[2:] == [row]
    assert len(paired([{**each, "experiment": "rates"} for each in lines] + lines[:1]).splitlines()) == 2
