"""Error feedback: nothing is lost for good, what is owed is bounded, and nothing bad is kept."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hyperbloom.client.keep.feedback import encode_with_feedback
from hyperbloom.client.keep.state import ClientState
from hyperbloom.common.compression import Codec
from hyperbloom.common.errors import HyperbloomError
from hyperbloom.common.layout import LARGEST_NORM, Layout
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import Scope

LAYOUT = Layout((("a", (40,)), ("b", (2, 5))))
NAMES = ("int8", "top-k:0.1", "top-k:0.1+int8", "top-k:0.02")


def codec(name: str) -> Codec:
    found = Codec.parse(name)
    assert found is not None
    return found


def changes(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(LAYOUT.numel, generator=generator) for _ in range(count)]


@pytest.fixture
def state(tmp_path: Path) -> ClientState:
    return ClientState(tmp_path / "state")


def send(state: ClientState, name: str, delta: Tensor, run_id: str = "run", bounded: bool = False) -> Tensor:
    """Return what the server makes of the next reply."""
    return codec(name).decode(
        encode_with_feedback(codec(name), state, Scope(run_id, 0, 0), LAYOUT, delta, bounded), LAYOUT
    )


def owed(state: ClientState, run_id: str = "run", layout: Layout = LAYOUT) -> Tensor:
    """Return what is kept, which must be there."""
    found = state.load_residual(Scope(run_id, 0, 0), layout)
    assert found is not None
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_was_sent_and_what_is_owed_add_up_to_all_changes(state: ClientState, name: str) -> None:
    deltas = changes(30)
    sent = [send(state, name, delta) for delta in deltas]
    torch.testing.assert_close(torch.stack(sent).sum(0) + owed(state), torch.stack(deltas).sum(0), rtol=0, atol=1e-5)
    assert not torch.equal(sent[1], codec(name).decode(codec(name).encode(deltas[1], LAYOUT), LAYOUT))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_owed_does_not_grow_beyond_what_the_share_allows(state: ClientState, name: str) -> None:
    # |e'| <= r |delta + e| with r = sqrt(1 - k / P): never above |delta| r / (1 - r), the sum of the series
    deltas = changes(120)
    ratio = (1 - codec(name).kept(LAYOUT.numel) / LAYOUT.numel) ** 0.5 if "top-k" in name else 0.01
    bound = max(float(delta.norm()) for delta in deltas) * (ratio / (1 - ratio) + 0.01)
    for delta in deltas:
        send(state, name, delta)
        assert float(owed(state).norm()) <= bound


RATE = 0.02


def descend(send_one: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Return where 400 rounds of two clients lead that agree on x_1 = 1 and pull x_0 in opposite directions.

    Client i has the loss `(x_1 - 1)^2 / 2 + 10 s_i x_0`, s = (1, -1): linear in the direction in which they disagree.
    """
    x = torch.zeros(50)
    for _ in range(400):
        steps = []
        for client, sign in enumerate((1.0, -1.0)):
            gradient = torch.zeros(50)
            gradient[0], gradient[1] = 10 * sign, x[1] - 1
            steps.append(send_one(client, -RATE * gradient))
        x = x + torch.stack(steps).mean(0)
    return x


@pytest.mark.parametrize("name", ["top-k:0.02+int8", "top-k:0.1"])
def test_bounded_what_is_owed_keeps_its_direction_within_the_norm_of_the_change(state: ClientState, name: str) -> None:
    before, cut = torch.zeros(LAYOUT.numel), 0
    for delta in (each.abs() for each in changes(20)):  # asks for the same again and again
        lost = delta + before - send(state, name, delta, bounded=True)
        factor = min(1.0, float(delta.norm() / lost.norm()))
        before, cut = owed(state), cut + (factor < 1)
        torch.testing.assert_close(before, lost * factor, rtol=0, atol=1e-5)
    assert cut > 10  # without the bound it would have grown to several times as much


def test_a_bound_that_is_not_reached_changes_nothing_and_after_no_change_nothing_is_owed(state: ClientState) -> None:
    other = ClientState(state.folder.parent / "other")
    for delta in changes(5):
        assert torch.equal(send(state, "int8", delta, bounded=True), send(other, "int8", delta))
        assert torch.equal(owed(state), owed(other))
    assert int(send(state, "top-k:0.1", torch.zeros(LAYOUT.numel), bounded=True).count_nonzero()) == 5
    assert not owed(state).any()


