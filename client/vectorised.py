"""Local training of several clients at once: `training.train` with an axis for clients.

The networks of all clients run as one, whose weights have an axis more (`torch.func`): a step costs a few large kernels
in place of many small ones for each client. Batches, clipping, weight decay and momentum are each client's own, so the
results are those of training one after the other, up to the order in which floats are summed. On GPUs with TF32, which
torch lets cuDNN use for convolutions unless `torch.backends.cudnn.allow_tf32` is off, up to its ten bits.
"""

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.training import Flat, draw_batches
from hyperbloom.client.worker import Worker
from hyperbloom.common.attempt import attempt
from hyperbloom.common.data import Examples
from hyperbloom.common.messages import TrainOrder, TrainResult
from hyperbloom.common.models import ModelSpec, build

__all__ = ["Task", "train_rows", "train_together"]

INPUTS_AT_ONCE = 2**24
"""Floats of input in a step beyond which clients train in several chunks: 85 clients with batches of 64 CIFAR images,
whose step takes the paper's LeNet 1.7 GB (measured on a CPU)."""

Task = tuple[Worker, TrainOrder]
Results = dict[int, TrainResult | Exception]


def train_rows(
    module: nn.Module, shared: Flat, personal: Flat, data: Sequence[Examples], orders: Sequence[TrainOrder]
) -> Tensor:
    """Take all orders' SGD steps in place and return each client's mean loss, `(C,)`.

    Args:
        module: the architecture; its own parameters are neither read nor written.
        shared: `(C, P)`, what the server sent; each row's gradient is clipped to `clip` of the orders.
        personal: `(C, Q)`, what stays on the clients, with its momentum; not clipped. Either may be empty.
        data: each client's training examples, all on one device.
        orders: each client's; they differ in their seeds only.
    """
    parts = [part for part in (shared, personal) if part.layout.numel]
    labels = torch.cat([each.labels for each in data])
    inputs = torch.cat([each.inputs for each in data])  # copied once, so that a step gathers its batches in one go
    batches, shares = (drawn.to(labels.device) for drawn in _draw_rows(data, orders))
    order, total = orders[0], torch.zeros(len(orders), device=labels.device)

    def loss(vectors: tuple[Tensor, ...], x: Tensor, y: Tensor, share: Tensor) -> Tensor:
        parameters: dict[str, Tensor] = {}
        for part, vector in zip(parts, vectors, strict=True):
            parameters |= part.layout.views(vector)
        return F.cross_entropy(functional_call(module, parameters, (x,)), y, reduction="none") @ share

    gradients_and_losses = vmap(grad_and_value(loss))
    module.train()
    for batch in batches:
        values = tuple(part.values for part in parts)
        gradients, losses = gradients_and_losses(values, inputs[batch], labels[batch], shares)
        for part, gradient in zip(parts, gradients, strict=True):
            part.gradient = gradient
        if shared.layout.numel:
            shared.clip(order.clip)
        for part in parts:
            part.step(order)
        total += losses
    return total / order.steps


def _draw_rows(data: Sequence[Examples], orders: Sequence[TrainOrder]) -> tuple[Tensor, Tensor]:
    """Return the batches that each client draws alone, and the share of each example in the mean loss.

    Shape:
        batches `(steps, C, B)`, indices into the data of all clients in a row; shares `(C, B)`. Where a client has less
        than `B` examples, the first of its batch stands in for the others, with a share of zero.
    """
    size = max(min(order.batch_size, len(each)) for each, order in zip(data, orders, strict=True))
    shares = data[0].inputs.new_zeros(len(data), size, device="cpu")
    rows, start = [], 0
    for share, each, order in zip(shares, data, orders, strict=True):
        batches = start + draw_batches(len(each), order.batch_size, order.steps, order.seed)
        share[: batches.shape[1]] = 1 / batches.shape[1]
        rows.append(torch.cat([batches, batches[:, :1].expand(-1, size - batches.shape[1])], dim=1))
        start += len(each)
    return torch.stack(rows, dim=1), shares


