"""The device of a program's networks."""

import torch

from hyperbloom.common.errors import ConfigError


def pick_device(name: str, mps: bool = True) -> torch.device:
    """Resolve 'auto' to CUDA, else MPS, else the CPU; ConfigError if the device does not exist on this machine.

    'auto' is MPS, which has no float64, only if `mps`.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if mps and torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device: expected auto or a device of this machine, found {name!r} ({reason})") from None
    return device
