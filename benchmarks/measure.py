"""How two sides are compared: in one process, taking turns A B A B, by their medians; and what is said about it.

Every program here has a function `run(quick)` that returns `Comparison`s, and prints them when it is started. With
`--record` it appends them to a file of results, from which `recorded.py` makes the tables of the pages.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from hyperbloom.common.config import LocalConfig
from hyperbloom.common.wire.orders import SGD

__all__ = ["Comparison", "alternate", "children", "cpu_seconds", "machine", "main", "record", "show", "timed"]

Run = Callable[[bool], list["Comparison"]]


@dataclass(frozen=True)
class Comparison:
    """One ratio and the two figures that it was made of.

    Attributes:
        name: what was measured.
        unit: of `ours` and `other`; with `more_is_better` a rate, else a cost.
        ours: median of our side, or its only value where nothing varies.
        other: median of the other side.
        conditions: everything that a reader needs to judge the ratio, but the machine.
        more_is_better: whether a larger figure is the better one.
        spread: smallest and largest of our side, then of the other; empty where nothing varies.
    """

    name: str
    unit: str
    ours: float
    other: float
    conditions: str
    more_is_better: bool = False
    spread: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        ours: Sequence[float],
        other: Sequence[float],
        unit: str,
        conditions: str,
        more_is_better: bool = False,
    ) -> "Comparison":
        """Compare the medians of repeated measurements."""
        spread = (min(ours), max(ours), min(other), max(other))
        medians = statistics.median(ours), statistics.median(other)
        return cls(name, unit, *medians, conditions, more_is_better, spread)

    @property
    def ratio(self) -> float:
        """How many times better ours is: above 1 we win."""
        return self.ours / self.other if self.more_is_better else self.other / self.ours

    def __str__(self) -> str:
        """Return the ratio, and below it the raw figures."""
        text = f"{self.name}: {self.ratio:.3g}x\n  ours {self.ours:.4g}, other {self.other:.4g} {self.unit}"
        if self.spread:
            low, high, other_low, other_high = self.spread
            text += f" (medians; {low:.4g} to {high:.4g}, {other_low:.4g} to {other_high:.4g})"
        return f"{text}\n  {self.conditions}"


def timed(function: Callable[[], object]) -> float:
    """Return how many seconds a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def alternate(
    ours: Callable[[], object], other: Callable[[], object], repetitions: int, warm_up: int = 1
) -> tuple[list[float], list[float]]:
    """Time two functions in turns, so that whatever else the machine does meets both alike.

    Args:
        ours: one side.
        other: the other side.
        repetitions: times that each is timed.
        warm_up: times that each is called before, untimed.
    """
    for _ in range(warm_up):
        ours()
        other()
    times = [(timed(ours), timed(other)) for _ in range(repetitions)]
    return [first for first, _ in times], [second for _, second in times]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, in seconds; needs Linux's /proc."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that are still there; needs Linux's /proc."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def machine() -> str:
    """Return what the figures depend on and the programs do not choose."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "flwr", "grpcio"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f"load {os.getloadavg()[0]:.1f} at the start"
    threads = f"{torch.get_num_threads()} torch threads"
    return f"{cores} cores ({_processor()}), {threads}, Python {platform.python_version()}, {versions}, {load}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def record(path: Path, program: str, where: str, comparisons: Iterable[Comparison]) -> None:
    """Append a line for each comparison of a program to a file of results; `where` is the machine before the start."""
    head = {"program": program, "day": f"{datetime.now(UTC):%Y-%m-%d}", "machine": where}
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(head | asdict(comparison)) + "\n" for comparison in comparisons)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the flags that all programs have."""
    text = (description or "").strip()
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short settings: to see that it works, not to quote")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="append the results, such as to figures/benchmarks.jsonl"
    )
    return parser


def show(run: Callable[[], list[Comparison]], into: Path | None) -> None:
    """Run one program, print what it compared, and append it to the file `into`, if there is one."""
    where = machine()
    print(where, flush=True)
    comparisons = run()
    print(*comparisons, sep="\n")
    if into:
        record(into, Path(sys.argv[0]).stem, where, comparisons)


def main(run: Run, description: str | None) -> None:
    """Run one program from the command line."""
    flags = arguments(description).parse_args()
    show(lambda: run(flags.quick), flags.record)


def sgd_of(local: LocalConfig) -> SGD:
    """Return the hyperparameters of a run without a schedule, as an order has them."""
    return SGD(local.steps, local.batch_size, local.learning_rate, local.momentum, local.weight_decay, local.clip)
