"""Event files as TensorBoard reads them."""

from pathlib import Path

import pytest

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.wire.orders import TrainResult
from hyperbloom.server.watch import tensorboard
from hyperbloom.server.watch.tensorboard import TensorBoard, check_tensorboard

from ..recorded import Recording

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars by name, each with its rounds, as TensorBoard reads them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_curves_are_those_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run, board = Recording(tmp_path / "run"), TensorBoard(tmp_path)
    for name in ("pfedhn", "local"):
        board.phase(run.strategy(name), name)
        for number in (1, 2, 3, 4):
            board.round_done(run.report(number))
        board.phase_done(run.strategy(name))
    for name in ("pfedhn", "local"):
        found = curves(tmp_path / "tensorboard" / name)
        assert dict(found["accuracy/test_mean"]) == pytest.approx({2: 21.0, 4: 41.0})
        assert dict(found["accuracy/test_worst"]) == pytest.approx({2: 20.0, 4: 40.0})
        assert dict(found["training/loss"]) == pytest.approx({1: 1.0, 2: 0.5, 3: 1 / 3, 4: 0.25})
        assert found["round/bytes down"] == [(number, 2000.0) for number in (1, 2, 3, 4)]


def test_without_losses_there_is_no_curve_of_zeros(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run, board = Recording(tmp_path / "run"), TensorBoard(tmp_path)
    board.phase(run.strategy("pfedhn"), "pfedhn")
    report = run.report(1)
    report.outcome.results["a"] = TrainResult(0.1, loss=None)
    board.round_done(report)
    board.close()
    found = curves(tmp_path / "tensorboard" / "pfedhn")
    assert "training/loss" not in found and found["round/left out"] == [(1, 0.0)]


def test_a_run_that_is_resumed_goes_on_where_it_went_back_to(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = Recording(tmp_path / "run")
    for first, last in ((1, 4), (3, 5)):
        board = TensorBoard(tmp_path)
        board.phase(run.strategy("pfedhn"), "pfedhn")
        for number in range(first, last + 1):
            board.round_done(run.report(number))
        board.close()
    found = curves(tmp_path / "tensorboard" / "pfedhn")
    assert [step for step, _ in found["round/seconds"]] == [1, 2, 3, 4, 5]


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'hyperbloom\[tensorboard\]'"):
        check_tensorboard()
