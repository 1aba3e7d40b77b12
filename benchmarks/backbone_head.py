"""Rounds that train the head of a frozen network: on features that are kept, and through the backbone at every step.

    python -m benchmarks.backbone_head [--steps N]

Local SGD as in a round of `adapt: head`, with a ViT of random weights (6 layers of width 192, images of 3 x 32 x 32),
200 examples and one thread. Prints seconds per round and their ratio, and what the features cost once.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from hyperbloom.client.work.features import features, tail_of
from hyperbloom.client.work.sgd import FlatPart, Network, train
from hyperbloom.common.data import Examples
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import BACKBONE, ModelSpec, build
from hyperbloom.common.wire.orders import SGD

EXAMPLES, CLASSES = 200, 10


def backbone(folder: Path) -> Path:
    """Write a small ViT of random weights."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=6, num_attention_heads=3, intermediate_size=768, image_size=32, patch_size=4
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    return folder


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        spec = ModelSpec(BACKBONE, "M", (3, 32, 32), CLASSES, "head", str(backbone(Path(folder))))
        module = build(spec)
    data = Examples(torch.randn(EXAMPLES, 3, 32, 32), torch.randint(CLASSES, (EXAMPLES,)))
    sgd = SGD(arguments.steps, 64, 5e-3, 0.9, 5e-5, 50.0)
    shared, none = FlatPart(module, Layout.of(module)), FlatPart(module, Layout(()))
    tail = tail_of(module, spec.input_shape)
    assert tail is not None
    start = time.perf_counter()
    kept = Examples(features(module, data.inputs), data.labels)
    once = time.perf_counter() - start
    seconds = []
    for part, examples in ((module, data), (tail, kept)):
        start = time.perf_counter()
        train(Network(part, shared, none), examples, sgd, seed=0)
        seconds.append(time.perf_counter() - start)
    whole, head = seconds
    print(f"features of {EXAMPLES} examples, once: {once:.3f} s")
    print(f"a round of {arguments.steps} steps: {whole:.3f} s through the backbone, {head:.4f} s on features")
    print(f"ratio {whole / head:.0f}")


if __name__ == "__main__":
    main()
