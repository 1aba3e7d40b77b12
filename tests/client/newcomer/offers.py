"""An offer as a server makes it, and the newcomer that takes it."""

from pathlib import Path

import torch

from hyperbloom.client.newcomer.guarantee import Promise
from hyperbloom.client.newcomer.ledger import Ledger
from hyperbloom.client.newcomer.newcomer import Newcomer
from hyperbloom.client.newcomer.sources import Sources
from hyperbloom.common.data import DataSpec
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.encoders import EncoderSpec, build_encoder, encoder_layout, version_of
from hyperbloom.common.layout import Weights
from hyperbloom.common.wire.newcomers import Offer

SHAPE, CLASSES, DIM = (1, 8, 8), 10, 5
DIGITS = DataSpec("digits", partition=1, partitions=30)


def offer(encoder: str = "private", seed: int = 0, model: str = "mlp", shape: tuple[int, ...] = SHAPE) -> Offer:
    torch.manual_seed(seed)
    spec = EncoderSpec(encoder, shape, DIM)
    values = encoder_layout(spec).flatten(dict(build_encoder(spec).named_parameters()))
    weights = Weights(encoder_layout(spec), values)
    common = {"run": "a-run", "round": 7, "clients": 12, "expected": "a newcomer gets all"}
    what = {"model": model, "sizes": ("S", "M"), "input_shape": shape, "num_classes": CLASSES}
    return Offer(
        **common,
        **what,
        scaling=Scaling(16.0, (0.3053,), (0.3760,)),
        encoder=encoder,
        dim=DIM,
        encoder_version=version_of(values),
        weights=weights,
        scaling_known_by="The preprocessing is that of 12 of 12 clients, as they told.",
    )


def newcomer(folder: Path, data: DataSpec = DIGITS, promise: Promise | None = None, budget: float | None = None):  # type: ignore[no-untyped-def]
    return Newcomer(Sources(data), "S", promise, budget, Ledger(folder / "state"), "box:9092")


def expected(made: Offer, inputs: torch.Tensor) -> torch.Tensor:
    """Return the descriptor by the encoder itself, on all examples at once."""
    encoder = build_encoder(EncoderSpec(made.encoder, made.input_shape, DIM))
    for name, parameter in encoder.named_parameters():
        parameter.data = made.weights.layout.views(made.weights.values)[name].clone()
    with torch.no_grad():
        return encoder(inputs)  # type: ignore[no-any-return]
