"""Steps of SGD, one after the other; on a CUDA device, as replays of one recorded step.

A step of a small network is dozens of kernels, and each takes the device less time than its launch takes the program. A
recording (a CUDA graph) launches all of them at once. `benchmarks/local_sgd.py` compares it with torch's plain loop.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain

import torch
from torch import Tensor, nn

from hyperbloom.common.tasks.base import Task

EAGER = 3
"""Steps before the recording. They allocate the momentum and choose the kernels of convolutions."""
FEWEST = 10
"""Steps from which on a recording pays."""
LARGEST = 1_000_000
"""Most numbers of a network that is recorded. In larger ones kernels outlast their launches, and a recording would hold
the activations of a step a second time. Networks of dense layers up to this size train on one thread."""
PLAIN = "activation batchnorm container conv dropout flatten linear normalization padding pooling upsampling"
KNOWN = (
    *(f"torch.nn.modules.{name}." for name in PLAIN.split()),
    "hyperbloom.common.models.",
    "hyperbloom.client.work.features.",
)
"""Where the layers are defined of which a step can be recorded. Others of torch's read values, such as masks."""


def repeat(
    step: Callable[[Tensor], None], batches: Tensor, module: nn.Module, task: Task, recorded: bool = True
) -> None:
    """Call `step` with each row of `batches` `(steps, ...)`; record and replay it if network and task allow it.

    A step that is `recorded` works in place, launches the same kernels every time, and reads no value from the device.
    """
    if not (recorded and batches.is_cuda and len(batches) >= FEWEST and may_be_recorded(module, task)):
        with _threads_for(module):
            for batch in batches:
                step(batch)
        return
    batch, recording = batches[EAGER].clone(), torch.cuda.CUDAGraph()
    others, stream = torch.cuda.current_stream(batches.device), _stream(batches.device)
    stream.wait_stream(others)
    with torch.cuda.stream(stream):
        for first in batches[:EAGER]:
            step(first)
        stream.synchronize()
        torch.cuda.empty_cache()  # what the last recording held is not free before
        recording.capture_begin(capture_error_mode="thread_local")  # other threads go on
        try:
            step(batch)
        finally:
            recording.capture_end()
        for now in batches[EAGER:]:
            batch.copy_(now)
            recording.replay()
    stream.synchronize()  # the recording may not end before its last replay


@contextmanager
def _threads_for(module: nn.Module) -> Iterator[None]:
    """Take one thread for a small network of dense layers.

    Its products are so short that threads mostly wait for each other. Where other programs use the cores, too, a step
    then takes many times as long as on one thread (`benchmarks/local_sgd.py`).
    """
    threads, dense = torch.get_num_threads(), all(values.dim() < 3 for values in module.parameters())
    if dense and _size(module) <= LARGEST:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _size(module: nn.Module) -> int:
    return sum(values.numel() for values in chain(module.parameters(), module.buffers()))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream to record on, which the usual one does not allow. Each keeps memory for matrix products."""
    return torch.cuda.Stream(device)


def may_be_recorded(module: nn.Module, task: Task) -> bool:
    """Return whether a network is small, and made of torch's layers and our target networks', and the task is ours.

    A user's own layer or loss may decide by values. A graph hypernetwork copies its graph to the device in each step.
    """
    ours = type(task).__module__.startswith("hyperbloom.common.tasks.")
    known = all(f"{type(part).__module__}.".startswith(KNOWN) for part in module.modules())
    # A norm without momentum averages over all batches, and reads how many there were.
    counts = any(getattr(part, "momentum", 0.0) is None for part in module.modules())
    return ours and known and not counts and _size(module) <= LARGEST
