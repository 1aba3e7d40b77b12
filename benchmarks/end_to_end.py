"""Client steps of pFedHN per second on one machine: our inline engine against a textbook program.

Ten clients with 800 CIFAR-10-shaped images each, the paper's LeNet, one client a round (the paper's setting): generate
its weights, 50 local steps with batches of 64, learn from the change. A client step is one such visit. Evaluation is
left out on both sides.

* ours: `--engine inline`: algorithm, roster, messages and their checks, `ClientApp` and client, without sockets;
* other: `textbook`: a head per tensor, `torch.optim.SGD`, `next(iter(DataLoader(..., shuffle=True)))` at each step,
  images turned from bytes to floats one by one, as the authors' code does.

    python -m benchmarks.end_to_end [--quick]
"""

import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.federation import LENET_FLOATS, Rounds, run_config, write_images
from benchmarks.measure import Comparison, alternate, main
from benchmarks.textbook import Images, TextbookHypernetwork, TextbookLeNet, TextbookServer, train
from hyperbloom.common.config import LocalConfig, RunConfig
from hyperbloom.common.models import ModelSpec, full_layout
from hyperbloom.common.seeds import derive
from hyperbloom.server.grids.engine import inline_grid

CLIENTS = 10
SPEC = ModelSpec("lenet", "M", (3, 32, 32), 10)


def run(quick: bool = False) -> list[Comparison]:
    return [compare(images=800, local=LocalConfig(), repetitions=2 if quick else 20)]


def compare(images: int, local: LocalConfig, repetitions: int) -> Comparison:
    """Time single client steps of both sides in turns."""
    with tempfile.TemporaryDirectory() as name:
        data = write_images(Path(name) / "images.npz", train=CLIENTS * images, held_out=10 * CLIENTS)
        config = run_config(data, CLIENTS, 1, local)
        rounds = Rounds(config, inline_grid(config, Path(name)), "benchmark")
        times, textbook_times = alternate(rounds.play, textbook(data, config), repetitions)
    conditions = (
        f"{CLIENTS} clients of {images} images, LeNet of {LENET_FLOATS:,} floats, a client step is {local.steps} SGD "
        f"steps with batch {local.batch_size}; {repetitions} client steps each; {torch.get_num_threads()} threads"
    )
    rates, textbook_rates = ([1 / seconds for seconds in side] for side in (times, textbook_times))
    return Comparison.of(
        "pFedHN in one process", rates, textbook_rates, "client steps/s", conditions, more_is_better=True
    )


def textbook(data: Path, config: RunConfig) -> Callable[[], None]:
    """Return a function that takes one client step of the textbook program."""
    torch.manual_seed(config.seed)
    network = TextbookLeNet()
    server = TextbookServer(TextbookHypernetwork(CLIENTS, full_layout(SPEC)))
    with np.load(data) as arrays:
        inputs, labels = (np.array_split(arrays[key], CLIENTS) for key in ("x_train", "y_train"))
    loaders = [
        DataLoader(Images(x, y), batch_size=config.local.batch_size, shuffle=True)
        for x, y in zip(inputs, labels, strict=True)
    ]
    numbers = count()

    def step() -> None:
        client = derive(config.seed, "textbook", next(numbers)) % CLIENTS
        (weights,) = server.generate([client])
        delta = train(network, weights, loaders[client], config.local)
        server.update([weights], [delta])

    return step


if __name__ == "__main__":
    main(run, __doc__)
