"""What is Flower's stays Flower's: a stock SuperNode beside our client, and TLS as Flower does it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hyperbloom.client.settings import ClientSettings
from hyperbloom.common.data import DataSpec
from hyperbloom.server.superlink import free_port
from tests.processes.conftest import Site

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.fixture
def supernode(site: Site) -> Iterator[None]:
    """A stock SuperNode with the settings of client c1 in its node config."""
    settings = ClientSettings("c1", DataSpec(partition=1, partitions=2), state_dir=site.folder / "state" / "c1")
    config = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.to_node_config().items())
    command = [
        sys.executable,
        "-c",
        "from flwr.supernode.cli import flower_supernode; flower_supernode()",
        "--insecure",
    ]
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
    site: Site, supernode: None, tmp_path: Path
) -> None:
    args = ["--strategy", "pfedhn-pc", "--clients", "2", "--cohort", "2", "--rounds", "1", "--eval-every", "1"]
    args += ["--set", "local.steps=5"]
    server = site.server(*args, "--run-dir", str(tmp_path / "mixed"))
    client = site.client("c0", "--partition", "0/2")
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


def certificates(folder: Path) -> dict[str, Path]:
    """A CA and a server certificate for 127.0.0.1 signed by it, as PEM files."""
    now = datetime.now(UTC)

    def name(common: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])

    def write(path: Path, content: bytes) -> Path:
        path.write_bytes(content)
        return path

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateBuilder().not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    builder = builder.issuer_name(name("test CA"))
    ca = (
        builder.subject_name(name("test CA"))
        .public_key(ca_key.public_key())
        .serial_number(1)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    certificate = (
        builder.subject_name(name("server"))
        .public_key(key.public_key())
        .serial_number(2)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return {
        "ca": write(folder / "ca.pem", ca.public_bytes(pem)),
        "certificate": write(folder / "server.pem", certificate.public_bytes(pem)),
        "key": write(folder / "server.key", private),
    }


def test_tls(site: Site, tmp_path: Path) -> None:
    files = certificates(tmp_path)
    tls = [word for name, path in files.items() for word in (f"--tls-{name}", str(path))]
    args = ["--clients", "1", "--rounds", "3", "--eval-every", "3", "--run-dir", str(tmp_path / "run")]
    server = site.server(*args, *tls, insecure=False)
    server.wait_for(f"--root-certificates {files['ca']}")

    stranger = certificates(_folder(tmp_path / "other"))["ca"]
    wrong = site.client("wrong", "--root-certificates", str(stranger), insecure=False)
    assert wrong.wait() == 5
    assert "do TLS and certificates match" in wrong.output

    client = site.client("right", "--root-certificates", str(files["ca"]), insecure=False)
    assert server.wait() == 0, server.output
    assert client.wait() == 0, client.output


def _folder(path: Path) -> Path:
    path.mkdir()
    return path
