"""The table of starts and rates: means over seeds, and what fewer seeds are compared with."""

from pathlib import Path
from typing import Any

from figures.starts import BEGIN, END, LARGE, read, table, variants

TOP = Path(__file__).parents[2]


def line(variant: str, seed: int, selected: float) -> dict[str, Any]:
    """Return a result on the first set with large networks."""
    return {"set": LARGE[0], "variant": variant, "rounds": 40, "seed": seed, "selected": selected}


def test_fewer_seeds_are_compared_with_the_default_of_the_same_seeds() -> None:
    lines = [line("the default", seed, 90.0 + seed) for seed in range(3)]
    lines += [line("a fifth of the local rate", 2, 89.5), line("training begins as written", 0, 88.0)]
    row = table(lines).splitlines()[2]
    assert "| 40 | 3 |" in row
    assert "| 91.0 |" in row  # the mean of three
    assert "| 89.5 (-2.5, 1 of 3) |" in row and "| 88.0 (-2.0, 1 of 3) |" in row


def test_large_networks_are_run_with_other_rates() -> None:
    assert variants(LARGE[0])[-2:] == ["a fifth of the local rate", "four times the local rate"]


def test_the_page_has_the_committed_results() -> None:
    found = table(read(TOP / "figures" / "starts.jsonl"))
    assert f"{BEGIN}\n\n{found}\n\n{END}" in (TOP / "docs" / "pays.md").read_text(encoding="utf-8")
