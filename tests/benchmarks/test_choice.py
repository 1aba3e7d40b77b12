"""Rules for the choice between the federation's models and one trained alone: their table, and the one taken."""

from types import SimpleNamespace
from typing import Any

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