def train_together(tasks: Sequence[Task]) -> list[TrainResult | Exception]:
    """Return for each task what `worker.train(order)` returns or raises.

    Clients of one architecture and with equal orders train at once; who is alone in this, is ordered to train by a
    method, has a model of its own or one with batch normalisation or an LSTM, trains as always.
    """
    results: Results = {}
    for chunk in _chunks(tasks):
        if len(chunk) == 1:
            worker, order = tasks[chunk[0]]
            results[chunk[0]] = attempt(worker.train, order)
        else:
            results |= _train_chunk({index: tasks[index] for index in chunk})
    return [results[index] for index in range(len(tasks))]


def _chunks(tasks: Sequence[Task]) -> Iterator[list[int]]:
    """Yield the indices of tasks that can train at once, not more of them than memory allows."""
    groups: dict[tuple[int, Hashable], list[int]] = {}
    turns: dict[ClientSettings, int] = {}
    for index, (worker, order) in enumerate(tasks):
        # A second order to the same client builds on what the first left.
        turn = turns[worker.settings] = turns.get(worker.settings, 0) + 1
        spec = ModelSpec(order.model, worker.settings.size, worker.input_shape, worker.num_classes)
        # A model of its own may be written by a hypernetwork, which has no axis for clients; nor have methods.
        alone = index if worker.own is not None or order.method is not None or _has_no_axis(spec) else None
        about = (alone, worker.settings.size, worker.input_shape, worker.num_classes, worker.device)
        groups.setdefault((turn, (about, replace(order, weights=None))), []).append(index)
    for _, group in sorted(groups.items(), key=lambda item: item[0][0]):
        floats = max(
            min(order.batch_size, len(worker.train_data)) * prod(worker.input_shape)
            for worker, order in (tasks[index] for index in group)
        )
        most = max(1, INPUTS_AT_ONCE // max(1, floats))
        yield from (group[start : start + most] for start in range(0, len(group), most))


@cache
def _has_no_axis(spec: ModelSpec) -> bool:
    """Tell whether a network normalises by batch, or is recurrent.

    Each client's batch is its own, and its statistics are written in place; torch has no vectorised LSTM.
    """
    with torch.device("meta"):
        module = attempt(build, spec)
    return isinstance(module, nn.Module) and any(isinstance(part, _BatchNorm | nn.RNNBase) for part in module.modules())


def _train_chunk(tasks: Mapping[int, Task]) -> Results:
    """Train clients of one network: it serves them in turn for what comes before and after the training."""
    start = time.perf_counter()
    results: Results = {}
    there, orders, data = [], [], []
    vectors: list[tuple[Tensor, Tensor]] = []
    momenta: list[Tensor | None] = []
    for index, (worker, order) in tasks.items():
        prepared = attempt(worker.prepare, order)
        if isinstance(prepared, Exception):
            results[index] = prepared
            continue
        network, own = prepared
        there.append(index)
        orders.append(own)
        data.append(worker.train_data)
        # The next one's weights take their place; a momentum is another tensor for each.
        vectors.append((network.shared.values.clone(), network.personal.values.clone()))
        momenta.append(network.personal.momentum)
    if not there:
        return results
    shared, personal = (
        Flat(part.layout, torch.stack(rows))
        for part, rows in zip((network.shared, network.personal), zip(*vectors, strict=True), strict=True)
    )
    if any(momentum is not None for momentum in momenta):
        # Zeros are the same as none.
        none = torch.zeros_like(network.personal.values)
        personal.momentum = torch.stack([none if momentum is None else momentum for momentum in momenta])
    losses = attempt(lambda: train_rows(network.module, shared, personal, data, orders).tolist())
    if isinstance(losses, Exception):
        return results | dict.fromkeys(there, losses)
    seconds = (time.perf_counter() - start) / len(there)
    for row, index in enumerate(there):
        worker, order = tasks[index]
        network.shared.load(shared.values[row])
        network.personal.load(personal.values[row])
        if personal.momentum is not None:
            network.personal.momentum = personal.momentum[row].clone()
        results[index] = attempt(worker.conclude, order, network, losses[row], seconds)
    return results
