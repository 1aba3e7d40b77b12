"""What a stranger's attacks cost a running federation: rounds a second and the server's memory, as a table.

A server with TLS and two clients with keys play short rounds. The attacks of `siege/stranger.py` come one after the
other, each from a process of its own.

    python -m siege.attacks --seconds 25
"""

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.measure import machine
from hyperbloom.common.secrecy.keys import make_key, public_pem, write_private_key
from hyperbloom.server.access.certificates import init
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.broker.superlink import free_port
from siege.faults import Process

CONNECTIONS = {"calls": 2, "bodies": 3, "gzip": 3, "silent": 1100}
LOOK_EVERY_S = 0.2


def federation(folder: Path, port: int) -> list[Process]:
    """Start a server and two clients, and wait for rounds."""
    files = init(folder / "certs", [], days=30)
    flags = ["--strategy", "pfedhn", "--clients", "2", "--cohort", "2", "--rounds", "100000", "--eval-every", "100000"]
    flags += ["--port", str(port), "--certs", str(files.folder), "--run-dir", str(folder / "run")]
    flags += ["--set", "local.steps=5", "--set", "hidden_dim=8"]
    started = [Process("hyperbloom.server", flags, folder / "server.log")]
    for name in "ab":
        write_private_key(folder / f"{name}.pem", key := make_key())
        ClientRegistry(files.clients).add(name, public_pem(key))
        flags = ["--server", f"127.0.0.1:{port}", "--root-certificates", str(files.ca), "--key", f"{folder}/{name}.pem"]
        flags += ["--client-id", name, "--state-dir", f"{folder}/{name}", "--max-train", "60", "--threads", "1"]
        started.append(Process("hyperbloom.client", flags, folder / f"{name}.log"))
    while rounds(folder) < 20:
        assert all(process.lives for process in started), started[0].log.read_text()
        time.sleep(LOOK_EVERY_S)
    return started


def rounds(folder: Path) -> int:
    """Return how many rounds were played."""
    path = folder / "run/metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def observe(folder: Path, pid: int, seconds: float) -> tuple[float, float]:
    """Return rounds a second, and the most MiB that the server takes, over so many seconds."""
    done, begun, most = rounds(folder), time.monotonic(), 0.0
    while (passed := time.monotonic() - begun) < seconds:
        (line,) = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in each]
        most = max(most, int(line.split()[1]) / 2**10)
        time.sleep(LOOK_EVERY_S)
    return (rounds(folder) - done) / passed, most


def main(seconds: float) -> None:
    """Print a line for each attack."""
    print(f"{machine()}\n| attack | rounds a second before, during, after | MiB before, during, after |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        started = federation(folder, port)
        server = started[0].popen.pid
        try:
            for how, count in CONNECTIONS.items():
                found = [observe(folder, server, seconds / 3)]
                attack = [f"127.0.0.1:{port}", "--ca", str(folder / "certs/ca.pem"), "--how", how]
                attack += ["--connections", str(count), "--seconds", "1000"]
                stranger = Process("siege.stranger", attack, folder / f"{how}.log")
                found.append(observe(folder, server, seconds))
                stranger.kill()
                found.append(observe(folder, server, seconds / 3))
                rates, sizes = zip(*found, strict=True)
                shown = [", ".join(f"{each:.1f}" for each in rates), ", ".join(f"{each:.0f}" for each in sizes)]
                print("|", " | ".join([how, *shown]), "|", flush=True)
        finally:
            for process in reversed(started):
                process.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=25.0, help="of each attack (default: %(default)s)")
    main(parser.parse_args().seconds)
