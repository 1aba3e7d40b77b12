"""Ten thousand virtual clients in one process: what a round costs, and what stays in memory.

pFedHN in the inline engine on random features, six training examples a client, an MLP, two local steps: so little
training that everything else shows. Three questions, each answered by a ratio that should be about 1:

* does memory stay flat? Resident memory around round 20 over that at the end (below 1 it grew);
* does a round cost more with 10,000 clients registered than with 1,000, with the same cohort?
* is a round linear in the cohort? Time per client of cohorts of 25, 50 and 200 against that of 100.

Needs Linux's /proc. Joining writes an identity for each client to the disk, which takes most of the first minute.

    python -m benchmarks.scale [--quick]
"""

import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.federation import PATIENCE_S, Rounds
from benchmarks.measure import Comparison, alternate, main
from hyperbloom.common.config import DataConfig, LocalConfig, RunConfig
from hyperbloom.server.grids.engine import inline_grid

FEATURES, CLASSES = 16, 4
EXAMPLES = {"train": 6, "val": 2, "test": 2}
COHORT = 100
COHORTS = (25, 50, 200)
WARM, WINDOW = 20, 10


def run(quick: bool = False) -> list[Comparison]:
    if quick:
        return measure(few=100, many=300, rounds=WARM + 2 * WINDOW, repetitions=2, cohort=20, cohorts=(10,))
    return measure(few=1_000, many=10_000, rounds=200, repetitions=20, cohort=COHORT, cohorts=COHORTS)


def measure(
    few: int, many: int, rounds: int, repetitions: int, cohort: int, cohorts: Sequence[int]
) -> list[Comparison]:
    """Answer the three questions in turn, with `many` registered clients against `few`."""
    with tempfile.TemporaryDirectory() as name:
        large = federation(Path(name) / "many", many, cohort)
        sizes = []
        for _ in range(rounds):
            large.play()
            sizes.append(resident())
        small = federation(Path(name) / "few", few, cohort)
        conditions = f"MLP, {repetitions} rounds each, {torch.get_num_threads()} threads"
        registered = Comparison.of(
            f"round with {many:,} registered",
            *alternate(large.play, small.play, repetitions),
            "s",
            f"'other' has {few:,} registered; cohort {cohort}; {conditions}",
        )
        linear = [per_client(large, size, cohort, repetitions, conditions) for size in cohorts]
    late, early = statistics.median(sizes[-WINDOW:]), statistics.median(sizes[WARM : WARM + WINDOW])
    where = f"cohort {cohort}; 'ours' is in the last {WINDOW} of {rounds} rounds, 'other' in {WARM} to {WARM + WINDOW}"
    return [Comparison(f"memory that stays, {many:,} clients", "MiB", late, early, where), registered, *linear]


def federation(folder: Path, clients: int, cohort: int) -> Rounds:
    """Let virtual clients join, each with random examples of its own."""
    folder.mkdir()
    config = RunConfig(
        gains=False,
        clients=clients,
        cohort=cohort,
        model="mlp",
        local=LocalConfig(steps=2, batch_size=4),
        data=DataConfig(name=str(write_features(folder / "features.npz", clients)), split="iid"),
        options={"embedding_dim": 32},
        join_timeout_s=PATIENCE_S,
        round_timeout_s=PATIENCE_S,
    )
    return Rounds(config, inline_grid(config, folder), "benchmark")


def write_features(path: Path, clients: int) -> Path:
    """Write random features and labels, `EXAMPLES` for each client."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, each in EXAMPLES.items():
        arrays[f"x_{part}"] = rng.standard_normal((clients * each, FEATURES), dtype=np.float32)
        arrays[f"y_{part}"] = np.arange(clients * each) % CLASSES
    np.savez(path, **arrays)
    return path


def per_client(rounds: Rounds, size: int, reference: int, repetitions: int, conditions: str) -> Comparison:
    """Time rounds of two cohorts in turns, and divide by their sizes."""

    def play(cohort: int) -> None:
        rounds.run.config = rounds.run.config.model_copy(update={"cohort": cohort})
        rounds.play()

    ours, other = alternate(lambda: play(size), lambda: play(reference), repetitions)
    return Comparison.of(
        f"a client's share of a round, cohort of {size}",
        [1000 * seconds / size for seconds in ours],
        [1000 * seconds / reference for seconds in other],
        "ms",
        f"'other' is a cohort of {reference}; {len(rounds.run.federation.roster):,} registered; {conditions}",
    )


def resident() -> float:
    """Return MiB of this process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main(run, __doc__)
