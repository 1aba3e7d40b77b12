"""Models on demand: three hundred newcomers at once against one after the other, over gRPC on this machine.

`flower-server serve` in a process of its own, with a LeNet of 121,182 floats and its hypernetwork of 12.1 million; the
newcomers are threads of this process, each with a connection of its own, so Python's start and the writing of the model
folder are no part of it: from opening the connection until the weights are there and the goodbye is said. 'ours' is the
time of all divided by their number, 'other' the median of joins that had the server to themselves. Needs Linux's /proc
for the memory of the two server processes after it.

    python -m benchmarks.on_demand [--quick]
"""

import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.federation import LENET_FLOATS, write_images
from benchmarks.measure import Comparison, main
from benchmarks.memory import footprints
from hyperbloom.client.link.server import Link
from hyperbloom.client.newcomer.join import join
from hyperbloom.client.newcomer.ledger import Ledger
from hyperbloom.client.newcomer.newcomer import Newcomer, Promise
from hyperbloom.client.newcomer.sources import Sources
from hyperbloom.common.data import DataSpec
from hyperbloom.server import cli
from hyperbloom.server.broker.superlink import free_port

AT_ONCE, ALONE = 300, 10
PATIENCE_S = 600.0


def run(quick: bool = False) -> list[Comparison]:
    count, alone = (3, 1) if quick else (AT_ONCE, ALONE)
    os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")
    logging.getLogger("hyperbloom.client").setLevel(logging.ERROR)  # noise is unlike everybody's data
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_images(folder / "images.npz", train=80, held_out=40)
        train(data, folder / "run")
        port = free_port()
        log = folder / "serve.log"
        words = [sys.executable, "-m", "hyperbloom.server", "serve", str(folder / "run"), "--insecure"]
        with log.open("wb") as file:
            child = subprocess.Popen([*words, "--port", str(port)], stdout=file, stderr=file, start_new_session=True)
        try:
            wait_for(log, child)
            link, sources = Link(f"127.0.0.1:{port}", insecure=True), Sources(DataSpec(str(data)))
            times = [one(link, sources, folder / "states" / str(index)) for index in range(alone + 1)][1:]
            total = many(link, sources, folder / "states", count)
            memory = {role: held.mib for role, held in footprints(child.pid).items()}
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait(PATIENCE_S)
    used = ", ".join(f"{role} {mib:.0f} MiB" for role, mib in sorted(memory.items()))
    conditions = (
        f"{count} newcomers at once, {total:.1f} s in all, against one at a time; LeNet of {LENET_FLOATS:,} floats, 80 "
        f"images each, with noise; {used} afterwards"
    )
    return [Comparison.of("joins on demand", [total / count], times, "s/join", conditions)]


def train(data: Path, folder: Path) -> None:
    """Leave a run of odpfl; what it has learned does not matter here."""
    words = ["--strategy", "odpfl", "--engine", "inline", "--clients", "3", "--cohort", "1", "--rounds", "1"]
    words += ["--eval-every", "1", "--model", "lenet", "--data", str(data), "--split", "iid", "--set", "local.steps=1"]
    if cli.main([*words, "--set", "encoder=private", "--set", "embedding_dim=25", "--run-dir", str(folder)]):
        raise RuntimeError("the run to be served failed")


def wait_for(log: Path, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while "ready" not in log.read_text():
        if child.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"flower-server serve did not start: {log.read_text()}")
        time.sleep(0.05)


def one(link: Link, sources: Sources, state: Path) -> float:
    """Join once; returns the seconds that it took."""
    start = time.perf_counter()
    join(link, Newcomer(sources, "M", Promise(0.3, 0.01), None, Ledger(state), link.address))
    return time.perf_counter() - start


def many(link: Link, sources: Sources, states: Path, count: int) -> float:
    """Join `count` times at once; returns the seconds until the last has its model."""
    done: list[float] = []
    threads = [
        threading.Thread(target=lambda index=index: done.append(one(link, sources, states / f"t{index}")))
        for index in range(count)
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = time.perf_counter() - start
    if len(done) != count:
        raise RuntimeError(f"{count - len(done)} of {count} newcomers got no model")
    print(f"{count} at once: median {statistics.median(done):.2f} s, longest {max(done):.2f} s", flush=True)
    return total


if __name__ == "__main__":
    main(run, __doc__)
