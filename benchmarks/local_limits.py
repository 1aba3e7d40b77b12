"""What the machine allows for local training: variants of a step against the one as shipped, and a roofline.

Networks: the paper's LeNet and a ResNet-18 on images of 3 x 32 x 32, an MLP on 784 numbers; batches of 64. As shipped
is a step of `client.work.sgd`: images channels-last on a CPU, parameters in one flat vector. Each variant changes one
thing, and takes turns with it:

* bf16: the forward pass under `torch.autocast` in bfloat16;
* bf16 products: matrix products of float32 that oneDNN may round to bfloat16 (`torch.set_float32_matmul_precision`);
* compiled: the network through `torch.compile`; its first steps, which compile, are counted apart;
* fused SGD: `torch.optim.SGD(fused=True)` and `clip_grad_norm_` in place of the flat vector;
* batch 256: seconds an example in larger batches, which is another algorithm.

The roofline: the floating-point operations of a step, as torch counts them, over the rate of a large product of
float32 matrices, which is near to the best that these cores do. A ratio near 1 leaves nothing to gain. Beside it stands
the share of a step that torch's own convolutions and products take (its profiler): a better loop could save the rest at
most.

    python -m benchmarks.local_limits [--quick]
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import Comparison, alternate, main, sgd_of, timed
from hyperbloom.client.work.sgd import FlatPart, Network, draw_batches, train
from hyperbloom.common.config import LocalConfig
from hyperbloom.common.data import Examples
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import ModelSpec, build
from hyperbloom.common.models.residual import ARCHITECTURES, ResidualCNN

IMAGES, CLASSES, BATCH = 800, 10, 64
PRODUCT = 2048
KERNELS = ("aten::convolution_backward", "aten::mkldnn_convolution", "aten::mm", "aten::addmm")

Make = Callable[[], nn.Module]
NETWORKS: dict[str, tuple[Make, tuple[int, ...], int]] = {
    "LeNet": (lambda: build(ModelSpec("lenet", "M", (3, 32, 32), CLASSES)), (3, 32, 32), 50),
    "MLP": (lambda: build(ModelSpec("mlp", "M", (784,), CLASSES)), (784,), 200),
    "ResNet-18": (lambda: ResidualCNN("ResNet-18", ARCHITECTURES["ResNet-18"], (3, 32, 32), CLASSES), (3, 32, 32), 1),
}


def run(quick: bool = False) -> list[Comparison]:
    comparisons = []
    for name, (make, shape, steps) in NETWORKS.items():
        repetitions = 2 if quick else 7
        data = noise(shape)
        variants = ("bf16", "bf16 products", "compiled", "fused SGD", "batch 256")
        for variant in variants[:1] if quick else variants:
            comparisons.append(compare(name, variant, make, data, steps, repetitions))
        comparisons.append(roofline(name, make, data, steps, repetitions))
    return comparisons


def compare(name: str, variant: str, make: Make, data: Examples, steps: int, repetitions: int) -> Comparison:
    """Time rounds of a variant and of what is shipped in turns, from the same weights over the same batches."""
    local = LocalConfig(steps=steps, batch_size=BATCH)
    start, shipped = shipped_round(make, data, local)
    note, scale = "", 1
    if variant == "fused SGD":
        other = fused_round(make, data, local)
    elif variant == "batch 256":
        other, scale = shipped_round(make, data, local.model_copy(update={"batch_size": 256}))[1], 4
    else:
        other = shipped_round(make, data, local, variant)[1]
    first = timed(other)  # compiles, where something is compiled
    if variant == "compiled":
        note = f"; {first:.1f} s for the first {steps} steps, which compile"
    if scale == 1:
        note += f"; trained weights differ by {apart(shipped(), other(), start):.1e} of their way"
    times, shipped_times = alternate(other, shipped, repetitions)
    each, shipped_each = ([seconds / steps * 1000 for seconds in side] for side in (times, shipped_times))
    conditions = f"batch {BATCH}, {steps} steps a round, {repetitions} rounds each{note}"
    return Comparison.of(f"{name}, {variant}", [ms / scale for ms in each], shipped_each, "ms/64 examples", conditions)


def shipped_round(
    make: Make, data: Examples, local: LocalConfig, variant: str = ""
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return the first weights, and a function that trains from them and returns the trained ones."""
    torch.manual_seed(0)
    module = make()
    layout = Layout.of(module)
    part = FlatPart(module, layout)
    start, sgd = part.values.clone(), sgd_of(local)
    runs: nn.Module = torch.compile(module) if variant == "compiled" else module  # type: ignore[assignment]
    network = Network(_Autocast(runs) if variant == "bf16" else runs, part, FlatPart(module, Layout(())))

    def one_round() -> Tensor:
        part.load(start)
        with products(variant == "bf16 products"):
            train(network, data, sgd, 0)
        return part.values.clone()

    return start, one_round


