"""LoRA's training steps with the frozen network in bfloat16, beside single precision.

    python -m benchmarks.half_precision [--steps N] [--device cpu]

Local SGD as in a round of `adapt: lora:r=4`, through ViTs of random weights (images of 3 x 64 x 64 in 64 patches),
batches of 32, taking turns. Prints seconds per step, their ratio, and how far the weights end from those of single
precision, as a share of the way that they went.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from benchmarks.measure import machine
from hyperbloom.client.work import sgd as training
from hyperbloom.client.work.sgd import FlatPart, Network, train
from hyperbloom.common.data import Examples
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import BACKBONE, ModelSpec, build
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


def measure(width: int, layers: int, steps: int, device: torch.device) -> tuple[int, list[float], float]:
    """Return the frozen numbers, median seconds per step in single and in half precision, and the distance."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        spec = ModelSpec(BACKBONE, "M", (3, 64, 64), 10, "lora:r=4", str(backbone(Path(folder), width, layers)))
        module = build(spec).to(device)
    data = Examples(torch.randn(200, 3, 64, 64).to(device), torch.randint(10, (200,)).to(device))
    shared, none = FlatPart(module, Layout.of(module)), FlatPart(module, Layout(()))
    start, ends = shared.values.clone(), {}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    sgd = SGD(steps, 32, 5e-3, 0.9, 5e-5, 50.0)
    for turn in range(TURNS + 1):
        for half in (False, True):
            shared.load(start)
            with (
                patch.object(training, "LARGE", 0),
                patch.object(training, "gains_by_half", lambda _, half=half: half),
            ):
                began = time.perf_counter()
                train(Network(module, shared, none), data, sgd, seed=0)
            if turn:  # the first one warms up
                seconds[half].append((time.perf_counter() - began) / steps)
            ends[half] = shared.values.clone()
    distance = (ends[True] - ends[False]).norm() / (ends[False] - start).norm()
    return sum(x.numel() for x in module.buffers()), [median(seconds[half]) for half in (False, True)], float(distance)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="cpu", type=torch.device)
    arguments = parser.parse_args()
    print(f"{machine()}; this device gains: {training.gains_by_half(arguments.device)}")
    print("| ViT | frozen numbers | s a step | in bfloat16 | ratio | distance |\n|---|---:|---:|---:|---:|---:|")
    for name, (width, layers) in SIZES.items():
        frozen, (single, half), distance = measure(width, layers, arguments.steps, arguments.device)
        print(f"| {name} | {frozen:,} | {single:.3f} | {half:.3f} | {single / half:.2f} | {100 * distance:.1f} % |")


if __name__ == "__main__":
    main()
