"""The inline engine's grid, and whole runs in which it trains cohorts at once."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from safetensors.torch import load_file
from torch import Tensor

from hyperbloom.client.app import train_all
from hyperbloom.client.work import together
from hyperbloom.common.config import LocalConfig, RunConfig
from hyperbloom.common.wire.orders import SGD, Failed, Greeting, Introduction, Scope, Target, TrainOrder, TrainResult
from hyperbloom.common.wire.pack import pack, unpack_answer
from hyperbloom.server.grids import engine
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.server.grids.inline import InlineGrid
from hyperbloom.server.loop.listener import Listener, RoundReport
from hyperbloom.server.loop.session import Session
from hyperbloom.strategies.algorithm import Algorithm


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of clients of every group that trains at once."""
    sizes: list[int] = []
    real = together.train_rows

    def noted(*arguments: Any) -> Tensor:
        sizes.append(len(arguments[-1]))
        return real(*arguments)

    monkeypatch.setattr(together, "train_rows", noted)
    return sizes


class Last(Listener):
    """Keeps the algorithm, and what each client's training brought in the last round; nobody may be left out."""

    def phase_done(self, algorithm: Algorithm) -> None:
        self.state = algorithm.state()

    def round_done(self, report: RoundReport) -> None:
        assert not report.outcome.refused
        losses = {name: result.loss for name, result in report.outcome.results.items()}
        self.losses = losses or self.losses


def run(config: RunConfig, folder: Path, vectorise: bool) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Run a strategy; returns the server's state at the end, and each client's loss in the last round's training."""
    last = Last()
    selections = Session(config, inline_grid(config, folder, vectorise), "run", [last]).run()
    return last.state, [last.losses, dict(selections[config.strategy].metrics)]


