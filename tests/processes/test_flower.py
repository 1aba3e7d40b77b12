"""What is Flower's stays Flower's: a stock SuperNode beside our client, over TLS and with a key of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from hyperbloom.client.settings import ClientSettings
from hyperbloom.common.data import DataSpec
from hyperbloom.common.secrecy.keys import make_key, public_pem, write_private_key
from hyperbloom.server.access.certificates import Certificates, init
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.broker.superlink import free_port
from tests.processes.conftest import Site

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        Version(version("flwr")) >= Version("1.40"), reason="from 1.40 on a SuperNode speaks HTTP only: use flwr run"
    ),
]


@pytest.fixture
def files(site: Site) -> Certificates:
    """Certificates, and keys for the clients c0 and c1."""
    files = init(site.folder / "certs", [], days=30)
    for name in ("c0", "c1"):
        key = make_key()
        write_private_key(site.folder / f"{name}.pem", key)
        ClientRegistry(files.clients).add(name, public_pem(key))
    return files


@pytest.fixture
def supernode(site: Site, files: Certificates) -> Iterator[None]:
    """A stock SuperNode with the settings of client c1 in its node config."""
    settings = ClientSettings("c1", DataSpec(partition=1, partitions=2), state_dir=site.folder / "state" / "c1")
    config = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.to_node_config().items())
    command = [sys.executable, "-c", "from flwr.supernode.cli import flower_supernode; flower_supernode()"]
    command += ["--root-certificates", str(files.ca), "--auth-supernode-private-key", str(site.folder / "c1.pem")]
    command += ["--superlink", f"127.0.0.1:{site.port}", "--port", str(free_port()), "--node-config", config]
    environment = {**os.environ, "FLWR_HOME": str(site.folder / "flwr"), "FLWR_DISABLE_UPDATE_CHECK": "1"}
    # The sum of a product depends on how it is cut into threads; our clients get one each.
    environment["OMP_NUM_THREADS"] = "1"
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with (site.folder / "supernode.log").open("wb") as log:
        node = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    yield
    node.terminate()
    node.wait(20)


def test_a_stock_supernode_trains_beside_our_client_with_the_same_result(
    site: Site, files: Certificates, supernode: None, tmp_path: Path
) -> None:
    args = ["--strategy", "pfedhn-pc", "--clients", "2", "--cohort", "2", "--rounds", "1", "--eval-every", "1"]
    args += ["--set", "local.steps=5"]
    server = site.server(*args, "--certs", str(files.folder), "--run-dir", str(tmp_path / "mixed"), insecure=False)
    secure = ["--root-certificates", str(files.ca), "--key", str(site.folder / "c0.pem")]
    client = site.client("c0", "--partition", "0/2", *secure, insecure=False)
    assert server.wait(200) == 0, server.output + (site.folder / "supernode.log").read_text()
    assert client.wait() == 0

    ours = Site(tmp_path / "ours")
    ours.folder.mkdir()
    server = ours.server(*args, "--run-dir", str(tmp_path / "live"))
    clients = [ours.client(f"c{index}", "--partition", f"{index}/2") for index in range(2)]
    assert server.wait() == 0, server.output
    assert [each.wait() for each in clients] == [0, 0]
    for name in ("hypernetwork-last.safetensors", "summary.json"):
        assert (tmp_path / "mixed" / name).read_bytes() == (tmp_path / "live" / name).read_bytes()
    head = "state/c1/personal"
    stock, live = (next((folder / head).glob("*.safetensors")) for folder in (site.folder, ours.folder))
    assert stock.read_bytes() == live.read_bytes(), "the personal classifier, through a process per message"
