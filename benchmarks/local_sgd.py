"""Local training on a client: our `client.work.sgd.train` against a bare PyTorch loop.

A LeNet of 121,182 floats on CIFAR-10-shaped float tensors, 50 steps with batches of 64, momentum, weight decay and
clipping as in the paper's code; the same initial weights and the same batches on both sides:

* ours: parameters and gradients in one flat vector each, the step written out (`FlatPart`);
* other: `nn.Module`, `torch.optim.SGD`, `clip_grad_norm_`, batches indexed from tensors.

Once with the same network and the same memory format on both sides, which weighs the loop alone; twice as shipped,
images channels-last on a CPU and ReLU after pooling, against the network as a reader of the paper writes it. The
loop alone also runs on a CUDA device, where there is one. At last an MLP trains while another program keeps one core
busy: ours takes one thread for such a network, and torch one for each core.

    python -m benchmarks.local_sgd [--quick]
"""

import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import Comparison, alternate, main, sgd_of
from benchmarks.textbook import TextbookLeNet
from hyperbloom.client.work.sgd import FlatPart, Network, draw_batches, train
from hyperbloom.common.config import LocalConfig
from hyperbloom.common.data import Examples
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import ModelSpec, build

SPEC = ModelSpec("lenet", "M", (3, 32, 32), 10)
GREY = ModelSpec("lenet", "M", (1, 28, 28), 10)
MLP = ModelSpec("mlp", "M", (1, 8, 8), 10)
IMAGES = 800


def run(quick: bool = False) -> list[Comparison]:
    local, repetitions = LocalConfig(), 3 if quick else 15
    data = random_images(IMAGES)
    torch.manual_seed(0)
    module = build(SPEC)
    initial = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    loop = _compare("local SGD, the loop alone", data, build(SPEC), data, initial, local, repetitions)
    shipped = _compare("local SGD, as shipped", data.to("cpu"), TextbookLeNet(), data, initial, local, repetitions)
    grey, module = random_images(IMAGES, GREY), build(GREY)
    start = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    name, textbook = "local SGD, grey images", TextbookLeNet(1, 28)
    rows = [loop, shipped, _compare(name, grey.to("cpu"), textbook, grey, start, local, repetitions, GREY)]
    if torch.cuda.is_available():
        there = data.to("cuda")
        name = f"local SGD, on {torch.cuda.get_device_name()}"
        rows.append(_compare(name, there, build(SPEC).to("cuda"), there, initial, local, repetitions))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            module, digits = build(MLP), random_images(IMAGES, MLP)
            initial = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
            name = "local SGD, MLP, a core busy"
            rows.append(_compare(name, digits, module, digits, initial, local, repetitions, MLP))
        finally:
            other.kill()
    return rows


def _compare(
    name: str,
    ours_data: Examples,
    bare_module: nn.Module,
    bare_data: Examples,
    initial: dict[str, Tensor],
    local: LocalConfig,
    repetitions: int,
    spec: ModelSpec = SPEC,
) -> Comparison:
    times, bare_times = alternate(
        ours(ours_data, initial, local, spec), bare(bare_data, initial, local, bare_module), repetitions
    )
    rates, bare_rates = ([local.steps / seconds for seconds in side] for side in (times, bare_times))
    conditions = (
        f"{spec.name} of {sum(map(torch.Tensor.numel, initial.values())):,} floats, "
        f"{IMAGES} images of {' x '.join(map(str, spec.input_shape))}, batch {local.batch_size}, "
        f"{local.steps} steps a round; {repetitions} rounds each; {torch.get_num_threads()} threads"
    )
    return Comparison.of(name, rates, bare_rates, "steps/s", conditions, more_is_better=True)


def random_images(count: int, spec: ModelSpec = SPEC) -> Examples:
    """Return images of noise in ten classes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand((count, *spec.input_shape), generator=generator)
    return Examples(inputs, torch.randint(spec.num_classes, (count,), generator=generator))


def ours(
    data: Examples, initial: dict[str, Tensor], local: LocalConfig, spec: ModelSpec = SPEC
) -> Callable[[], Tensor]:
    """Return a function that trains from `initial` and returns the trained parameters as one vector."""
    module = build(spec).to(data.labels.device)
    layout = Layout.of(module)
    network = Network(module, FlatPart(module, layout), FlatPart(module, Layout(())))
    start = layout.flatten(initial)
    sgd = sgd_of(local)

    def one_round() -> Tensor:
        network.shared.load(start)
        train(network, data, sgd, 0)
        return network.shared.values.cpu()

    return one_round


def bare(data: Examples, initial: dict[str, Tensor], local: LocalConfig, module: nn.Module) -> Callable[[], Tensor]:
    """Return a function that does the same with what PyTorch brings."""
    parameters = list(module.parameters())

    def one_round() -> Tensor:
        module.load_state_dict(initial)
        module.train()
        optimizer = torch.optim.SGD(
            parameters, lr=local.learning_rate, momentum=local.momentum, weight_decay=local.weight_decay
        )
        for batch in draw_batches(len(data), local.batch_size, local.steps, seed=0).to(data.labels.device):
            optimizer.zero_grad()
            F.cross_entropy(module(data.inputs[batch]), data.labels[batch]).backward()
            nn.utils.clip_grad_norm_(parameters, local.clip)
            optimizer.step()
        return nn.utils.parameters_to_vector(parameters).detach().cpu()

    return one_round


if __name__ == "__main__":
    main(run, __doc__)
