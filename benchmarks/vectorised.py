"""Rounds of the inline engine: the cohort trained at once against one client after the other.

pFedHN with all clients in every round: generate their weights, train, learn from the changes, messages and their checks
included. The same clients, data, batches and server on both sides; evaluation is left out.

* ours: `flower-server --engine inline --vectorise`, one network with an axis for clients (`torch.func`);
* other: `--no-vectorise`, one client after the other.

Runs on the device that the clients choose: CUDA where there is one. There a client takes the paper's 50 local steps; on
a CPU, where this takes a minute a round, LeNet takes five.

    python -m benchmarks.vectorised [--quick]
"""

import tempfile
from pathlib import Path

import torch

from benchmarks.federation import Rounds, run_config, write_images
from benchmarks.measure import Comparison, alternate, main
from hyperbloom.common.config import DataConfig, LocalConfig, RunConfig
from hyperbloom.common.program.device import pick_device
from hyperbloom.server.grids.engine import inline_grid

IMAGES = 200
"""Training images of a client that trains a LeNet."""


def run(quick: bool = False) -> list[Comparison]:
    cuda = pick_device("auto").type == "cuda"
    steps, repetitions = (50, 5) if cuda else (5, 3)
    if quick:
        steps, repetitions = 5, 2
    rows = []
    for clients in (10, 50):
        with tempfile.TemporaryDirectory() as name:
            data = write_images(Path(name) / "images.npz", train=clients * IMAGES, held_out=10 * clients)
            lenet = run_config(data, clients, clients, LocalConfig(steps=steps))
            digits = lenet.model_copy(
                update={"model": "mlp", "local": LocalConfig(), "data": DataConfig(name="digits", split="iid")}
            )
            rows += [compare(config, Path(name) / config.model, repetitions) for config in (lenet, digits)]
    return rows


def compare(config: RunConfig, folder: Path, repetitions: int) -> Comparison:
    """Time rounds of both sides in turns."""
    ours, other = rounds(config, folder, True), rounds(config, folder, False)
    times, other_times = alternate(ours.play, other.play, repetitions)
    device = pick_device("auto")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    conditions = (
        f"{config.model} on {config.data.name if config.model == 'mlp' else 'images of 3 x 32 x 32'}, "
        f"{config.local.steps} local steps with batches of at most {config.local.batch_size}; {repetitions} rounds "
        f"each; {torch.get_num_threads()} threads"
    )
    return Comparison.of(
        f"{config.clients} clients, {config.model}, on {where}", times, other_times, "s/round", conditions
    )


def rounds(config: RunConfig, folder: Path, vectorise: bool) -> Rounds:
    """Return rounds of the inline engine; both ways of it share a process's clients."""
    return Rounds(config, inline_grid(config, folder, vectorise), "benchmark")


if __name__ == "__main__":
    main(run, __doc__)
