"""A long run over gRPC: whether memory, open files, threads or the time of a round grow.

The run is that of `benchmarks.memory`. A table shows each process after 20 rounds, after 200 and at the end, then
seconds per round of the first hundred and of the last. The exit code is 1 if anything has grown.

    python -m siege.soak --rounds 1000
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.federation import write_images
from benchmarks.measure import machine
from benchmarks.memory import WARM, WINDOW, Footprint, command, median, watch

SETTLED = 200
GROWTH = 1.1  # of memory between round 200 and the end, at most; and 16 MiB, as an allocator's steps are large
MORE_FILES = 5
SLOWER = 1.5  # a round of the last hundred against one of the first; other programs' load is in it


def soak(rounds: int) -> list[str]:
    """Play the rounds, print a table, and return a line for everything that has grown."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_images(folder / "images.npz", train=80, held_out=40)
        samples = watch(command(data, folder / "run", rounds), folder / "run" / "metrics.jsonl", rounds)
        seconds = [json.loads(line)["seconds"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    moments = (WARM, SETTLED, rounds - WINDOW)
    found = [median(samples, moment, moment + WINDOW) for moment in moments]
    print("| process | MiB | open files | threads |\n|---|---|---|---|")
    for role in sorted(found[0]):
        print("|", " | ".join([role, *(" / ".join(f"{each[role][k]:.0f}" for each in found) for k in range(3))]), "|")
    early, late = statistics.median(seconds[:100]), statistics.median(seconds[-100:])
    print(f"seconds per round: {early:.3f} in the first hundred, {late:.3f} in the last (medians)")
    problems = growth(found[1], found[2])
    if late > SLOWER * early:
        problems.append(f"a round takes {late:.3f} s after {early:.3f} s")
    return problems


def growth(before: dict[str, Footprint], after: dict[str, Footprint]) -> list[str]:
    """Return a line for everything that a process holds more of."""
    problems = []
    for role, old in sorted(before.items()):
        new = after[role]
        if new.mib > GROWTH * old.mib + 16:
            problems.append(f"{role}: {new.mib:.0f} MiB after {old.mib:.0f}")
        for name in ("files", "threads"):
            if getattr(new, name) > getattr(old, name) + MORE_FILES:
                problems.append(f"{role}: {getattr(new, name):.0f} {name} after {getattr(old, name):.0f}")
    return problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000, help="number of rounds (default: %(default)s)")
    rounds, least = parser.parse_args().rounds, SETTLED + 2 * WINDOW
    if rounds < least:
        parser.error(f"--rounds: expected at least {least}, found {rounds}")
    print(machine())
    grown = soak(rounds)
    print("; ".join(grown) or "all flat")
    sys.exit(bool(grown))
