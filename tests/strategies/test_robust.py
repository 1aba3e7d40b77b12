"""Updates that a few clients cannot turn."""

from typing import Any

import pytest
import torch

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.hypernetworks import robust
from hyperbloom.strategies.hypernetworks.learner import Reply
from hyperbloom.strategies.hypernetworks.robust import clip_norms, harden, trim

from .conftest import introduction, joined, update_of


def test_norms_by_hand() -> None:
    """Norms 1, 5, 10, 50 and 0: the median is 5."""
    deltas = torch.tensor([[1.0, 0.0], [3.0, 4.0], [-6.0, 8.0], [30.0, -40.0], [0.0, 0.0]])
    expected = torch.tensor([[1.0, 0.0], [3.0, 4.0], [-3.0, 4.0], [3.0, -4.0], [0.0, 0.0]])
    torch.testing.assert_close(clip_norms(deltas, "median"), expected)
    torch.testing.assert_close(clip_norms(deltas, 10.0)[2:4], torch.tensor([[-6.0, 8.0], [6.0, -8.0]]))
    # Two of four cannot raise it.
    assert clip_norms(deltas[[0, 1, 3, 3]], "median").norm(dim=1).max() == pytest.approx(5.0)


def test_the_mean_is_the_trimmed_mean_and_the_rest_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust, "COLUMNS_AT_ONCE", 7)
    deltas = torch.randn(11, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    done = trim(deltas, 0.2)  # two at each end
    for column in range(40):
        kept = sorted(deltas[:, column].tolist())[2:-2]
        mean = sum(kept) / 7
        assert float(done[:, column].mean()) == pytest.approx(mean, rel=1e-12)
        for before, after in zip(deltas[:, column].tolist(), done[:, column].tolist(), strict=True):
            assert after == (before if before in kept else pytest.approx(mean, rel=1e-12))
    assert trim(deltas, 0.05) is deltas


def test_what_one_client_says_is_bounded_by_what_the_others_say() -> None:
    deltas = torch.randn(10, 20, generator=torch.Generator().manual_seed(1))
    lowest, highest = deltas[1:].min(0).values, deltas[1:].max(0).values
    for lie in (1e6, -1e6):
        deltas[0] = lie
        done = trim(deltas, 0.1)
        assert bool(((done >= lowest) & (done <= highest)).all())


def test_sizes_are_compared_among_themselves_and_the_order_is_kept() -> None:
    replies = [
        Reply(row, size, None, torch.full((length,), value))
        for row, (size, length, value) in enumerate(
            [("M", 3, 1.0), ("S", 2, 9.0), ("M", 3, 2.0), ("M", 3, 90.0), ("S", 2, 1.0)]
        )
    ]
    done = harden(replies, None, 0.34)
    assert [reply.row for reply in done] == [0, 1, 2, 3, 4]
    assert [reply.delta.tolist()[0] for reply in done] == [2.0, 9.0, 2.0, 2.0, 1.0]
    assert harden(replies, None, 0.0) == replies


@pytest.mark.parametrize("options", [{"trim": 0.1}, {"clip_deltas": "median"}])
def test_asynchronous_mode_has_no_cohort_to_compare_with(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="asynchronous has none"):
        make_algorithm(RunConfig(strategy="pfedhn", asynchronous=True, options=options))


def test_the_options_reach_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"clip_deltas": 2.0, "trim": 0.25, "hidden_dim": 4}
    config = RunConfig(strategy="pfedhn", sizes=("S",), options=options)
    made = joined(config, *map(introduction, "abcd"))
    learned: list[Reply] = []
    monkeypatch.setattr(made.learner, "update", lambda replies, rule: learned.extend(replies))
    size = made.setting.layouts["S"].numel
    values = (1.0, 0.0, 5.0, -9.0)
    made.learn([update_of(made.clients[row], torch.full((size,), value)) for row, value in enumerate(values)])
    norms = [float(reply.delta.norm()) for reply in learned]
    assert max(norms) <= 2.0 + 1e-5
    assert learned[0].delta[0] == pytest.approx(2.0 / size**0.5 / 2, rel=1e-5)  # of 1 (clipped) and 0, ends cut off
