"""The benchmarks run, and compare two sides that do the same. Nothing here depends on how long anything takes."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from benchmarks import (
    end_to_end,
    federation,
    fleet,
    local_limits,
    local_sgd,
    memory,
    on_demand,
    recorded,
    round_overhead,
    run_all,
    scale,
    server_step,
    supernodes,
    transports,
    vectorised,
    wire_bytes,
)
from benchmarks.measure import Comparison, alternate, record
from benchmarks.textbook import TextbookHypernetwork, TextbookLeNet, TextbookServer
from hyperbloom.common.config import LocalConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import MLP, build
from hyperbloom.strategies.hypernetworks import EmbeddingTable, MLPHypernetwork
from hyperbloom.strategies.hypernetworks.learner import HypernetworkLearner, Reply

TINY = LocalConfig(steps=2, batch_size=4)


pytestmark = pytest.mark.usefixtures("clean_process")


def test_turns_alternate_and_medians_make_the_ratio() -> None:
    calls: list[str] = []
    times, others = alternate(lambda: calls.append("a"), lambda: calls.append("b"), repetitions=2, warm_up=1)
    assert calls == ["a", "b"] * 3
    assert len(times) == len(others) == 2
    cost = Comparison.of("c", [3.0, 1.0, 2.0], [8.0, 4.0, 9.0], "s", "here")
    assert (cost.ours, cost.other, cost.ratio, cost.spread) == (2.0, 8.0, 4.0, (1.0, 3.0, 4.0, 9.0))
    assert Comparison("r", "1/s", 6.0, 2.0, "here", more_is_better=True).ratio == 3.0
    assert str(cost).splitlines()[0] == "c: 4x"


def test_a_table_has_the_last_line_of_each_row_and_says_where_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "LINES", tmp_path / "lines.jsonl")
    rows = {ours: Comparison.of("c", [ours], [8000.0], "s", "here") for ours in (1.0, 2.0)}
    record(recorded.LINES, "server_step", "2 cores (a processor), load 0.5 at the start", [rows[1.0]])
    record(recorded.LINES, "memory", "2 cores (a processor), load 1.5 at the start", [rows[1.0]])
    record(recorded.LINES, "server_step", "2 cores (a processor), load 0.7 at the start", [rows[2.0]])
    made = recorded.table("server_step", "memory")
    assert made.splitlines()[2:4] == [
        "| c | 2 | 8,000 | s | **4,000** | here |",
        "| c | 1 | 8,000 | s | **8,000** | here |",
    ]
    assert "Machine: 2 cores (a processor), load 0.7 to 1.5 before a program; " in made
    record(recorded.LINES, "memory", "a GPU", [rows[2.0]])
    assert "(server_step). And: a GPU; " in recorded.table("server_step", "memory")
    assert recorded.only("memory").ours == 2.0


def test_each_program_that_is_run_with_all_is_in_a_table() -> None:
    made = {name for names in recorded.MADE.values() for name in names} | {"local_limits"}
    assert made == set(run_all.PROGRAMS)


def test_variants_of_a_local_step_train_as_the_one_that_is_shipped() -> None:
    make, shape, _ = local_limits.NETWORKS["MLP"]
    data, local = local_limits.noise(shape), LocalConfig(steps=3, batch_size=64)
    start, shipped = local_limits.shipped_round(make, data, local)
    fused = local_limits.fused_round(make, data, local)
    assert local_limits.apart(shipped(), fused(), start) < 1e-5
    bf16 = local_limits.shipped_round(make, data, local, "bf16")[1]
    assert 1e-5 < local_limits.apart(shipped(), bf16(), start) < 0.5
    assert 0 < local_limits.kernels(shipped) < 1


def test_the_operations_of_a_step_are_those_of_its_products() -> None:
    network, batch = torch.nn.Linear(20, 10), local_limits.BATCH
    data = local_limits.noise((20,))
    products = 2  # forward, and the gradient of the weights; inputs have none
    assert local_limits.operations(network, data) == products * 2 * batch * 20 * 10


def test_the_textbook_takes_the_same_server_step_as_the_learner() -> None:
    layout, clients, cohort = Layout.of(MLP((5,), 3, width=4)), 4, [0, 2, 3]
    torch.manual_seed(0)
    textbook = TextbookHypernetwork(clients, layout, hidden_dim=8)
    server = TextbookServer(textbook)
    learner = HypernetworkLearner(MLPHypernetwork({"M": layout}, 2, 8), EmbeddingTable(2, seed=0))
    for client in range(clients):
        learner.grow(str(client))
    ours, theirs = learner.hypernetwork.state_dict(), textbook.state_dict()
    for name in ("weight", "bias"):
        ours[f"heads.M.{name}"] = torch.cat([theirs[f"heads.{i}.{name}"] for i in range(len(layout.shapes))])
    trunk = {name: value for name, value in theirs.items() if name.startswith("trunk.")}
    learner.hypernetwork.load_state_dict(ours | trunk)
    learner.table.weight.data.copy_(textbook.embeddings.weight)
    for _ in range(3):
        deltas = torch.randn(len(cohort), layout.numel)
        sent = learner.generate(cohort, "M")
        generated = server.generate(cohort)
        for row, weights in zip(sent, generated, strict=True):
            torch.testing.assert_close(row, layout.flatten(weights))
        learner.update([Reply(c, "M", d) for c, d in zip(cohort, deltas, strict=True)], "mean")
        server.update(generated, [layout.views(delta) for delta in deltas])
    torch.testing.assert_close(learner.table.weight, textbook.embeddings.weight)


def test_both_local_loops_train_the_same_weights() -> None:
    data = local_sgd.random_images(20)
    torch.manual_seed(0)
    initial = {name: p.detach().clone() for name, p in build(local_sgd.SPEC).named_parameters()}
    one = local_sgd.ours(data.to("cpu"), initial, TINY)()
    other = local_sgd.bare(data, initial, TINY, TextbookLeNet())()
    assert one.numel() == federation.LENET_FLOATS
    torch.testing.assert_close(one, other)
    assert not torch.equal(one, Layout.of(build(local_sgd.SPEC)).flatten(initial))


def test_server_step_with_a_small_hypernetwork() -> None:
    row = server_step.compare(cohort=2, repetitions=1, hidden=2)
    assert row.ours > 0 and row.other > 0
    assert server_step.traffic(floats=10, hidden=100, cohort=3) == 4 * 10 * (100 * 12 + 3 * 6)


def test_end_to_end_with_two_tiny_steps() -> None:
    row = end_to_end.compare(images=8, local=TINY, repetitions=1)
    assert row.ours > 0 and row.other > 0 and row.more_is_better


def test_rounds_at_once_and_one_by_one_learn_the_same(tmp_path: Path) -> None:
    data = federation.write_images(tmp_path / "images.npz", train=80, held_out=40)
    config = federation.run_config(data, 4, 4, TINY)
    row = vectorised.compare(config, tmp_path, repetitions=1)
    assert row.ours > 0 and row.other > 0 and not row.more_is_better
    at_once, one_by_one = (vectorised.rounds(config, tmp_path, way) for way in (True, False))
    at_once.play()
    one_by_one.play()
    got, want = at_once.run.algorithm.state(), one_by_one.run.algorithm.state()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5)


def test_wire_bytes() -> None:
    rows = wire_bytes.run(quick=True)
    assert [row.name for row in rows] == ["wire, MLP", "wire, LeNet"]
    assert all(1.0 < row.ours < row.other < 1.05 for row in rows)
    assert "121,182 floats in 10 tensors" in rows[1].conditions and "6 objects" in rows[1].conditions


def test_scale_with_a_handful_of_clients() -> None:
    memory_row, registered, *linear = scale.measure(few=4, many=6, rounds=40, repetitions=1, cohort=3, cohorts=(2,))
    assert memory_row.name == "memory that stays, 6 clients"
    assert 50 < memory_row.ours < 100_000 and 50 < memory_row.other < 100_000
    assert registered.ours > 0 and registered.other > 0
    assert [row.name for row in linear] == ["a client's share of a round, cohort of 2"]


def test_the_programs_that_start_processes_describe_them(tmp_path: Path) -> None:
    data = federation.write_images(tmp_path / "images.npz", train=80, held_out=40)
    config = federation.run_config(data, 4, 4, TINY)
    assert (config.clients, config.cohort, config.data.split) == (4, 4, "iid")
    words = memory.command(data, tmp_path / "run", 60)
    assert words[1:3] == ["-m", "hyperbloom.server"] and str(data) in words
    assert supernodes.LEAVE_TIMEOUT_S > 0 and round_overhead.CLIENTS == 4
    child = subprocess.Popen([sys.executable, "-c", "print(); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()  # Python is up, not only its process
        (held,) = memory.footprints(child.pid).values()
        assert 1 < held.mib < 1000 and 3 <= held.files < 20 and held.threads == 1
    finally:
        child.communicate(b"\n")


@pytest.mark.slow
def test_fifty_light_clients_join_at_once_and_play_rounds_of_two_cohorts() -> None:
    (row,) = fleet.measure(50, [10, 50], rounds=1)
    assert row.name.endswith("cohort of 50") and row.ours > 0 and row.other > 0
    assert "'other' is a cohort of 10" in row.conditions and "50 light clients" in row.conditions


@pytest.mark.slow
def test_light_newcomers_get_models_from_a_server_with_keys() -> None:
    (row,) = on_demand.run(quick=True)
    assert row.ours > 0 and row.other > 0 and "1 times 5 newcomers at once" in row.conditions


@pytest.mark.slow
def test_clients_play_rounds_over_both_transports() -> None:
    if Version(version("flwr")) < Version("1.40"):
        with pytest.raises(ConfigError, match=r"expected flwr 1\.40 or later"):
            transports.run(quick=True)
        return
    (row,) = transports.run(quick=True)
    assert row.ours > 0 and row.other > 0