def test_where_the_largest_entry_hides_the_others_top_k_stalls_without_feedback_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    one = codec("top-k:0.02")
    states = [ClientState(tmp_path / "0"), ClientState(tmp_path / "1")]
    without = descend(lambda client, delta: one.decode(one.encode(delta, LAYOUT), LAYOUT))
    assert float(without.norm()) == 0.0
    # One entry a reply: x_1 has its turn when more is owed on it than on x_0, and overshoots by no more than that.
    found = descend(lambda client, delta: send(states[client], "top-k:0.02", delta))
    assert float(found[1]) == pytest.approx(1.0, abs=10 * RATE)
    assert float(found[0].abs()) <= 2 * 10 * RATE


def test_what_is_owed_survives_a_restart(state: ClientState) -> None:
    first, second = changes(2)
    send(state, "top-k:0.1", first)
    steady = owed(state)
    sent = send(ClientState(state.folder), "top-k:0.1", second)
    torch.testing.assert_close(sent + owed(state), second + steady)


def test_another_run_or_network_owes_nothing_and_there_is_one_file(state: ClientState) -> None:
    delta = changes(1)[0]
    plain = codec("top-k:0.1").decode(codec("top-k:0.1").encode(delta, LAYOUT), LAYOUT)
    send(state, "top-k:0.1", 10 * delta.flip(0))
    other = Layout((("a", (50,)),))
    assert state.load_residual(Scope("run", 0, 0), other) is None
    assert torch.equal(send(state, "top-k:0.1", delta, run_id="next"), plain)
    assert state.load_residual(Scope("run", 0, 0), LAYOUT) is None
    torch.testing.assert_close(owed(state, "next"), delta - plain)
    assert [path.name for path in state.folder.iterdir()] == ["residual.safetensors"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2 * LARGEST_NORM, 3e38])
def test_of_a_change_that_no_server_takes_nothing_is_kept(state: ClientState, bad: float) -> None:
    good = changes(1)[0]
    send(state, "top-k:0.1", good)
    spoiled = good.clone()
    spoiled[7] = bad
    with pytest.raises(HyperbloomError, match=r"training diverged \(norm .*lower local.learning_rate") as caught:
        encode_with_feedback(codec("top-k:0.1"), state, Scope("run", 0, 0), LAYOUT, spoiled, bounded=True)
    assert caught.value.reason is Reason.DIVERGED
    assert state.load_residual(Scope("run", 0, 0), LAYOUT) is None
    assert bool(send(state, "top-k:0.1", good).isfinite().all())


@pytest.mark.parametrize("content", [b"", b"no tensors", b"\xff" * 100])
def test_a_damaged_file_is_as_good_as_none(state: ClientState, content: bytes) -> None:
    delta = changes(1)[0]
    fresh = send(state, "int8", delta)
    (state.folder / "residual.safetensors").write_bytes(content)
    assert torch.equal(send(state, "int8", delta), fresh)


@pytest.mark.parametrize("spoiled", [True, False])
def test_a_residual_that_was_sent_since_does_not_come_back(state: ClientState, spoiled: bool) -> None:
    """A version is kept for a checkpoint. The newest one goes: by a change that diverges, or by another run."""
    delta, codec_ = changes(1)[0], codec("top-k:0.1")
    for number in (1, 2):
        scope = Scope("run", number, 0, resume_points=(1,)[: number - 1])
        encode_with_feedback(codec_, state, scope, LAYOUT, delta, bounded=False)
    assert list((state.folder / "earlier").iterdir())
    if spoiled:
        with suppress(HyperbloomError):
            encode_with_feedback(codec_, state, Scope("run", 3, 0, (1,)), LAYOUT, delta * torch.nan, bounded=False)
    else:
        encode_with_feedback(codec_, state, Scope("other", 1, 0), LAYOUT, delta, bounded=False)
    assert state.load_residual(Scope("run", 4, 0, (1,)), LAYOUT) is None


def test_a_residual_without_noise_is_not_added_to_a_noisy_change(state: ClientState) -> None:
    delta, scope = changes(1)[0], Scope("run", 1, 0)
    encode_with_feedback(codec("top-k:0.1"), state, scope, LAYOUT, delta, False)
    assert state.load_residual(scope, LAYOUT) is not None
    noisy = encode_with_feedback(codec("top-k:0.1"), state, scope, LAYOUT, 1e-6 * delta, False, "Noise(1e-6, 8)")
    assert float(codec("top-k:0.1").decode(noisy, LAYOUT).norm()) < 1e-5 * float(delta.norm())