def fused_round(make: Make, data: Examples, local: LocalConfig) -> Callable[[], Tensor]:
    """Return a function that does the same with torch's fused optimiser."""
    torch.manual_seed(0)
    module = make()
    parameters = list(module.parameters())
    start = [parameter.detach().clone() for parameter in parameters]
    sgd = sgd_of(local)

    def one_round() -> Tensor:
        with torch.no_grad():
            for parameter, values in zip(parameters, start, strict=True):
                parameter.copy_(values)
        module.train()
        optimizer = torch.optim.SGD(
            parameters, lr=sgd.learning_rate, momentum=sgd.momentum, weight_decay=sgd.weight_decay, fused=True
        )
        for batch in draw_batches(len(data), sgd.batch_size, sgd.steps, 0):
            optimizer.zero_grad()
            F.cross_entropy(module(data.inputs[batch]), data.labels[batch]).backward()
            nn.utils.clip_grad_norm_(parameters, sgd.clip)
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in parameters])

    return one_round


class _Autocast(nn.Module):
    """A network whose forward pass computes in bfloat16 where torch holds that to be safe."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Return logits in float32."""
        with torch.autocast("cpu", torch.bfloat16):
            logits: Tensor = self.module(x)
        return logits.float()


@contextmanager
def products(rounded: bool) -> Iterator[None]:
    """Let oneDNN round the factors of products to bfloat16 during the body."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if rounded else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def roofline(name: str, make: Make, data: Examples, steps: int, repetitions: int) -> Comparison:
    """Hold a step as shipped against its operations at the rate of a large product; the ratio is below 1."""
    local = LocalConfig(steps=steps, batch_size=BATCH)
    _, shipped = shipped_round(make, data, local)
    work = operations(make(), data)
    left, right = torch.rand(PRODUCT, PRODUCT), torch.rand(PRODUCT, PRODUCT)
    times, product_times = alternate(shipped, lambda: left @ right, repetitions)
    rate = 2 * PRODUCT**3 / min(product_times)
    bound = 1000 * work / rate
    conditions = (
        f"{work / 1e6:.0f} million operations a step at {rate / 1e9:.0f} GFLOP/s, the best of {repetitions} products "
        f"of {PRODUCT} x {PRODUCT} matrices; as shipped a step reaches {work * steps / min(times) / 1e9:.0f} GFLOP/s; "
        f"{100 * kernels(shipped):.0f} % of it are convolutions and products"
    )
    return Comparison.of(
        f"{name}, roofline", [seconds / steps * 1000 for seconds in times], [bound], "ms/64 examples", conditions
    )


def kernels(shipped: Callable[[], Tensor]) -> float:
    """Return the share of a round that torch's convolutions and matrix products take."""
    with profile() as recorded:
        shipped()
    events = [(event.key, event.self_cpu_time_total) for event in recorded.key_averages()]
    return sum(spent for key, spent in events if key in KERNELS) / sum(spent for _, spent in events)


def operations(module: nn.Module, data: Examples) -> int:
    """Return the floating-point operations of a step's forward and backward pass."""
    with FlopCounterMode(display=False) as counter:
        data.loss(module(data.inputs[:BATCH]), torch.arange(BATCH)).backward()
    return int(counter.get_total_flops())


def apart(one: Tensor, other: Tensor, start: Tensor) -> float:
    """Return how far two trained vectors are from each other, as a share of how far training has gone."""
    return float((one - other).norm() / (one - start).norm())


def noise(shape: tuple[int, ...]) -> Examples:
    """Return random inputs in the memory format in which a client trains, in ten classes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand((IMAGES, *shape), generator=generator)
    return Examples(inputs, torch.randint(CLASSES, (IMAGES,), generator=generator)).to("cpu")


if __name__ == "__main__":
    main(run, __doc__)
