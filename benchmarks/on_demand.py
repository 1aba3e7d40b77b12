"""Models on demand: a hundred newcomers at once against one after the other, over gRPC with TLS and keys.

`flower-server serve` in a process of its own, with a LeNet of 121,182 floats and its hypernetwork of 12.1 million. The
newcomers are light, so what is measured is the server: threads of another process, without torch, each with a
connection and a key of its own. All send the descriptor that one real newcomer has computed. A newcomer's time goes
from opening its connection until its weights are there and it has said so. 'ours' is the time of all divided by their
number, 'other' the median of newcomers that had the server to themselves. Needs Linux's /proc for the server's CPU and
memory.

    python -m benchmarks.on_demand [--quick]
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import LEASH
from benchmarks.federation import LENET_FLOATS, write_images
from benchmarks.fleet import write_keys
from benchmarks.light_newcomers import ANSWERS, DESCRIPTOR
from benchmarks.measure import Comparison, cpu_seconds, main
from benchmarks.memory import footprints
from hyperbloom.client.link.server import Link
from hyperbloom.client.newcomer.guarantee import Promise
from hyperbloom.client.newcomer.join import join
from hyperbloom.client.newcomer.ledger import Ledger
from hyperbloom.client.newcomer.newcomer import Newcomer
from hyperbloom.client.newcomer.sources import Sources
from hyperbloom.common.data import DataSpec
from hyperbloom.common.secrecy.keys import read_private_key
from hyperbloom.common.wire.newcomers import Delivery, Description, Offer
from hyperbloom.common.wire.orders import Failed, Notice
from hyperbloom.common.wire.pack import pack
from hyperbloom.server import cli
from hyperbloom.server.access.certificates import init
from hyperbloom.server.broker.superlink import free_port

AT_ONCE, TURNS, ALONE = 100, 8, 10
PATIENCE_S = 600.0


def run(quick: bool = False) -> list[Comparison]:
    count, turns, alone = (5, 1, 1) if quick else (AT_ONCE, TURNS, ALONE)
    os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        certificates = init(folder / "certs", [], days=30)
        write_keys(folder / "certs", turns * count + alone + 2)
        data = write_images(folder / "images.npz", train=80, held_out=40)
        train(data, folder / "run")
        port, log = free_port(), folder / "serve.log"
        words = [sys.executable, "-m", "hyperbloom.server", "serve", str(folder / "run"), "--host", "127.0.0.1"]
        words += ["--port", str(port), "--certs", str(folder / "certs")]
        with log.open("wb") as file:
            child = subprocess.Popen([*LEASH, *words], stdout=file, stderr=file)
        try:
            wait_for(log, child)
            address = f"127.0.0.1:{port}"
            key = read_private_key(folder / "certs" / "0.pem", "")
            describe(Link(address, False, certificates.ca, key), data, folder)
            newcomers = Newcomers(address, certificates.ca, folder)
            newcomers.join(1)
            before = cpu_seconds(child.pid)
            groups = [newcomers.join(count) for _ in range(turns)]
            cpu = 1000 * (cpu_seconds(child.pid) - before) / (turns * count)
            times = [newcomers.join(1)[0] for _ in range(alone)]
            newcomers.close()
            memory = footprints(child.pid)["flower-server"].mib
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait(PATIENCE_S)
    totals, each = [max(group) for group in groups], sorted(seconds for group in groups for seconds in group)
    conditions = (
        f"{turns} times {count} newcomers at once, {min(count / total for total in totals):.0f} to "
        f"{max(count / total for total in totals):.0f} a second, each within {each[len(each) // 2]:.2f} s (p50) and "
        f"{each[99 * len(each) // 100]:.2f} s (p99), {cpu:.1f} ms of the server's CPU each; against one at a time; "
        f"LeNet of {LENET_FLOATS:,} floats, TLS and keys; the server holds {memory:.0f} MiB"
    )
    return [Comparison.of("models on demand", [total / count for total in totals], times, "s/newcomer", conditions)]


def train(data: Path, folder: Path) -> None:
    """Leave a run of odpfl; what it has learned does not matter here."""
    words = ["--strategy", "odpfl", "--engine", "inline", "--clients", "3", "--cohort", "1", "--rounds", "1"]
    words += ["--set", "gains=false"]
    words += ["--eval-every", "1", "--model", "lenet", "--data", str(data), "--split", "iid", "--set", "local.steps=1"]
    if cli.main([*words, "--set", "encoder=private", "--set", "embedding_dim=25", "--run-dir", str(folder)]):
        raise RuntimeError("the run to be served failed")


def wait_for(log: Path, child: subprocess.Popen[bytes]) -> None:
    """Wait until the server serves."""
    deadline = time.monotonic() + PATIENCE_S
    while "ready" not in log.read_text():
        if child.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"flower-server serve did not start: {log.read_text()}")
        time.sleep(0.05)


def describe(link: Link, data: Path, folder: Path) -> None:
    """Join as a real newcomer, and store what it said."""

    class Kept(Newcomer):
        def describe(self, offer: Offer) -> Description | Failed:
            description = super().describe(offer)
            answers = {Offer.message_type: description, Delivery.message_type: Notice("received", "")}
            records = {kind: dict(pack(said).config_records["hyperbloom"]) for kind, said in answers.items()}
            values = records[Offer.message_type].pop("values")
            assert isinstance(values, bytes)
            (folder / DESCRIPTOR).write_bytes(values)
            (folder / ANSWERS).write_text(json.dumps(records))
            return description

    sources = Sources(DataSpec(str(data)))
    join(link, Kept(sources, "M", Promise(0.3, 0.01), None, Ledger(folder / "state"), link.address))


class Newcomers:
    """A process of light newcomers."""

    def __init__(self, address: str, ca: Path, folder: Path) -> None:
        words = [sys.executable, "-m", "benchmarks.light_newcomers", address, str(ca), str(folder)]
        self._process = subprocess.Popen([*LEASH, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def join(self, count: int) -> list[float]:
        """Let `count` join at once; return how many seconds each waited for its model."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        seconds: list[float] = json.loads(self._process.stdout.readline())
        if len(seconds) != count:
            raise RuntimeError(f"{count - len(seconds)} of {count} newcomers got no model")
        return seconds

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


if __name__ == "__main__":
    main(run, __doc__)
