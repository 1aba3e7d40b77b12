"""Half precision in training through a large frozen network, on devices that gain by it.

What is trained stays in single precision, and models are scored in single precision. The rule depends on the network
and the device alone, not on a measurement, so that a run gives the same numbers again.
"""

import torch
from torch import Tensor, nn

LARGE = 10_000_000
"""Frozen numbers from which on half precision pays for the casts (`benchmarks/half_precision.py`)."""


def gains_by_half(device: torch.device) -> bool:
    """Return whether a device multiplies matrices of bfloat16 faster than those of float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and torch.cpu._is_amx_tile_supported()


def forward(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return a network's outputs for training, in single precision."""
    frozen = sum(part.numel() for part in module.buffers())
    outputs: Tensor
    if frozen < LARGE or not gains_by_half(inputs.device):
        outputs = module(inputs)
        return outputs
    with torch.autocast(inputs.device.type, torch.bfloat16):
        outputs = module(inputs)
    return outputs.float()
