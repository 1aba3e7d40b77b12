"""Rounds that train the head of a frozen network: on features that are kept, and through the backbone at every step.

    python -m benchmarks.backbone_head [--quick]

Local SGD as in a round of `adapt: head`, with a ViT of random weights (6 layers of width 192, images of 3 x 32 x 32),
200 examples and one thread.
"""

import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.measure import Comparison, alternate, main
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


def run(quick: bool = False) -> list[Comparison]:
    """Time rounds of both in turns."""
    steps, repetitions = (2, 1) if quick else (50, 3)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        spec = ModelSpec(BACKBONE, "M", (3, 32, 32), CLASSES, "head", str(backbone(Path(folder))))
        module = build(spec)
    data = Examples(torch.randn(EXAMPLES, 3, 32, 32), torch.randint(CLASSES, (EXAMPLES,)))
    sgd = SGD(steps, 64, 5e-3, 0.9, 5e-5, 50.0)
    shared, none = FlatPart(module, Layout.of(module)), FlatPart(module, Layout(()))
    tail = tail_of(module, spec.input_shape)
    assert tail is not None
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        start = time.perf_counter()
        kept = Examples(features(module, data.inputs), data.labels)
        once = time.perf_counter() - start
        head, whole = (
            partial(train, Network(part, shared, none), on, sgd, 0) for part, on in ((tail, kept), (module, data))
        )
        times, other = alternate(head, whole, repetitions, warm_up=0)
    finally:
        torch.set_num_threads(before)
    conditions = (
        f"on kept features, against through the backbone; ViT of 6 layers of width 192, {EXAMPLES} images of "
        f"3 x 32 x 32, {steps} steps with batch 64; {repetitions} rounds each; 1 thread; features once in {once:.1f} s"
    )
    return [Comparison.of("head of a frozen backbone", times, other, "s/round", conditions)]


if __name__ == "__main__":
    main(run, __doc__)
