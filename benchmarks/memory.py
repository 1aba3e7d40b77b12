"""Resident memory of every process of a gRPC run: once it is warm, and at the end. What grows with rounds, leaks.

`flower-server --local-clients 4` with pFedHN and a LeNet of 121,182 floats, all four clients in every round, one local
step with one image, evaluation every 50 rounds, for 200 rounds or as many as asked. The ratio is the memory in rounds
20 to 30 over the memory in the last ten (medians of samples), so below 1 it grew. `flower-server` is our Python
process with the hypernetwork (12.1 million weights, and momentum), `superlink` its child. Needs Linux's /proc.

    python -m benchmarks.memory [--quick] [--rounds N]
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.federation import LENET_FLOATS, write_images
from benchmarks.measure import Comparison, machine

CLIENTS = 4
WARM = 20
WINDOW = 10
ROUNDS = 200
PATIENCE_S = 120.0


def run(quick: bool = False, rounds: int = ROUNDS) -> list[Comparison]:
    rounds = 3 * WARM if quick else rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_images(folder / "images.npz", train=80, held_out=40)
        start, end = watch(command(data, folder / "run", rounds), folder / "run" / "metrics.jsonl", rounds)
    conditions = (
        f"{CLIENTS} clients on this machine, {LENET_FLOATS:,} floats each way; 'ours' is in the last "
        f"{WINDOW} of {rounds} rounds, 'other' in rounds {WARM} to {WARM + WINDOW}"
    )
    return [
        Comparison(f"memory that stays, {role}", "MiB", end[role], start[role], conditions) for role in sorted(start)
    ]


def command(data: Path, run_folder: Path, rounds: int) -> list[str]:
    """Return the command line of the run."""
    words = [sys.executable, "-m", "hyperbloom.server", "--strategy", "pfedhn", "--insecure", "--port", "0"]
    words += ["--local-clients", str(CLIENTS), "--clients", str(CLIENTS), "--cohort", str(CLIENTS)]
    words += ["--rounds", str(rounds), "--eval-every", str(min(50, rounds)), "--model", "lenet", "--data", str(data)]
    words += ["--split", "iid", "--set", "local.steps=1", "--set", "local.batch_size=1"]
    return [*words, "--run-dir", str(run_folder)]


def watch(words: list[str], metrics: Path, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Run a command and return its processes' MiB early and late: medians over `WINDOW` rounds.

    Raises:
        RuntimeError: the run failed, or stood still for `PATIENCE_S` seconds.
    """
    samples: list[tuple[int, dict[str, float]]] = []
    child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        done, since = 0, time.monotonic()
        while child.poll() is None and done < rounds:
            time.sleep(0.1)
            now = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if now > done:
                done, since = now, time.monotonic()
            if time.monotonic() - since > PATIENCE_S:
                raise RuntimeError(f"no round was finished for {PATIENCE_S:.0f} s after round {done}")
            samples.append((done, resident(child.pid)))
        code = child.wait(PATIENCE_S)
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)  # it ends its SuperLink and its clients
            child.wait(PATIENCE_S)
    if code or done < rounds:
        raise RuntimeError(f"the run ended with code {code} after {done} rounds")
    return _median(samples, WARM, WARM + WINDOW), _median(samples, rounds - WINDOW, rounds)


def _median(samples: list[tuple[int, dict[str, float]]], first: int, last: int) -> dict[str, float]:
    """Return each process's median while the rounds from `first` to `last` were played; an evaluation is a peak."""
    chosen = [sizes for done, sizes in samples if first <= done < last and len(sizes) == CLIENTS + 2]
    return {role: statistics.median(sizes[role] for sizes in chosen) for role in chosen[0]}


def resident(server: int) -> dict[str, float]:
    """Return MiB of resident memory of the server and its children, by role."""
    sizes = {"flower-server": _mib(server)}
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    for pid in children:
        with suppress(FileNotFoundError):  # it left a moment ago
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if len(words) > 1:  # else it has left, and nobody has asked for its exit code yet
                role = words[words.index("--client-id") + 1] if "--client-id" in words else "superlink"
                sizes[role] = _mib(int(pid))
    return sizes


def _mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short settings: to see that it works, not to quote")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="number of rounds (default: %(default)s)")
    args = parser.parse_args()
    if args.rounds < WARM + WINDOW:
        parser.error(f"--rounds: expected at least {WARM + WINDOW}, found {args.rounds}")
    print(machine())
    for comparison in run(args.quick, args.rounds):
        print(comparison)
