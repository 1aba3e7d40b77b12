"""A client's local training in FedHeNN: public rows laid out as the client's images, the target prepared once.

The network of FedHeNN's table (`cnn-4`) on CIFAR-10-shaped float tensors, batches of 64, 500 public rows in each step:

* ours: rows channels-last, as images are; the part of CKA that depends on the target alone is computed once in a round;
* other: the same training as it was before: rows as they are read, CKA of both sides in each step.

Both sides give the same weights (`tests/client/work/test_reference.py`). Figures are processor time.

    python -m benchmarks.alignment [--quick]
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.local_sgd import random_images
from benchmarks.measure import Comparison, main, sgd_of
from figures.networks import cnn_4
from hyperbloom.client.work.methods import aligned
from hyperbloom.client.work.sgd import Flat, FlatPart, Network
from hyperbloom.common.alignment import factor_weights
from hyperbloom.common.cka import linear_cka_with
from hyperbloom.common.config import LocalConfig
from hyperbloom.common.data import laid_out
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.methods import Aligned

SimilarityTo = Callable[[Tensor], Callable[[Tensor], Tensor]]
IMAGES = random_images(400).to("cpu")
ROWS = 500
WIDE = 400
"""Columns of the mean kernel's factor, which clients with different networks get."""


def run(quick: bool = False) -> list[Comparison]:
    """Return the comparison for clients of one network, and for clients of different ones."""
    torch.manual_seed(0)
    rows = torch.rand(ROWS, 3, 32, 32)
    factor = factor_weights(torch.randn(ROWS, WIDE))
    return [_compare("one network", rows, None, quick), _compare("different networks", rows, factor, quick)]


def _compare(name: str, rows: Tensor, target: Weights | None, quick: bool) -> Comparison:
    steps, repetitions = (2, 3) if quick else (10, 5)
    network = cnn_4((3, 32, 32), 10)
    part = FlatPart(network, Layout.of(network))
    made, start = Network(network, part, Flat(Layout(()), torch.empty(0))), part.values.clone()
    sgd = replace(sgd_of(LocalConfig()), steps=steps)
    settings = Aligned(eta=1e-3, reference="", rows=ROWS, draw=0)

    def train(inputs: Tensor, similarity_to: SimilarityTo) -> None:
        part.load(start)
        aligned(made, IMAGES, sgd, 0, settings, (inputs, target), similarity_to)

    before = partial(train, rows, lambda b: lambda a: linear_cka_with(b)(a))
    sides = _alternate(partial(train, laid_out(rows), linear_cka_with), before, repetitions)
    times = ([1000 * seconds / steps for seconds in side] for side in sides)
    conditions = f"cnn-4, batch 64, {ROWS} public rows of 3 x 32 x 32, {steps} steps; {repetitions} times each"
    return Comparison.of(f"FedHeNN's step, {name}", *times, "ms of a core", conditions)


def _alternate(ours: Callable[[], None], other: Callable[[], None], repetitions: int) -> tuple[list[float], ...]:
    """Return processor seconds of both sides, which take turns."""
    times: tuple[list[float], ...] = ([], [])
    for turn in range(repetitions + 1):
        for side, function in zip(times, (ours, other), strict=True):
            start = time.process_time()
            function()
            if turn:  # the first one warms up
                side.append(time.process_time() - start)
    return times


if __name__ == "__main__":
    main(run, __doc__)
