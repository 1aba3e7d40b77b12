"""The study of HAFL-GHN: what its tables say, from lines of results."""

from pathlib import Path
from typing import Any

from figures.architectures import passes_table, read

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


def test_the_page_has_the_table_that_the_results_give() -> None:
    found = passes_table(read(ROOT / "figures" / "ghn.jsonl"))
    assert len(found.splitlines()) == 2 + 2 * 4
    assert found in (ROOT / "docs" / "ghn.md").read_text()
