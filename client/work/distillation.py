"""HAFL-distillation on the client: it distils the federation's shared network into its own architecture.

The baseline of Litany, Maron, Acuna, Kautz, Chechik, Fidler: Federated Learning with Heterogeneous Architectures using
Graph HyperNetworks, 2022, https://arxiv.org/abs/2201.08459, with the loss of Hinton, Vinyals, Dean: Distilling the
Knowledge in a Neural Network, 2015, https://arxiv.org/abs/1503.02531:

    CE(student, labels) + T^2 KL(softmax(teacher / T) || softmax(student / T))

This is for classes. The task says what takes the place of both for several labels, numbers and masks.
"""

import torch
from torch import nn

from hyperbloom.common.data import Examples
from hyperbloom.common.errors import WireError
from hyperbloom.common.models import ModelSpec, build_own
from hyperbloom.common.wire.orders import Refinement

MOST_EPOCHS = 10_000
MOMENTUM = 0.9


def distil(teacher: nn.Module, spec: ModelSpec, data: Examples, settings: Refinement, seed: int) -> nn.Module:
    """Return a fresh network of the client's own architecture, trained on its examples and the teacher's logits.

    The teacher's norms are settled, and its weights do not change. The seed decides the first weights and the batches.

    Raises:
        WireError: a setting is out of range.
    """
    temperature = settings.distil_temperature or 0.0
    if not 1 <= settings.epochs <= MOST_EPOCHS or settings.rate <= 0 or settings.batch < 1 or temperature <= 0:
        raise WireError(
            f"order: expected 1 to {MOST_EPOCHS} epochs with a rate, batches and temperature, found {settings}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student = build_own(spec).to(data.labels.device)
    teacher.eval()
    with torch.no_grad():
        answers = torch.cat([teacher(inputs) for inputs in data.inputs.split(1024)])
    optimizer = torch.optim.SGD(student.parameters(), lr=settings.rate, momentum=MOMENTUM)
    generator = torch.Generator().manual_seed(seed)
    student.train()
    for _ in range(settings.epochs):
        for rows in torch.randperm(len(data), generator=generator).split(settings.batch):
            if len(rows) == 1 < len(data):  # batch normalisation may fail on one example
                continue
            rows = rows.to(data.labels.device)
            optimizer.zero_grad()
            outputs = student(data.inputs[rows])
            (data.loss(outputs, rows) + data.task.distil(outputs, answers[rows], temperature)).backward()
            optimizer.step()
    return student
