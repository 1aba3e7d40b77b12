"""The attack on members: right where the answer is known, and there where a model knows its examples by heart."""

import pytest
import torch

from figures.membership import play, threshold
from hyperbloom.common.config import PrivacyConfig


def test_the_threshold_is_right_where_the_answer_is_known() -> None:
    assert threshold(torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4, 0.5])) == (1.0, 1.0)
    assert threshold(torch.ones(4), torch.ones(4)) == (0.5, 0.0)
    # 1 < 2 < 3 < 4, members 1 and 3: of four pairs three are in order; best at one threshold: 1/2 - 0, or 1 - 1/2.
    assert threshold(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0])) == (0.75, 0.5)
    assert threshold(torch.tensor([0.1]), torch.tensor([float("inf")]))[0] == 1.0


@pytest.mark.slow
def test_members_show_without_noise_and_hide_in_it() -> None:
    before, open_ = play("pfedhn", None, 12, 20, 0)
    _, hidden = play("pfedhn", PrivacyConfig(where="client", noise=3.0), 2, 20, 0)
    assert before.auc == pytest.approx(0.5, abs=0.1)
    assert open_.auc > 0.58 and open_.train_accuracy > open_.test_accuracy + 5
    assert hidden.auc == pytest.approx(0.5, abs=0.1)
