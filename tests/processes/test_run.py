"""Whole runs: a real SuperLink, real clients in processes of their own, real gRPC on loopback."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hyperbloom.server.cli import main
from tests.processes.conftest import Site

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

SHORT = ["--rounds", "4", "--eval-every", "2", "--clients", "3", "--cohort", "2", "--set", "local.steps=10"]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_over_grpc_equals_the_inline_engine(site: Site, tmp_path: Path) -> None:
    args = ["--strategy", "pfedhn", *SHORT, "--baselines", "local,fedavg,odpfl"]
    server = site.server(*args, "--run-dir", str(tmp_path / "grpc"))
    for index in range(3):
        site.client(f"client-{index}", "--partition", f"{index}/3", "--disclose-counts")
    assert server.wait() == 0, server.output
    assert "mean over clients" in server.output and "client-2" in server.output

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert main(["--engine", "inline", *args, "--run-dir", str(tmp_path / "inline")]) == 0
    torch.set_num_threads(threads)
    for name in ("", "baselines/fedavg/", "baselines/odpfl/"):
        name += "hypernetwork.safetensors"
        grpc, inline = load_file(tmp_path / "grpc" / name), load_file(tmp_path / "inline" / name)
        assert grpc.keys() == inline.keys()
        for tensor in grpc:
            torch.testing.assert_close(grpc[tensor], inline[tensor], rtol=0, atol=0)
    assert (tmp_path / "grpc/summary.json").read_text() == (tmp_path / "inline/summary.json").read_text()
    assert len(lines(tmp_path / "grpc/metrics.jsonl")) == 4
    assert not list((tmp_path / "grpc/clients").glob("*/personal/*pfedhn*"))


def test_clients_with_data_of_their_own_and_a_personal_classifier(site: Site, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for name in ("north", "south"):
        x = generator.normal(size=(90, 12)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, y=(x[:, 0] > 0).astype(np.int64))
    run = tmp_path / "run"
    server = site.server("--strategy", "pfedhn-pc", *SHORT, "--clients", "2", "--run-dir", str(run))
    clients = [site.client(name, "--data", str(tmp_path / f"{name}.npz")) for name in ("north", "south")]
    assert server.wait() == 0, server.output
    assert [client.wait() for client in clients] == [0, 0]
    roster = json.loads((run / "roster.json").read_text())["clients"]
    assert [client["client_id"] for client in roster] == ["north", "south"]
    assert roster[0]["about"]["input_shape"] == [12]
    heads = sorted(path.name for path in (tmp_path / "state").glob("*/personal/*.safetensors"))
    assert len(heads) == 2
    # What the server learned writes the body only: 12 x 100 weights and 100 biases.
    assert load_file(run / "hypernetwork.safetensors")["hypernetwork.heads.M.weight"].shape == (1300, 100)


@pytest.mark.parametrize("strategy", ["ghn", pytest.param("ghn-server", marks=pytest.mark.slow)])
def test_clients_with_different_architectures_learn_together(site: Site, tmp_path: Path, strategy: str) -> None:
    run, model = tmp_path / "run", [("mlp", []), ("hafl-1", [])]
    if strategy == "ghn-server":
        model = [(name, ["--disclose", "graph"]) for name, _ in model]
    args = ["--strategy", strategy, *SHORT, "--clients", "2", "--set", "sizes=[S]", "--baselines", "local"]
    server = site.server(*args, "--run-dir", str(run))
    server.wait_for("--model MODEL")
    common = ["--data", "digits", "--size", "S"]
    clients = [
        site.client(f"c{n}", *common, "--partition", f"{n}/2", "--model", name, *more)
        for n, (name, more) in enumerate(model)
    ]
    assert server.wait() == 0, server.output
    assert [client.wait() for client in clients] == [0, 0]
    assert [line["clients"] for line in lines(run / "metrics.jsonl")] == [2] * 4
    parts = load_file(run / "hypernetwork.safetensors")
    assert {"gnn", "linear 64,50 wb +relu", "conv2d 8,8 k3x3 w"} <= set(parts)
    told = (run / "roster.json").read_text()
    assert "conv2d 8,8 k3x3 w" in told
    assert ("body.0.0.weight" in told) == (strategy == "ghn-server")


@pytest.mark.slow
def test_networks_that_share_nothing_are_aligned_on_public_inputs(site: Site, tmp_path: Path) -> None:
    run, public = tmp_path / "run", tmp_path / "public.npz"
    np.savez(public, x=np.random.default_rng(0).random((50, 1, 8, 8), dtype=np.float32))
    args = ["--strategy", "fedhenn", *SHORT, "--clients", "2", "--set", f"rad={public}", "--set", "rows=20"]
    server = site.server(*args, "--set", "sizes=[S]", "--run-dir", str(run))
    common = ["--data", "digits", "--size", "S"]
    clients = [
        site.client(f"c{n}", *common, "--partition", f"{n}/2", "--model", name)
        for n, name in enumerate(("mlp", "hafl-1"))
    ]
    assert server.wait() == 0, server.output
    assert [client.wait() for client in clients] == [0, 0]
    assert [line["clients"] for line in lines(run / "metrics.jsonl")] == [2] * 4
    for name in ("c0", "c1"):
        assert load_file(tmp_path / "state" / name / "reference.safetensors")["inputs"].shape == (50, 1, 8, 8)


@pytest.mark.slow
def test_the_server_says_what_is_missing_and_leaves_with_code_4(site: Site) -> None:
    flags = ["--port", str(site.port), "--insecure", "--clients", "2", "--run-dir", str(site.folder / "run")]
    server = site.start("tests.processes.impatient", "server", *flags, "--data", "digits")
    server.wait_for("flower-client --server 127.0.0.1:")
    client = site.client("only", "--partition", "0/2")
    assert server.wait() == 4
    assert "1 of 2 clients joined within 600 s (only)" in server.output
    assert client.wait() == 0


@pytest.mark.slow
def test_the_baselines_over_grpc_equal_the_inline_engine(site: Site, tmp_path: Path) -> None:
    names = ["fedper", "hyperfl", "figures.lg_fedavg:LGFedAvg"]
    args = ["--strategy", "fedrep", *SHORT, "--clients", "2", "--baselines", ",".join(names)]
    server = site.server(*args, "--local-clients", "2", "--run-dir", str(tmp_path / "grpc"))
    assert server.wait() == 0, server.output
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert main(["--engine", "inline", *args, "--run-dir", str(tmp_path / "inline")]) == 0
    torch.set_num_threads(threads)
    assert (tmp_path / "grpc/summary.json").read_text() == (tmp_path / "inline/summary.json").read_text()
    for path in ("hypernetwork.safetensors", *(f"baselines/{name}/hypernetwork.safetensors" for name in names)):
        grpc, inline = load_file(tmp_path / "grpc" / path), load_file(tmp_path / "inline" / path)
        assert grpc.keys() == inline.keys()
        assert all(torch.equal(grpc[tensor], inline[tensor]) for tensor in grpc)
