"""Encoders: networks that map a client's unlabelled examples to a descriptor, from which its weights are generated.

The server initialises and trains them, and clients run them. They are pure torch.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hyperbloom.common.encoders.base import Encoder, encode, encode_backward
from hyperbloom.common.encoders.deepset import DeepSet, Private
from hyperbloom.common.errors import ModelError
from hyperbloom.common.layout import Layout

ENCODERS: dict[str, Callable[[tuple[int, ...], int], Encoder]] = {"deepset": DeepSet, "private": Private}

FIT_MOMENTUM = 0.9
FIT_CLIP = 1.0
"""Largest norm of the gradient of a step towards a descriptor, so that a distant one does not destroy the encoder."""


@dataclass(frozen=True)
class EncoderSpec:
    """The parameters of an encoder's architecture; `dim` is the length of a descriptor."""

    name: str
    input_shape: tuple[int, ...]
    dim: int


def build_encoder(spec: EncoderSpec) -> Encoder:
    """Build an encoder from torch's global generator; ModelError for an unknown name, or a shape or `dim` below 1."""
    if spec.name not in ENCODERS:
        raise ModelError(f"encoder: expected one of {', '.join(sorted(ENCODERS))}, found {spec.name!r}")
    if spec.dim < 1 or not spec.input_shape or min(spec.input_shape) < 1:
        raise ModelError(f"encoder: expected inputs and a dimension, found shape {spec.input_shape}, {spec.dim}")
    return ENCODERS[spec.name](spec.input_shape, spec.dim)


@lru_cache(16)  # every order for an encoder needs it, and it takes milliseconds
def encoder_layout(spec: EncoderSpec) -> Layout:
    """Return the layout of an encoder's parameters."""
    with torch.device("meta"):
        return Layout.of(build_encoder(spec))


def descriptor_layout(dim: int) -> Layout:
    """Return the layout of a descriptor, or of the gradient with respect to one, on the wire."""
    return Layout((("descriptor", (dim,)),))


def version_of(values: Tensor) -> str:
    """Return a hash of an encoder's parameters `(numel,)`, which keeps results of different encoders apart."""
    return hashlib.sha256(values.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
