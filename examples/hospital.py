"""Data and models of your own: two hospitals with scans in `.npz` files, each with a network of its own.

    cd examples
    python hospital.py                # writes north.npz and south.npz; yours come from your own systems
    flower-server --strategy ghn --insecure --clients 2 --cohort 2 --rounds 10 --set local.learning_rate=0.05
    flower-client --server 127.0.0.1:9092 --insecure --client-id north --data north.npz --model hospital:small
    flower-client --server 127.0.0.1:9092 --insecure --client-id south --data south.npz --model hospital:deep

The scans are made up: noise, in which half of the patients have a bright spot; the south's scanner inverts grey.
"""

import numpy as np
from torch import nn


def small(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return the north's network: one convolution."""
    return nn.Sequential(*block(input_shape[0], 8), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, num_classes))


def deep(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return the south's network: two convolutions."""
    body = [*block(input_shape[0], 8), *block(8, 16)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, num_classes))


def block(inputs: int, outputs: int) -> list[nn.Module]:
    """Return a 3x3 convolution, its activation and a pooling layer."""
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]


def scans(patients: int, inverted: bool, seed: int) -> dict[str, np.ndarray]:
    """Return `x` (patients, 16, 16) of uint8 and `y` (patients,): 1 for a bright spot of 4 x 4 pixels."""
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, 120, (patients, 16, 16), dtype=np.uint8), rng.integers(0, 2, patients)
    for patient in np.flatnonzero(y):
        top, left = rng.integers(0, 12, 2)
        x[patient, top : top + 4, left : left + 4] += 100
    return {"x": 255 - x if inverted else x, "y": y}


if __name__ == "__main__":
    np.savez("north.npz", **scans(patients=300, inverted=False, seed=1))
    np.savez("south.npz", **scans(patients=120, inverted=True, seed=2))
