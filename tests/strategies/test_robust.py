"""Updates that a few clients cannot turn."""

from typing import Any

import pytest
import torch

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.hypernetworks.learner import Reply
from hyperbloom.strategies.pfedhn import clip_changes, clip_norms

from .conftest import introduction, joined, update_of


def test_norms_by_hand() -> None:
    """Norms 1, 5, 10, 50 and 0: the median is 5."""
    deltas = torch.tensor([[1.0, 0.0], [3.0, 4.0], [-6.0, 8.0], [30.0, -40.0], [0.0, 0.0]])
    expected = torch.tensor([[1.0, 0.0], [3.0, 4.0], [-3.0, 4.0], [3.0, -4.0], [0.0, 0.0]])
    torch.testing.assert_close(clip_norms(deltas, "median"), expected)
    torch.testing.assert_close(clip_norms(deltas, 10.0)[2:4], torch.tensor([[-6.0, 8.0], [6.0, -8.0]]))
    # Two of four cannot raise it.
    assert clip_norms(deltas[[0, 1, 3, 3]], "median").norm(dim=1).max() == pytest.approx(5.0)


def test_sizes_are_compared_among_themselves_and_the_order_is_kept() -> None:
    replies = [
        Reply(row, size, torch.full((length,), value))
        for row, (size, length, value) in enumerate(
            [("M", 4, 1.0), ("S", 1, 9.0), ("M", 4, 2.0), ("M", 4, 90.0), ("S", 1, 1.0)]
        )
    ]
    done = clip_changes(replies, "median")
    assert [reply.row for reply in done] == [0, 1, 2, 3, 4]
    assert [reply.delta.tolist()[0] for reply in done] == [1.0, 1.0, 2.0, 2.0, 1.0]


def test_asynchronous_mode_has_no_cohort_to_compare_with() -> None:
    with pytest.raises(ConfigError, match="asynchronous has none"):
        make_algorithm(RunConfig(strategy="pfedhn", asynchronous=True, options={"clip_deltas": "median"}))


@pytest.mark.parametrize(("clip", "norms"), [(2.0, [2.0, 0.0, 2.0, 2.0]), ("median", [1.0, 0.0, 1.0, 1.0])])
def test_the_option_reaches_the_learner(clip: Any, norms: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"clip_deltas": clip, "hidden_dim": 4, "start": "hypernetwork"}
    config = RunConfig(strategy="pfedhn", sizes=("S",), options=options)
    made = joined(config, *map(introduction, "abcd"))
    learned: list[Reply] = []
    monkeypatch.setattr(made.learner, "update", lambda replies, rule: learned.extend(replies))
    size = made.setting.layouts["S"].numel
    root = size**0.5 if clip == "median" else 1.0
    values = (1.0, 0.0, 5.0, -9.0)
    made.learn([update_of(made.clients[row], torch.full((size,), value)) for row, value in enumerate(values)])
    assert [float(reply.delta.norm()) for reply in learned] == pytest.approx([root * norm for norm in norms], rel=1e-4)


def test_with_the_default_start_a_large_change_moves_neither_the_network_for_all_nor_what_is_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = RunConfig(strategy="pfedhn", sizes=("S",), options={"clip_deltas": 2.0, "hidden_dim": 4})
    made = joined(config, introduction("a"))
    learned: list[Reply] = []
    monkeypatch.setattr(made.learner, "update", lambda replies, rule: learned.extend(replies))
    before = made.learner.hypernetwork.start("S").clone()
    sent = made.weights([made.clients[0]])[0].values
    made.learn([update_of(made.clients[0], torch.full_like(sent, 9.0), sent=sent)])
    assert float((made.learner.hypernetwork.start("S") - before).norm()) <= 2.001
    assert [float(reply.delta.norm()) for reply in learned] == pytest.approx([2.0], rel=1e-4)
