"""The attack on members: right where the answer is known, and there where a model knows its examples by heart."""

import pytest
import torch

from figures.membership import play, table, threshold


def test_the_threshold_is_right_where_the_answer_is_known() -> None:
    assert threshold(torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4, 0.5])) == (1.0, 1.0)
    assert threshold(torch.ones(4), torch.ones(4)) == (0.5, 0.0)
    # 1 < 2 < 3 < 4, members 1 and 3: of four pairs three are in order; best at one threshold: 1/2 - 0, or 1 - 1/2.
    assert threshold(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0])) == (0.75, 0.5)
    assert threshold(torch.tensor([0.1]), torch.tensor([float("inf")]))[0] == 1.0


@pytest.mark.slow
def test_members_show_without_noise_and_hide_in_it() -> None:
    before, open_ = play("pfedhn", None, 12, 0)
    _, hidden = play("pfedhn", 3.0, 2, 0)
    assert before.auc == pytest.approx(0.5, abs=0.1)
    assert open_.auc > 0.58 and open_.train_accuracy > open_.test_accuracy + 5
    assert hidden.auc == pytest.approx(0.5, abs=0.1)


def test_rows_are_means_over_seeds_and_the_untrained_stand_once() -> None:
    def line(noise: float | None, auc: float) -> dict[str, object]:
        trained = {"auc": auc, "advantage": 0.2, "train_accuracy": 90.0, "test_accuracy": 80.0}
        return {"strategy": "fedavg", "noise": noise, "untrained": trained | {"auc": 0.5}, "trained": trained}

    assert table([line(None, 0.6), line(None, 0.7), line(20.0, 0.5)]).splitlines()[2:] == [
        "| fedavg | untrained | 0 | 0.500 | 0.200 | 90.0 | 80.0 |",
        "| fedavg | none | inf | 0.650 | 0.200 | 90.0 | 80.0 |",
        "| fedavg | 20, server | 2.59 | 0.500 | 0.200 | 90.0 | 80.0 |",
    ]