@pytest.mark.parametrize(
    ("strategy", "sizes", "changes"),
    [
        ("pfedhn", "M", {}),
        ("pfedhn", "SML", {}),
        ("pfedhn-pc", "SM", {}),
        ("fedavg", "M", {}),
        ("local", "S", {}),
        ("pfedhn-pc", "SM", {"compression": "int8"}),
        ("fedavg", "M", {"compression": "int8"}),
        ("pfedhn", "M", {"adapt": "head"}),
        ("pfedhn", "M", {"asynchronous": True}),
    ],
)
def test_a_run_that_trains_at_once_equals_one_that_does_not(
    tmp_path: Path, groups: list[int], strategy: str, sizes: str, changes: dict[str, Any]
) -> None:
    """Up to the rounding of float32, of which four rounds make no more than 1e-5, and to a last bit in 16."""
    config = RunConfig(
        strategy=strategy,
        sizes=tuple(sizes),
        clients=6,
        cohort=5,
        rounds=4,
        eval_every=2,
        local=LocalConfig(steps=5, batch_size=16, learning_rate=0.05, clip=1.0),
        options={"hidden_dim": 16} if strategy.startswith("pfedhn") else {},
        **changes,
    )
    wanted, figures = run(config, tmp_path / "one", False)
    assert groups == []
    got, found = run(config, tmp_path / "other", True)
    assert sum(groups) >= 4 * (5 - len(sizes) + 1)
    assert got.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-5, atol=1e-5)
    for one, other in zip(found, figures, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.safetensors"))
    assert any(path.parent.name == "personal" for path in files) == (strategy in ("pfedhn-pc", "local"))
    assert any(path.name == "residual.safetensors" for path in files) == ("compression" in changes)
    tolerance = 3e-5 if changes else 1e-5
    for path in files:
        one_file, other_file = (load_file(tmp_path / way / path) for way in ("one", "other"))
        for name in one_file:
            torch.testing.assert_close(other_file[name], one_file[name], rtol=1e-5, atol=tolerance)


# ---------------------------------------------------------------------- the grid


def four_clients(folder: Path, vectorise: bool) -> InlineGrid:
    """Return a grid of four clients on the digits."""
    return inline_grid(RunConfig(clients=4), folder, vectorise)


def order(grid: InlineGrid, node: int, **changes: Any) -> Message:
    """Return an order to train something that stays on the client."""
    values: dict[str, Any] = {"model": "mlp", "num_classes": 10, "round": 1} | changes
    target = Target(values["model"], values["num_classes"], "all")
    sgd = SGD(2, 64, 5e-3, 0.9, 5e-5, 50.0)
    content = TrainOrder(Scope("run", values["round"], 0), target, sgd, "nothing")
    return Message(pack(content), node, TrainOrder.message_type)


def answers(grid: InlineGrid) -> list[str | float | Introduction]:
    """Send orders, good ones and bad ones, and a greeting; returns what came back for each, in order."""
    broken = order(grid, 4)
    broken.content["hyperbloom"]["sgd.steps"] = 2.5  # type: ignore[index]
    messages = [
        order(grid, 2),
        Message(pack(Greeting("0")), 2, Greeting.message_type),
        order(grid, 2, round=2),
        order(grid, 5, num_classes=9),
        broken,
        order(grid, 4, model="resnet"),
        order(grid, 3, round=2),
    ]
    ids = list(grid.push_messages(messages))
    replies = list(grid.pull_messages(ids))
    assert [reply.metadata.reply_to_message_id for reply in replies] == ids
    assert [reply.metadata.src_node_id for reply in replies] == [2, 2, 2, 5, 4, 4, 3]
    found: list[str | float | Introduction] = []
    for reply in replies:
        kind = Introduction if reply.metadata.message_type == Greeting.message_type else TrainResult
        answer = unpack_answer(kind, reply.content)
        found.append(
            answer.text if isinstance(answer, Failed) else answer.loss if isinstance(answer, TrainResult) else answer
        )
    return found


def test_replies_and_errors_are_those_of_one_by_one(tmp_path: Path, groups: list[int]) -> None:
    folder = tmp_path / "same"
    one_by_one = answers(four_clients(folder, vectorise=False))
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    engine.client_for.cache_clear()
    at_once = answers(four_clients(folder, vectorise=True))
    assert groups == [2]
    assert [type(answer) for answer in at_once] == [float, Introduction, float, str, str, str, float]
    assert at_once[3] == "order: 9 classes, but this client's data have 10"
    assert at_once[4] == "order: TrainOrder.sgd.steps: expected int, found float"
    for got, want in zip(at_once, one_by_one, strict=True):
        assert got == (pytest.approx(want, rel=1e-5) if isinstance(want, float) else want)


def test_a_defect_in_a_users_code_leaves_its_lines_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(message: Message, context: Context) -> Message:
        raise ZeroDivisionError("mine")

    grid = four_clients(tmp_path, vectorise=False)
    monkeypatch.setattr(grid, "app", broken)
    (reply,) = grid.pull_messages(grid.push_messages([order(grid, 2)]))
    assert reply.error.reason == "ZeroDivisionError: mine"
    assert "train failed" in caplog.text and 'raise ZeroDivisionError("mine")' in caplog.text


def test_only_orders_to_train_are_answered_together(tmp_path: Path) -> None:
    asked: list[int] = []

    def noted(messages: Sequence[tuple[Message, Context]]) -> list[Message | Exception]:
        asked.append(len(messages))
        return train_all(messages)

    grid = four_clients(tmp_path, vectorise=False)
    grid.train_all = noted
    answers(grid)
    assert asked == [1, 5]
    assert list(grid.pull_messages(["inline-1"])) == []  # answered already


# ---------------------------------------------------------------------- by default


@pytest.mark.parametrize(("device", "expected"), [("cpu", False), ("cuda", True), ("mps", False)])
def test_clients_on_cuda_train_at_once_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, expected: bool
) -> None:
    monkeypatch.setattr(engine, "client_for", lambda settings: SimpleNamespace(device=torch.device(device), own=None))
    config = RunConfig(clients=2)
    assert inline_grid(config, tmp_path).train_all is (train_all if expected else None)
    assert inline_grid(config, tmp_path, True).train_all is train_all
    assert inline_grid(config, tmp_path, False).train_all is None
