"""The tables of the paper's runs: which evaluation a cell has, and which runs a row."""

from typing import Any

import pytest

from figures import curves
from figures.curves import Row


def line(seed: int, rounds: int, points: list[tuple[int, float, float]], **more: Any) -> dict[str, Any]:
    """Return a run of MNIST with 50 clients; points are round, validation and test accuracy."""
    _, val, test = max(points, key=lambda point: (point[1], point[0]))
    about = {"table": "pfedhn-table3", "column": "mnist-50", "method": "FedAvg", "set": []}
    return about | {"seed": seed, "rounds": rounds, "round_val_test": points, "ours": test, "val": val} | more


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds of FedAvg, five clients in each round, stopped after 40 of 1,000; and a shorter run of another rate."""
    found = [line(seed, 40, [(20, 60.0, 50.0 + seed), (40, 55.0, 70.0 + seed)]) for seed in (0, 1)]
    found.append(line(0, 8, [(8, 90.0, 90.0)], set=["local.learning_rate=0.5"]))
    monkeypatch.setattr(curves, "lines", lambda: found)


def test_a_row_has_means_over_seeds_and_what_validation_selected() -> None:
    (row,) = curves.curves((100, 150, 200), [Row("pfedhn-table3", "mnist-50", "FedAvg")]).splitlines()[2:]
    assert row == "| MNIST, 50 clients, FedAvg | 2 | 50.5 |  | 70.5 | 50.50 +- 0.71 of 200 | 97.12 +- 0.07 |"


def test_rounds_tell_runs_apart_and_may_be_counted_themselves() -> None:
    rows = [Row("pfedhn-table3", "mnist-50", "FedAvg", 8, "faster")]
    assert curves.curves((8, 20), rows, in_rounds=True).splitlines()[2:] == [
        "| faster | 1 | 90.0 |  | 90.00 of 8 | 97.12 +- 0.07 |"
    ]


def test_a_row_without_runs_is_told() -> None:
    with pytest.raises(LookupError, match=r"rounds=9.*no such run"):
        curves.curves((8,), [Row("pfedhn-table3", "mnist-50", "FedAvg", 9)])
