"""Rules for the choice between the federation's models and one trained alone: their table, and the one taken."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import choice
from hyperbloom.client.work import comparison
from hyperbloom.client.work.scoring import score_of
from hyperbloom.common.data import Examples


def test_the_table_has_gains_and_losers() -> None:
    lines = [
        {
            "set": choice.HEART,
            "seed": seed,
            "gain": dict.fromkeys(choice.RULES, gains),
            "taken": dict.fromkeys(choice.RULES, 1),
        }
        for seed, gains in enumerate([[4.0, -2.0], [0.0, -1.0]])
    ]
    head, _, *rows = choice.table(lines).splitlines()
    assert "(2 seeds)" in head and len(rows) == len(choice.RULES)
    assert all(row.endswith("| +0.2, 25 % lose | 25 % of 4 | 50 % |") for row in rows)


@pytest.mark.parametrize("right", range(3, 13, 3))
def test_the_rule_that_is_taken_is_that_of_clients(right: int) -> None:
    data = Examples(torch.zeros(12, 1), torch.zeros(12, dtype=torch.long))

    def trial(count: int, loss: float) -> Any:
        answers = torch.tensor([[1.0, 0.0]] * count + [[0.0, 1.0]] * (12 - count))
        losses = loss * torch.arange(12.0).double()
        score = score_of(data, answers, 2, float(losses.mean()), ("accuracy",), disclose=False)
        return SimpleNamespace(answers=[answers, answers], losses=losses, outputs=2, val=score, test=score)

    trials = {"personal": trial(right, 0.1), "tuned": trial(right - 1, 0.2), "alone": trial(5, 0.3)}
    chosen = comparison._choose(trials, "accuracy")
    assert choice.RULES[choice.TAKEN](trials, data) == chosen == ("personal" if right > 5 else "alone")


def test_the_rules_by_accuracy_count_a_patient_once() -> None:
    images = Examples(torch.zeros(12, 1), torch.zeros(12, dtype=torch.long))
    patients = replace(images, groups=np.repeat(range(4), 3))

    def trial(right: int) -> Any:
        answers = torch.tensor([[1.0, 0.0]] * right + [[0.0, 1.0]] * (12 - right))
        return SimpleNamespace(answers=[answers], val=score_of(images, answers, 2, 0.1, ("accuracy",), disclose=False))

    trials = {"personal": trial(12), "alone": trial(9)}  # better on one of four patients, by three images
    rule = choice.RULES["the best, if surely better by 1 standard error"]
    assert rule(trials, images) == "personal" and rule(trials, patients) == "alone"
