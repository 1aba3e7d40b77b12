"""LoRA's training steps with the frozen network in bfloat16, beside single precision.

    python -m benchmarks.half_precision [--quick]

Local SGD as in a round of `adapt: lora:r=4`, through ViTs of random weights (images of 3 x 64 x 64 in 64 patches),
batches of 32, taking turns. It says how far the weights end from those of single precision, as a share of the way
that they went.
"""

import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.measure import Comparison, alternate, main
from hyperbloom.client.work import sgd as training
from hyperbloom.client.work.sgd import FlatPart, Network, train
from hyperbloom.common.data import Examples
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import BACKBONE, ModelSpec, build
from hyperbloom.common.program.device import pick_device
from hyperbloom.common.wire.orders import SGD

SIZES = {"6 layers of 192": (192, 6), "12 layers of 192": (192, 12), "12 layers of 384": (384, 12)}
TURNS = 5


def backbone(folder: Path, width: int, layers: int) -> Path:
    """Write a ViT of random weights."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        image_size=64,
        patch_size=8,
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    return folder


def run(quick: bool = False) -> list[Comparison]:
    """Compare each ViT, on a CUDA device where there is one."""
    device, steps, sizes = pick_device("auto"), 1 if quick else 4, list(SIZES)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [compare(name, *SIZES[name], steps, device) for name in (sizes[:1] if quick else sizes)]
    finally:
        torch.set_num_threads(before)


def compare(name: str, width: int, layers: int, steps: int, device: torch.device) -> Comparison:
    """Time trainings of both in turns."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        spec = ModelSpec(BACKBONE, "M", (3, 64, 64), 10, "lora:r=4", str(backbone(Path(folder), width, layers)))
        module = build(spec).to(device)
    data = Examples(torch.randn(200, 3, 64, 64).to(device), torch.randint(10, (200,)).to(device))
    shared, none = FlatPart(module, Layout.of(module)), FlatPart(module, Layout(()))
    start, ends, sgd = shared.values.clone(), {}, SGD(steps, 32, 5e-3, 0.9, 5e-5, 50.0)

    def training_in(half: bool) -> None:
        shared.load(start)
        with patch.object(training, "LARGE", 0), patch.object(training, "gains_by_half", lambda _: half):
            train(Network(module, shared, none), data, sgd, seed=0)
        ends[half] = shared.values.clone()

    sides = alternate(partial(training_in, True), partial(training_in, False), TURNS)
    halved, single = ([seconds / steps for seconds in side] for side in sides)
    distance = float((ends[True] - ends[False]).norm() / (ends[False] - start).norm())
    gains = "gains" if training.gains_by_half(device) else "does not gain"
    conditions = (
        f"LoRA, {sum(x.numel() for x in module.buffers()):,} frozen numbers in bfloat16, against single precision; "
        f"{steps} steps with batches of 32 images of 3 x 64 x 64; {TURNS} turns; 1 thread; by our rule this "
        f"{device.type} {gains}; weights end {100 * distance:.1f} % of their way apart"
    )
    return Comparison.of(f"half precision, ViT of {name}", halved, single, "s/step", conditions)


if __name__ == "__main__":
    main(run, __doc__)
