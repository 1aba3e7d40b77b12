"""The Flower app on nodes that know only a number, as in Flower's simulation."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

from hyperbloom.client.keep.state import ClientState
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import LocalConfig, RunConfig
from hyperbloom.common.wire.orders import Failed, Greeting, Introduction
from hyperbloom.common.wire.pack import pack, unpack, unpack_answer
from hyperbloom.server.flower_app import answer_as_numbered, client
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.server.grids.inline import InlineGrid
from hyperbloom.server.loop.session import Session
from hyperbloom.server.runs.folder import RunFolder

CONFIG = RunConfig(
    strategy="pfedhn-pc",
    clients=4,
    cohort=3,
    rounds=3,
    eval_every=1,
    local=LocalConfig(steps=3),
    options={"hidden_dim": 8},
)


def numbered(folder: Path) -> InlineGrid:
    """Return a grid whose nodes know what Flower's simulation tells them."""
    app = partial(answer_as_numbered, CONFIG, folder)
    return InlineGrid(app, [{"partition-id": index, "num-partitions": 4} for index in range(4)])


def outcome(grid: InlineGrid, folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Run a session and return the server's last state and the selection."""
    session = Session(CONFIG, grid, "run-1", [RunFolder(folder, CONFIG, "run-1")])
    results = session.run()
    return load_file(folder / "hypernetwork-last.safetensors"), results


def test_numbered_nodes_are_the_clients_of_the_inline_engine(tmp_path: Path) -> None:
    inline, selected = outcome(inline_grid(CONFIG, tmp_path / "inline"), tmp_path / "inline")
    client_for.cache_clear()
    state, again = outcome(numbered(tmp_path / "numbered"), tmp_path / "numbered")
    assert again == selected
    assert state.keys() == inline.keys()
    for name, tensor in inline.items():
        assert torch.equal(state[name], tensor), name
    kept = {path.parent.parent.name for path in (tmp_path / "numbered").glob("clients/*/personal/*")}
    assert kept == {"client-0", "client-1", "client-2", "client-3"}


def test_two_actors_do_not_work_as_the_same_client(tmp_path: Path) -> None:
    session = Session(CONFIG, numbered(tmp_path), "run-1", [RunFolder(tmp_path, CONFIG, "r")])
    with ClientState(tmp_path / "clients" / "client-2").lock():
        (selection,) = session.run().values()
    assert set(selection.test_accuracy) == {"client-0", "client-1", "client-3"}
    lines = (tmp_path / "clients.jsonl").read_text()
    assert "RefusedError: process" in lines and "already runs as this client" in lines


def test_an_answer_leaves_the_nodes_own_configuration_alone(tmp_path: Path) -> None:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    context = Context(1, 9, {"partition-id": 3, "num-partitions": 4}, RecordDict(), {})
    reply = answer_as_numbered(CONFIG, tmp_path, Message(pack(Greeting("1")), 9, Greeting.message_type), context)
    assert unpack(Introduction, reply.content).client_id == "client-3"
    assert context.node_config == {"partition-id": 3, "num-partitions": 4}  # Flower reads it after every answer


def told(node_config: dict[str, Any], folder: Path, config: RunConfig = CONFIG) -> Message:
    """Return what a numbered node answers to a greeting."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    context = Context(1, 9, node_config, RecordDict(), {})
    return answer_as_numbered(config, folder, Message(pack(Greeting("1")), 9, Greeting.message_type), context)


def test_a_number_beyond_the_runs_clients_is_refused_in_words(tmp_path: Path) -> None:
    reply = told({"partition-id": 4, "num-partitions": 5}, tmp_path)
    assert reply.error.reason == "DataError: partition: expected 0 to 3 (partitions - 1), found 4"


def test_nodes_that_keep_no_secrets_refuse_secure_aggregation(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"strategy": "fedavg", "options": {}, "secure_aggregation": True})
    reply = told({"partition-id": 0, "num-partitions": 4}, tmp_path, config)
    assert "keeps no secrets between" in str(reply.error.reason)


def test_what_is_wrong_with_a_nodes_data_stays_there(tmp_path: Path) -> None:
    """The text of such an error may quote a cell."""
    (tmp_path / "own.csv").write_text("a,b\nsecret,0\n")
    data = CONFIG.data.model_copy(update={"name": str(tmp_path / "own.csv"), "label": "c"})
    reply = told({"partition-id": 0, "num-partitions": 4}, tmp_path, CONFIG.model_copy(update={"data": data}))
    failed = unpack_answer(Introduction, reply.content)
    assert isinstance(failed, Failed) and failed.text == "its data or settings cannot be used; its own log says why"


def test_a_named_node_with_a_number_takes_its_part_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell has read its node config, so `~` is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    own: dict[str, Any] = {
        "client-id": "a",
        "data": "digits",
        "state-dir": "~/ward",
        "partition-id": 1,
        "num-partitions": 4,
    }
    reply = client(Message(pack(Greeting("1")), 9, Greeting.message_type), Context(1, 9, own, RecordDict(), {}))
    assert unpack(Introduction, reply.content).train_examples < 300  # of 1,079
    assert (tmp_path / "ward").is_dir()
