"""Temporary training on a client's own examples before its network is scored: refinement, and distillation.

In HAFL-distillation the client distils the federation's shared network into its own architecture. It is the baseline of
Litany, Maron, Acuna, Kautz, Chechik, Fidler: Federated Learning with Heterogeneous Architectures using Graph
HyperNetworks, 2022, https://arxiv.org/abs/2201.08459, with the loss of Hinton, Vinyals, Dean: Distilling the Knowledge
in a Neural Network, 2015, https://arxiv.org/abs/1503.02531:

    CE(student, labels) + T^2 KL(softmax(teacher / T) || softmax(student / T))

This is for classes. The task says what takes the place of both for several labels, numbers and masks.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hyperbloom.client.work.own_network import Fixed, Generated
from hyperbloom.client.work.scoring import EVALUATION_BATCH, evaluate, settle_norms
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import WireError
from hyperbloom.common.models import ModelSpec, build_own
from hyperbloom.common.wire.orders import REFINED, Refinement

MOST_EPOCHS, MOST_TO_DISTIL = 100, 10_000
MOMENTUM = 0.9  # of distillation


def refine(module: nn.Module, head: tuple[str, ...], data: Examples, settings: Refinement, seed: int) -> nn.Module:
    """Return the network after some passes of plain SGD over the client's own examples.

    In HAFL-GHN this is the inference step of the paper's section 4.2, on the last layer. In FedAvg with fine-tuning and
    Per-FedAvg it adapts all weights. The other weights stay as sent or generated, and norms run in evaluation mode. The
    given module's weights do not change. If the loss on the examples grows, the result has the weights as sent.

    Raises:
        WireError: a setting is out of range.
    """
    if settings.part not in REFINED:
        raise WireError(f"order: expected to refine one of {REFINED}, found {settings.part!r}")
    if not 1 <= settings.epochs <= MOST_EPOCHS or settings.rate <= 0 or settings.batch < 1:
        raise WireError(f"order: expected 1 to {MOST_EPOCHS} epochs with a rate and batches, found {settings}")
    network, given = module, dict[str, Tensor](module.named_parameters())
    if isinstance(module, Generated):
        with torch.no_grad():
            network, given = module.network, module.weights()
    weights = {name: values.detach() for name, values in given.items()}
    chosen = tuple(weights) if settings.part == "all" else head
    refined = {name: weights[name].clone().requires_grad_() for name in chosen if name in weights}
    generator = torch.Generator().manual_seed(seed)
    sent = Fixed(network, weights)
    loss_as_sent = evaluate(sent, data).loss
    network.eval()
    for _ in range(settings.epochs if refined else 0):
        for rows in torch.randperm(len(data), generator=generator).split(settings.batch):
            gradients = [torch.zeros_like(values) for values in refined.values()]
            # A batch may contain all of a client's examples, so accumulate gradients in chunks that fit in memory.
            for some in rows.to(data.labels.device).split(EVALUATION_BATCH):
                outputs = functional_call(network, {**weights, **refined}, (data.inputs[some],))
                loss = data.loss(outputs, some) * (len(some) / len(rows))
                for total, gradient in zip(gradients, torch.autograd.grad(loss, list(refined.values())), strict=True):
                    total.add_(gradient)
            with torch.no_grad():
                for values, gradient in zip(refined.values(), gradients, strict=True):
                    values.sub_(gradient, alpha=settings.rate)
    after = Fixed(network, {**weights, **{name: values.detach() for name, values in refined.items()}})
    if settings.part == "all":
        settle_norms(after, data)  # the statistics belong to the weights as sent
    # Too large a learning rate must not make the model worse. A NaN also fails this test.
    if evaluate(after, data).loss <= loss_as_sent:
        return after
    settle_norms(sent, data)
    return sent


def distil(teacher: nn.Module, spec: ModelSpec, data: Examples, settings: Refinement, seed: int) -> nn.Module:
    """Return a fresh network of the client's own architecture, trained on its examples and the teacher's logits.

    The teacher's norms are settled, and its weights do not change. The seed decides the first weights and the batches.

    Raises:
        WireError: a setting is out of range.
    """
    temperature = settings.distil_temperature or 0.0
    if not 1 <= settings.epochs <= MOST_TO_DISTIL or settings.rate <= 0 or settings.batch < 1 or temperature <= 0:
        raise WireError(
            f"order: expected 1 to {MOST_TO_DISTIL} epochs with a rate, batches and temperature, found {settings}"
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
