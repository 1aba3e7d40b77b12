"""What a client costs its machine until it says hello: memory, and seconds of CPU.

A `flower-client` with 800 images of 3 x 32 x 32 and one torch thread, whose server is not there: the figures are of the
moment when it says so, with all imported and the data loaded. The other side is a Python that imports torch. Which
torch is installed decides most of it, so run it once with the CPU build and once with the CUDA build. Needs Linux's
/proc.

    python -m benchmarks.footprint [--quick]
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import LEASH
from benchmarks.federation import write_images
from benchmarks.measure import Comparison, main

NOBODY = "127.0.0.1:1"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
CLIENT = [sys.executable, "-m", "hyperbloom.client", "--insecure", "--server", NOBODY, "--client-id", "one"]


def run(quick: bool = False) -> list[Comparison]:
    repetitions = 1 if quick else 5
    with tempfile.TemporaryDirectory() as name:
        data = write_images(Path(name) / "images.npz", train=800, held_out=100)
        client = [*CLIENT, "--device", "cpu", "--data", str(data), "--state-dir", f"{name}/state"]
        alone = [sys.executable, "-c", "import sys, torch; print('', file=sys.stderr, flush=True); sys.stdin.read()"]
        pairs = [(_started(client, "does not answer"), _started(alone, "")) for _ in range(repetitions)]
    build = "CUDA" if torch.version.cuda else "CPU"
    conditions = f"a client with 800 images against a Python that imports torch; {repetitions} starts each, 1 thread"
    return [
        Comparison.of(
            f"{what}, torch's {build} build",
            [ours[k] for ours, _ in pairs],
            [other[k] for _, other in pairs],
            unit,
            conditions,
        )
        for k, (what, unit) in enumerate((("memory at the hello", "MiB"), ("CPU until the hello", "s")))
    ]


def _started(words: list[str], sign: str) -> tuple[float, float]:
    """Start a program and return its MiB and its CPU seconds when a line with `sign` comes to its standard error."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*LEASH, *words], stdin=pipe, stderr=pipe, text=True, env=ENVIRONMENT) as process:
        assert process.stderr is not None and process.stdin is not None
        next(line for line in process.stderr if sign in line)
        status = Path(f"/proc/{process.pid}/status").read_text()
        user, system = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        process.send_signal(signal.SIGKILL)
    kib = int(status.partition("VmRSS:")[2].split()[0])
    return kib / 1024, (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(run, __doc__)
