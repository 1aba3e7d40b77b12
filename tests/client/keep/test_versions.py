"""Earlier versions of a file stay for as long as the server may go back to them."""

from pathlib import Path

import pytest
import torch

from hyperbloom.client.keep.state import ClientState
from hyperbloom.common.layout import Layout
from hyperbloom.common.wire.orders import Scope


@pytest.fixture
def state(tmp_path: Path) -> ClientState:
    """Return the state of a client that never ran."""
    return ClientState(tmp_path / "state")


LAYOUT = Layout((("weight", (2, 3)), ("bias", (2,))))


VALUES = torch.linspace(-1, 1, LAYOUT.numel) / 3


def scope(run_id: str = "run-1", number: int = 0, resume_points: tuple[int, ...] = ()) -> Scope:
    return Scope(run_id, number, 0, resume_points)


def test_earlier_versions_of_a_complete_run_are_forgotten_and_no_others(state: ClientState) -> None:
    for run in ("run-1-pfedhn", "run-1-fedavg", "run-12-pfedhn"):
        for number in (1, 2, 3):
            state.save_personal(scope(run, number, (1, 2)), LAYOUT, VALUES)
    state.save_residual(scope("run-1-pfedhn", 1), LAYOUT, VALUES)
    state.save_residual(scope("run-1-pfedhn", 2, (1,)), LAYOUT, VALUES)
    earlier = state.folder / "earlier"
    kept = {path.name for path in earlier.iterdir() if path.name.startswith("run-12")}
    assert len(list(earlier.iterdir())) > 2 * len(kept) > 0
    state.forget_earlier("run-1")
    assert {path.name for path in earlier.iterdir()} == kept
    assert state.load_personal(scope("run-1-pfedhn"), LAYOUT), "the newest is where it was"
    ClientState(state.folder / "never").forget_earlier("run-1")


def test_the_beginning_of_a_runs_id_forgets_nothing_of_it(state: ClientState) -> None:
    """A server knows how the runs of others begin: with a folder's name, often a strategy and a date."""
    run = "pfedhn-20261128-031500-0a1b2c3d"
    for number in (1, 2):
        state.save_personal(scope(f"{run}-fedavg-ft", number, (1,)), LAYOUT, VALUES)
        state.save_residual(scope(f"{run}-fedavg-ft", number, (1,)), LAYOUT, VALUES)
    versions = kept(state)
    for beginning in ("pfedhn", "pfedhn-20261128", "pfedhn-20261128-031500", f"{run}-fedavg-ft"):
        state.forget_earlier(beginning)
        assert kept(state) == versions != []
    state.forget_earlier(run)
    assert kept(state) == []


def kept(state: ClientState) -> list[str]:
    return sorted(path.name for path in (state.folder / "earlier").glob("*"))


def test_after_a_rewind_the_version_of_that_time_is_found(state: ClientState) -> None:
    for number in (1, 2, 3):
        state.save_personal(scope("run", number, (1,)), LAYOUT, VALUES * number)
    assert kept(state) == ["run@1-0.safetensors"]
    for rewound, factor in (((), 3), ((1,), 1)):
        found = state.load_personal(Scope("run", 4, 0, (1,), rewound), LAYOUT)
        assert found is not None and torch.equal(found[0], VALUES * factor)
    state.save_personal(Scope("run", 2, 0, (1,), (1,)), LAYOUT, VALUES * 20)
    found = state.load_personal(Scope("run", 3, 0, (1,), (1,)), LAYOUT)
    assert found is not None and torch.equal(found[0], VALUES * 20), "what was written after the rewind is part of it"
    assert state.load_personal(Scope("run", 3, 0, (), (1, 0)), LAYOUT) is None, "nothing is as old as that"


def test_whatever_a_server_says_no_more_stay_than_it_has_checkpoints(state: ClientState) -> None:
    for number in range(1, 9):
        state.save_personal(scope("run", number, tuple(range(number))), LAYOUT, VALUES)
    assert kept(state) == ["run@6-0.safetensors", "run@7-0.safetensors"]
    for number in range(9):  # and of residuals, those of one run
        state.save_residual(scope(f"run-{number}", 2, (1, 2)), LAYOUT, VALUES)
    assert len([name for name in kept(state) if name.startswith("residual-")]) == 1
