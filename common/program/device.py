"""The device of a program's networks, and the threads of its CPU."""

import os
from pathlib import Path

import torch

from hyperbloom.common.errors import ConfigError

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of CPU in a period that a container may use, and the period; `max` is no limit."""


def pick_device(name: str) -> torch.device:
    """Resolve 'auto' to CUDA, else the CPU; ConfigError if the device does not exist on this machine."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()  # "meta" holds no numbers
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device: expected auto or a device of this machine, found {name!r} ({reason})") from None
    return device


def cores() -> int:
    """Return how many cores this process may use: those it is bound to, or its container's limit if that is less."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if QUOTA.exists() and not (limit := QUOTA.read_text(encoding="ascii")).startswith("max"):
        quota, period = map(int, limit.split())
        count = min(count, -(-quota // period))
    return count


def limit_threads(wanted: int | None = None) -> None:
    """Let torch use `wanted` threads, or at most `cores()`; by itself it takes one for each core of the machine."""
    torch.set_num_threads(wanted or min(torch.get_num_threads(), cores()))
