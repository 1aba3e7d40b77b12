"""The server's share of a pFedHN round, without network and clients: generate a cohort's weights, learn from replies.

Paper's hypernetwork (100 wide, 3 hidden layers) for a LeNet of 121,182 floats, 128 clients in the embedding table,
`update: mean`, cohorts of 1, 8, 32 and 128:

* ours: `HypernetworkLearner`: one head, one matrix product per cohort, a fused optimiser;
* other: `textbook.TextbookServer`: a head per tensor, a loop over the clients, `autograd.grad` for each.

Our side is also held against memory: the bytes that the step cannot avoid to move (`traffic`), over its time, as a
share of what copying a large tensor reaches in the same run.

    python -m benchmarks.server_step [--quick]
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measure import Comparison, alternate, main, timed
from benchmarks.textbook import TextbookHypernetwork, TextbookServer
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import ModelSpec, full_layout
from hyperbloom.strategies.hypernetworks import EmbeddingTable, MLPHypernetwork
from hyperbloom.strategies.hypernetworks.learner import HypernetworkLearner, Reply

CLIENTS = 128
COHORTS = (1, 8, 32, 128)
HIDDEN = 100


def run(quick: bool = False) -> list[Comparison]:
    return [compare(cohort, repetitions=3 if quick else max(4, 32 // cohort)) for cohort in COHORTS]


def compare(cohort: int, repetitions: int, hidden: int = HIDDEN) -> Comparison:
    """Time both sides on one cohort."""
    layout = full_layout(ModelSpec("lenet", "M", (3, 32, 32), 10))
    deltas = [1e-3 * torch.randn(layout.numel) for _ in range(cohort)]
    step, textbook_step = ours(layout, deltas, hidden), textbook(layout, deltas, hidden)
    times, textbook_times = alternate(step, textbook_step, repetitions)
    # Before and after, as the machine may be busier at one of them than at the other.
    bandwidth = copy_bandwidth()
    reached = traffic(layout.numel, hidden, cohort) / min(times)
    conditions = (
        f"cohort {cohort} of {CLIENTS}, {layout.numel:,} floats each, hypernetwork of {layout.numel * hidden:,}; "
        f"{repetitions} steps; at best {reached / 1e9:.1f} GB/s = {100 * reached / bandwidth:.0f} % "
        f"of a copy's {bandwidth / 1e9:.1f} GB/s"
    )
    return Comparison.of(f"server step, cohort {cohort}", times, textbook_times, "s/step", conditions)


def ours(layout: Layout, deltas: list[Tensor], hidden: int = HIDDEN) -> Callable[[], None]:
    """Return a function that takes one step for the first clients."""
    dim = int(1 + CLIENTS / 4)
    learner = HypernetworkLearner(MLPHypernetwork({"M": layout}, dim, hidden), EmbeddingTable(dim, seed=0))
    for client in range(CLIENTS):
        learner.grow(f"client-{client}")
    rows = list(range(len(deltas)))

    def step() -> None:
        learner.generate(rows, "M")
        learner.update([Reply(row, "M", deltas[row]) for row in rows], "mean")

    return step


def textbook(layout: Layout, deltas: list[Tensor], hidden: int = HIDDEN) -> Callable[[], None]:
    """Return a function that takes the same step as a reader of the paper would write it."""
    server = TextbookServer(TextbookHypernetwork(CLIENTS, layout, hidden_dim=hidden))
    named = [layout.views(delta) for delta in deltas]
    return lambda: server.update(server.generate(range(len(deltas))), named)


def traffic(floats: int, hidden: int, cohort: int) -> int:
    """Return the bytes that a step moves at least, if no cache holds a matrix of the head's size.

    The head's matrix is read to generate, read again by `update`'s forward pass, and read by the backward pass; its
    gradient is written once, read for its norm, scaled in place; the optimiser reads weights, gradient and momentum
    and writes weights and momentum. Of the cohort's (C, P) matrices, two are written (generated weights, twice),
    one is made of the deltas (read, written) and read by both products of the backward pass.
    """
    head = 3 + (1 + 1 + 2) + (3 + 2)
    cohort_matrices = 2 + (1 + 1) + 2
    return 4 * floats * (hidden * head + cohort * cohort_matrices)


def copy_bandwidth(size: int = 64 * 2**20, repetitions: int = 5) -> float:
    """Return bytes per second, read and written, of the fastest copy of a float32 tensor that fits no cache."""
    source = torch.ones(size // 4)
    target = torch.zeros_like(source)
    return 2 * size / min(timed(lambda: target.copy_(source)) for _ in range(repetitions))


if __name__ == "__main__":
    main(run, __doc__)
