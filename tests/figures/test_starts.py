"""The table of starts and rates: means over the seeds that a row's variants share."""

from pathlib import Path
from typing import Any

from figures.starts import AS_WRITTEN, BEGIN, END, LARGE, SAME, read, table, variants

TOP = Path(__file__).parents[2]


def line(variant: str, seed: int, selected: float) -> dict[str, Any]:
    """Return a result on the first set with large networks."""
    return {"set": LARGE[0], "variant": variant, "rounds": 40, "seed": seed, "selected": selected}


def test_a_row_has_the_seeds_of_all_its_variants() -> None:
    lines = [line("the default", seed, 90.0 + seed) for seed in range(3)]
    lines += [line("0.001, constant", 2, 89.5), line(AS_WRITTEN, 0, 88.0), line(SAME, 0, 88.5), line(SAME, 2, 89.0)]
    starts, rates = table(lines).split("\n\n")
    assert starts.splitlines()[2].startswith(f"| {LARGE[0]} | 40 | 1 |") and "| 88.0 |" in starts
    assert "| 40 | 1 | 89.5 |" in rates and "| 92.0 |" in rates


def test_large_networks_are_run_with_other_rates_with_the_first_seed() -> None:
    assert "0.02, cosine" in variants(LARGE[0], 0) and variants(LARGE[0], 1) == [AS_WRITTEN, SAME]


def test_the_page_has_the_committed_results() -> None:
    found = table(read(TOP / "figures" / "starts.jsonl"))
    assert f"{BEGIN}\n\n{found}\n\n{END}" in (TOP / "docs" / "pays.md").read_text(encoding="utf-8")
