"""Ten seeds on the patients of four hospitals: each splits them anew, and only whole comparisons count."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

import hyperbloom
from figures import hospitals
from hyperbloom.common.data.load import load_client_data
from hyperbloom.common.data.spec import DataSpec


def test_each_seed_draws_other_test_patients_of_the_same_hospital(tmp_path: Path) -> None:
    path = hospitals.write_table(tmp_path / "patients.csv")
    specs = [DataSpec(path, schema=hospitals.SCHEMA, split="owner", partitions=4, partition=0, seed=s) for s in (0, 1)]
    first, second = (load_client_data(spec) for spec in specs)
    assert first.class_names == ("healthy", "disease")
    wholes = [sum(len(part) for part in (data.train, data.val, data.test)) for data in (first, second)]
    assert wholes[0] == wholes[1] and wholes[0] in (303, 294, 123, 200)
    assert not torch.equal(first.test.inputs, second.test.inputs)


def test_the_table_pairs_seeds_that_all_strategies_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    found = {"pfedhn": (80, 90, 10), "local": (78, 84), "fedavg": (81, 91)}  # the third seed is not whole
    lines = [
        {"setting": "defaults", "strategy": name, "seed": seed, "round": 1, "test": [value - 1, value + 1]}
        for name, values in found.items()
        for seed, value in enumerate(values)
    ]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    hospitals.main(["--table", "--results", str(results)])
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].strip("|").split("|")]
    assert cells[:5] == ["defaults", "2", "85.0", "81.0", "86.0"]
    # Of two seeds, a resample has the one, the other or both: the ends are the extremes.
    assert cells[5:] == ["+4.0 (+2.0 to +6.0)", "-1.0 (-1.0 to -1.0)"]

    ran: list[tuple[str, str, int]] = []

    def measure(setting: str, strategy: str, seed: int) -> hospitals.Line:
        ran.append((setting, strategy, seed))
        return lines[0]

    monkeypatch.setattr(hospitals, "measure", measure)
    regressions = mock.Mock(return_value=[])
    monkeypatch.setattr(hospitals, "measure_regressions", regressions)
    hospitals.main(["--results", str(results), "--seeds", "1", "2", "--settings", "defaults"])
    assert ran == [("defaults", "local", 2), ("defaults", "fedavg", 2)]
    assert regressions.mock_calls == [mock.call(1), mock.call(2)]


def test_regressions_with_deviations_tell_hospitals_apart_that_contradict_each_other() -> None:
    """The sign of a number says who is ill, in one hospital the other way round; a third says it with an offset."""
    rng = np.random.default_rng(0)

    def parts(says: Callable[[np.ndarray], np.ndarray]) -> list[hospitals.Part]:
        return [(x, says(x[:, 0]).astype(int)) for x in (rng.normal(size=(count, 2)) for count in (40, 20, 50))]

    three = [parts(lambda x: x > 0), parts(lambda x: x < 0), parts(lambda x: x > 1)]
    alone, one, own = (hospitals.regress(three, name) for name in hospitals.REGRESSIONS)
    assert min(alone) > 0.9 and min(own) > 0.9 and min(one) < 0.6


def test_alone_is_the_regression_with_the_least_mean_loss_on_validation_patients() -> None:
    rng = np.random.default_rng(1)
    two = [
        [(x, (x[:, 0] + rng.normal(size=len(x)) > 0).astype(int)) for x in rng.normal(size=(3, 30, 4))] for _ in "ab"
    ]
    losses, tests = [], []
    for penalty in hospitals.PENALTIES:
        fitted = [LogisticRegression(C=penalty, max_iter=5000).fit(*train) for train, _, _ in two]
        losses.append(np.mean([log_loss(y, m.predict_proba(x)) for m, (_, (x, y), _) in zip(fitted, two, strict=True)]))
        tests.append([m.score(*test) for m, (_, _, test) in zip(fitted, two, strict=True)])
    assert hospitals.regress(two, hospitals.ALONE) == tests[int(np.argmin(losses))]


def test_the_choice_of_a_round_is_compared_with_the_mean_of_the_later_half() -> None:
    def line(seed: int, **more: float) -> hospitals.Line:
        return {"setting": "defaults", "strategy": "local", "seed": seed, "test": [80.0 + seed, 90.0 + seed], **more}

    lines = [line(0, last=84.0, later=83.0), line(1, last=85.0, later=86.0), line(2)]  # the third is of an earlier run
    (row,) = hospitals.rounds(lines).splitlines()[2:]
    assert row == "| defaults | local | 2 | 85.5 | 84.5 | 84.5 | +1.0 (+0.0 to +2.0) |"


def test_a_line_has_the_mean_of_the_later_half_of_the_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hospitals.SETTINGS, "short", {"rounds": 5, "eval_every": 1, "local": {"steps": 1}})
    runs: list[hyperbloom.Run] = []

    def play(*args: Any, **more: Any) -> hyperbloom.Run:
        runs.append(hyperbloom.run(*args, **more))
        assert [row["round"] for row in runs[0].metrics if "test_mean" in row] == [1, 2, 3, 4, 5]
        means.extend(row["test_mean"] for row in runs[0].metrics if "test_mean" in row)
        return runs[0]

    means: list[float] = []
    monkeypatch.setattr(hospitals, "play", play)
    found = hospitals.measure("short", "local", 0)
    assert (found["last"], found["later"]) == (round(means[-1], 2), round(sum(means[2:]) / 3, 2))
