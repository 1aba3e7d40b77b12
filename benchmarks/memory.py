"""What every process of a gRPC run holds: once it is warm, and at the end. What grows with rounds, leaks.

`flower-server --local-clients 4` with pFedHN and a LeNet of 121,182 floats, all four clients in every round, one local
step with one image, evaluation every 50 rounds, for 200 rounds or as many as asked. The ratio is the memory in rounds
20 to 30 over the memory in the last ten (medians of samples), so below 1 it grew. `flower-server` is our Python
process with the hypernetwork (12.1 million weights, and momentum), which is its own SuperLink. Needs Linux's /proc.

    python -m benchmarks.memory [--quick] [--rounds N]
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks import LEASH
from benchmarks.federation import LENET_FLOATS, write_images
from benchmarks.measure import Comparison, arguments, show

CLIENTS = 4
WARM = 20
WINDOW = 10
ROUNDS = 200
PATIENCE_S = 120.0


class Footprint(NamedTuple):
    """What a process holds."""

    mib: float
    files: float
    threads: float


Sample = tuple[int, dict[str, Footprint]]


def run(quick: bool = False, rounds: int = ROUNDS) -> list[Comparison]:
    rounds = 3 * WARM if quick else rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_images(folder / "images.npz", train=80, held_out=40)
        samples = watch(command(data, folder / "run", rounds), folder / "run" / "metrics.jsonl", rounds)
    start, end = median(samples, WARM, WARM + WINDOW), median(samples, rounds - WINDOW, rounds)
    conditions = (
        f"{CLIENTS} clients on this machine, {LENET_FLOATS:,} floats each way; 'ours' is in the last "
        f"{WINDOW} of {rounds} rounds, 'other' in rounds {WARM} to {WARM + WINDOW}"
    )
    return [
        Comparison(f"memory that stays, {role}", "MiB", end[role].mib, start[role].mib, conditions)
        for role in sorted(start)
    ]


def command(data: Path, run_folder: Path, rounds: int) -> list[str]:
    """Return the command line of the run."""
    words = [sys.executable, "-m", "hyperbloom.server", "--strategy", "pfedhn", "--insecure", "--port", "0"]
    words += ["--local-clients", str(CLIENTS), "--clients", str(CLIENTS), "--cohort", str(CLIENTS)]
    words += ["--rounds", str(rounds), "--eval-every", str(min(50, rounds)), "--model", "lenet", "--data", str(data)]
    words += ["--split", "iid", "--set", "local.steps=1", "--set", "local.batch_size=1"]
    words += ["--set", "gains=false"]
    return [*words, "--run-dir", str(run_folder)]


def watch(words: list[str], metrics: Path, rounds: int) -> list[Sample]:
    """Run a command and return what its processes held, with the number of rounds that were done.

    Raises:
        RuntimeError: the run failed, or stood still for `PATIENCE_S` seconds.
    """
    samples: list[Sample] = []
    null = subprocess.DEVNULL
    child = subprocess.Popen([*LEASH, *words], stdin=null, stdout=null, start_new_session=True)
    try:
        done, since = 0, time.monotonic()
        while child.poll() is None and done < rounds:
            time.sleep(0.1)
            now = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if now > done:
                done, since = now, time.monotonic()
            if time.monotonic() - since > PATIENCE_S:
                raise RuntimeError(f"no round was finished for {PATIENCE_S:.0f} s after round {done}")
            samples.append((done, footprints(child.pid)))
        code = child.wait(PATIENCE_S)
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)  # it ends its clients
            child.wait(PATIENCE_S)
    if code or done < rounds:
        raise RuntimeError(f"the run ended with code {code} after {done} rounds")
    return samples


def median(samples: list[Sample], first: int, last: int) -> dict[str, Footprint]:
    """Return each process's medians while the rounds from `first` to `last` were played; an evaluation is a peak."""
    chosen = [sizes for done, sizes in samples if first <= done < last and len(sizes) == CLIENTS + 1]
    return {
        role: Footprint(*(statistics.median(sizes[role][k] for sizes in chosen) for k in range(3)))
        for role in chosen[0]
    }


def footprints(server: int) -> dict[str, Footprint]:
    """Return what the server and its children hold, by role."""
    sizes = {"flower-server": _footprint(server)}
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    for pid in children:
        with suppress(FileNotFoundError):  # it left a moment ago
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "--client-id" in words:  # else it is another child, or on its way here or away
                sizes[words[words.index("--client-id") + 1]] = _footprint(int(pid))
    return sizes


def _footprint(pid: int) -> Footprint:
    proc = Path(f"/proc/{pid}")
    pages = int((proc / "statm").read_text().split()[1])
    files, threads = (len(os.listdir(proc / name)) for name in ("fd", "task"))
    return Footprint(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files, threads)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="number of rounds (default: %(default)s)")
    flags = parser.parse_args()
    if flags.rounds < WARM + WINDOW:
        parser.error(f"--rounds: expected at least {WARM + WINDOW}, found {flags.rounds}")
    show(lambda: run(flags.quick, flags.rounds), flags.record)
