"""Simultaneous training of virtual clients in one process."""

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.client import Client, enough_memory
from hyperbloom.client.work.features import tail_of
from hyperbloom.client.work.networks import Loaded, spec_of
from hyperbloom.client.work.sgd import Flat, Network
from hyperbloom.client.work.training import conclude, prepare, train
from hyperbloom.client.work.vectorised import train_rows
from hyperbloom.common.errors import HyperbloomError, attempt
from hyperbloom.common.models import ModelSpec, build
from hyperbloom.common.wire.orders import SGD, TrainOrder, TrainResult

INPUTS_AT_ONCE = 2**24
"""Most floats of input in one step; more clients train in several chunks. This is 85 clients with batches of 64 CIFAR
images, for which a step of the paper's LeNet takes 1.7 GB (measured on a CPU)."""

Task = tuple[Client, TrainOrder]
Results = dict[int, TrainResult | Exception]


def train_together(tasks: Sequence[Task]) -> list[TrainResult | Exception]:
    """Return for each task the result of `train`, or its exception.

    Clients with one architecture and equal orders train at once. A client trains alone if no other has an equal order,
    if the order names a method, if it has its own model, or if the model has batch normalisation or an LSTM.
    """
    results: Results = {}
    for chunk in _chunks(tasks):
        if len(chunk) == 1:
            results[chunk[0]] = attempt(train, *tasks[chunk[0]])
        else:
            results |= _train_chunk({index: tasks[index] for index in chunk})
    return [results[index] for index in range(len(tasks))]


def _chunks(tasks: Sequence[Task]) -> Iterator[list[int]]:
    """Yield lists of indices of tasks that can train at once, within the limit on memory."""
    groups: dict[tuple[int, Hashable], list[int]] = {}
    turns: dict[ClientSettings, int] = {}
    for index, (client, order) in enumerate(tasks):
        # A client's second order starts from the result of the first, so it needs a later turn.
        turn = turns[client.settings] = turns.get(client.settings, 0) + 1
        # Local methods have no axis for clients, and neither have hypernetworks, which may generate an own model.
        by_itself = client.own is not None or order.method is not None or _has_no_axis(spec_of(client, order.target))
        about = (client.settings.size, client.input_shape, client.num_classes, client.device)
        alike = (index if by_itself else None, about, replace(order, weights=None, method=None, resemble=None))
        groups.setdefault((turn, alike), []).append(index)
    for _, group in sorted(groups.items(), key=lambda item: item[0][0]):
        floats = max(
            min(order.sgd.batch_size, len(client.train_data)) * prod(client.input_shape)
            for client, order in (tasks[index] for index in group)
        )
        most = max(1, INPUTS_AT_ONCE // max(1, floats))
        yield from (group[start : start + most] for start in range(0, len(group), most))


@cache
def _has_no_axis(spec: ModelSpec) -> bool:
    """Return whether a network has batch normalisation or frozen weights, is recurrent, or is a pretrained one.

    Batch normalisation writes each client's statistics in place, torch has no vectorised LSTM, and pretrained networks
    may decide by values and drop out.
    """
    if spec.adapt == "head":  # the head trains on features by itself
        with torch.random.fork_rng(devices=[]):
            module = attempt(build, spec)
        if isinstance(module, nn.Module) and tail_of(module, spec.input_shape) is not None:
            return False
    if spec.backbone is not None:
        return True
    with torch.device("meta"):
        module = attempt(build, spec)
    return isinstance(module, nn.Module) and any(
        isinstance(part, _BatchNorm | _DropoutNd | nn.RNNBase) or not all(p.requires_grad for p in part.parameters())
        for part in module.modules()
    )


def _train_chunk(tasks: Mapping[int, Task]) -> Results:
    """Train clients of one network at once. They use it in turn before and after the training."""
    start = time.perf_counter()
    results: Results = {}
    rows: dict[int, tuple[int, Tensor, Tensor, Tensor | None]] = {}  # seed, values of both parts, momentum
    for index, (client, order) in tasks.items():
        prepared = attempt(prepare, client, order)
        if isinstance(prepared, Exception):
            results[index] = prepared
            continue
        network, seed = prepared
        # Clone the values, which the next client overwrites. Each client has its own momentum tensor.
        values = network.shared.values.clone(), network.personal.values.clone()
        rows[index] = seed, *values, network.personal.momentum
    if not rows:
        return results
    clients, sgd = [tasks[index][0] for index in rows], order.sgd
    seeds, shared, personal, momenta = zip(*rows.values(), strict=True)
    # One row for each client: `(C, P)` and `(C, Q)`.
    parts = Flat(network.shared.layout, torch.stack(shared)), Flat(network.personal.layout, torch.stack(personal))
    if any(momentum is not None for momentum in momenta):
        # A momentum of zeros has the same effect as None.
        none = torch.zeros_like(network.personal.values)
        parts[1].momentum = torch.stack([none if momentum is None else momentum for momentum in momenta])
    together = Network(network.module, *parts)
    losses = attempt(_train_rows, network, together, clients, sgd, seeds)
    if isinstance(losses, HyperbloomError):
        return results | dict.fromkeys(rows, losses)
    if isinstance(losses, Exception):  # a network that decides by values or draws numbers has no axis for clients
        return results | {index: attempt(train, *tasks[index]) for index in rows}
    seconds = (time.perf_counter() - start) / len(rows)
    for row, (index, loss) in enumerate(zip(rows, losses, strict=True)):
        client, order = tasks[index]
        network.shared.load(together.shared.values[row])
        network.personal.load(together.personal.values[row])
        if together.personal.momentum is not None:
            network.personal.momentum = together.personal.momentum[row].clone()
        results[index] = attempt(conclude, client, order, network, loss, seconds)
    return results


@enough_memory()
def _train_rows(
    network: Loaded, together: Network, clients: Sequence[Client], sgd: SGD, seeds: Sequence[int]
) -> list[float]:
    seen = [network.on_features(client, client.train_data) for client in clients]
    together.module = seen[0][0]
    return train_rows(together, [data for _, (data,) in seen], sgd, seeds).tolist()
