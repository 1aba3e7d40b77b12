"""HAFL-distillation: FedAvg on one shared architecture, which every client distils into its own on its own data.

Importing this module registers it, and how its clients teach, so they are those of this process (engine `inline`).

The baseline of Litany, Maron, Acuna, Kautz, Chechik, Fidler: Federated Learning with Heterogeneous Architectures using
Graph HyperNetworks, 2022, https://arxiv.org/abs/2201.08459, section 5, with the loss of Hinton, Vinyals, Dean:
Distilling the Knowledge in a Neural Network, 2015, https://arxiv.org/abs/1503.02531:

    CE(student, labels) + T^2 KL(softmax(teacher / T) || softmax(student / T))

This is for classes. For several labels, the second term is that of each label's probability, and for numbers the
squared distance. The authors' temperature is not known.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hyperbloom.client.work.client import Client
from hyperbloom.client.work.refinement import REFINERS
from hyperbloom.client.work.scoring import settle_norms
from hyperbloom.common.config import Positive, Section
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import RefusedError
from hyperbloom.common.models import build_own
from hyperbloom.common.tasks import Task
from hyperbloom.common.tasks.classification import OfClasses
from hyperbloom.common.tasks.multilabel import Multilabel
from hyperbloom.common.wire.orders import Introduction, Refinement
from hyperbloom.strategies import STRATEGIES
from hyperbloom.strategies.algorithm import Recipe
from hyperbloom.strategies.fedavg import FedAvg

TEMPERATURE = 4.0
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4
"""As for all other methods in the paper's tables (`figures/papers`)."""


def distance(task: Task, student: Tensor, teacher: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Return how far a network's outputs are from its teacher's, as a mean over the batch; at least 0."""
    if isinstance(task, OfClasses):  # a mean over examples and pixels
        own, other = (F.log_softmax(logits / temperature, 1) for logits in (student, teacher))
        soft = F.kl_div(own, other, None, None, "batchmean", log_target=True)
        return temperature**2 * soft * (len(student) * student.shape[1] / student.numel())
    if isinstance(task, Multilabel):
        soft = (teacher / temperature).sigmoid()
        logits = torch.stack([student, teacher]) / temperature
        against, own = F.binary_cross_entropy_with_logits(logits, soft.expand_as(logits), reduction="none")
        return temperature**2 * (against - own).mean()
    return (student - teacher).square().mean()


def distil(
    client: Client, teacher: nn.Module, head: tuple[str, ...], data: Examples, settings: Refinement, seed: int
) -> nn.Module:
    """Return a fresh network of the client's own architecture, trained on its examples and the teacher's logits.

    The teacher's norms are settled, and its weights do not change. The seed decides the first weights and the batches.
    The rate falls from that of the settings to zero as a cosine, as the paper anneals it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student = build_own(client.own_spec()).to(data.labels.device)
    teacher.eval()
    with torch.no_grad():
        answers = torch.cat([teacher(inputs) for inputs in data.inputs.split(1024)])
    optimizer = torch.optim.SGD(student.parameters(), settings.rate, MOMENTUM, weight_decay=WEIGHT_DECAY)
    annealed = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.epochs)
    generator = torch.Generator().manual_seed(seed)
    student.train()
    for _ in range(settings.epochs):
        for rows in torch.randperm(len(data), generator=generator).split(settings.batch):
            if len(rows) == 1 < len(data):  # batch normalisation may fail on one example
                continue
            rows = rows.to(data.labels.device)
            optimizer.zero_grad()
            outputs = student(data.inputs[rows])
            (data.loss(outputs, rows) + distance(data.task, outputs, answers[rows])).backward()
            optimizer.step()
        annealed.step()
    settle_norms(student, data)
    return student


class HAFLDistillationOptions(Section):
    """Options of HAFL-distillation."""

    epochs: Positive = Field(
        20, description="passes over a client's examples to distil, before every evaluation; the paper's: 200"
    )


class HAFLDistillation(FedAvg):
    """FedAvg trains `model`; before an evaluation each client distils it into its own architecture (--model).

    A client works for both: it trains the shared network in each round, and its own one anew at each evaluation.
    """

    options: HAFLDistillationOptions
    own_models: ClassVar[Literal["no", "may", "must"]] = "must"

    def serves(self, about: Introduction, others: Iterable[Introduction]) -> None:
        """Refuse a client without its own model."""
        if about.types is None and about.graph is None:
            raise RefusedError("this run teaches every client's own model; join with --model")

    def recipe(self, number: int) -> Recipe:
        """Distil the shared network before an evaluation."""
        local = self.config.local
        distillation = Refinement(self.options.epochs, local.learning_rate, local.batch_size, "student")
        return replace(super().recipe(number), refinement=distillation)


STRATEGIES["hafl-distillation"] = HAFLDistillation
REFINERS["student"] = distil
