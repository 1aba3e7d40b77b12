"""Local training of several clients at once: `sgd.train` with an axis for clients.

The networks of all clients run as one network whose weights have an extra axis (`torch.func`). A step then costs a few
large kernels instead of many small ones for each client. Each client has its own batches, clipping, weight decay and
momentum, so the results equal those of training one after the other, up to the order of float sums. On GPUs, cuDNN's
convolutions use TF32 unless `torch.backends.cudnn.allow_tf32` is off; results then agree up to its ten bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from hyperbloom.client.work.sgd import Network, draw_batches
from hyperbloom.client.work.steps import repeat
from hyperbloom.common.data import Examples
from hyperbloom.common.wire.orders import SGD


def train_rows(network: Network, data: Sequence[Examples], sgd: SGD, seeds: Sequence[int]) -> Tensor:
    """Take all clients' SGD steps in place and return each client's mean loss, `(C,)`.

    `shared` is `(C, P)` and `personal` is `(C, Q)`, with a row for each client. The module's own parameters are neither
    read nor written.
    """
    labels = torch.cat([each.labels for each in data])
    inputs = torch.cat([each.inputs for each in data])  # one copy, so that a step gathers all batches at once
    task, given = data[0].task, [each.weights for each in data if each.weights is not None]
    weights = torch.cat(given) if given else None
    batches, shares = (drawn.to(labels.device) for drawn in _draw_rows(data, sgd, seeds))
    parts, total = network.parts, torch.zeros(len(data), device=labels.device)

    def loss(vectors: tuple[Tensor, ...], x: Tensor, y: Tensor, w: Tensor | None, share: Tensor) -> Tensor:
        parameters = dict(network.module.named_buffers())  # the call puts them back, if the network replaces one
        for part, vector in zip(parts, vectors, strict=True):
            parameters |= part.layout.views(vector)
        return task.loss(functional_call(network.module, parameters, (x,)), y, w, share)

    axes = (0, 0, 0, None if weights is None else 0, 0)
    gradients_and_losses = vmap(grad_and_value(loss), axes, randomness="error")  # each draws by its own seed alone
    network.module.train()

    def step(batch: Tensor) -> None:
        values = tuple(part.values for part in parts)
        some = None if weights is None else weights[batch]
        gradients, losses = gradients_and_losses(values, inputs[batch], labels[batch], some, shares)
        for part, gradient in zip(parts, gradients, strict=True):
            part.gradient = gradient
        if network.shared.layout.numel:
            network.shared.clip(sgd.clip)
        for part in parts:
            part.step(sgd)
        total.add_(losses)

    repeat(step, batches, network.module, task)
    return total / sgd.steps


def _draw_rows(data: Sequence[Examples], sgd: SGD, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the batches that each client would draw alone, and the share of each example in the mean loss.

    Shape:
        batches `(steps, C, B)`, indices into the concatenated data of all clients; shares `(C, B)`. If a client has
        fewer than `B` examples, the first of its batch fills the row with a share of zero.
    """
    size = max(min(sgd.batch_size, len(each)) for each in data)
    shares = data[0].inputs.new_zeros(len(data), size, device="cpu")
    rows, start = [], 0
    for share, each, seed in zip(shares, data, seeds, strict=True):
        batches = start + draw_batches(len(each), sgd.batch_size, sgd.steps, seed)
        share[: batches.shape[1]] = 1 / batches.shape[1]
        rows.append(torch.cat([batches, batches[:, :1].expand(-1, size - batches.shape[1])], dim=1))
        start += len(each)
    return torch.stack(rows, dim=1), shares
