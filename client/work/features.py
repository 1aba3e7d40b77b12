"""The backbone's features of a client's examples: computed once where the head alone is adapted.

A round then costs as much as training the head. What enters the head depends on the input alone, because everything
else is frozen and has no training mode.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from hyperbloom.client.work.client import Client
from hyperbloom.common.data import Examples
from hyperbloom.common.models import last_layer
from hyperbloom.common.models.parts import features, untouched


class Tail(nn.Module):
    """The head of a network by itself, under its names there, from features `(B, F)` to the network's outputs."""

    def __init__(self, path: str, head: nn.Module, backbone: str) -> None:
        super().__init__()
        self.path, self.backbone = path, backbone
        owner: nn.Module = self
        *folders, leaf = path.split(".")
        for folder in folders:
            owner.add_module(folder, nn.Module())
            owner = owner.get_submodule(folder)
        owner.add_module(leaf, head)

    def forward(self, features: Tensor) -> Tensor:
        """Return the outputs `(B, K)` for features `(B, F)`."""
        return self.get_submodule(self.path)(features)


def tail_of(module: nn.Module, input_shape: tuple[int, ...], backbone: str = "") -> Tail | None:
    """Return the head alone if it is one layer that takes a vector for each input and makes the network's outputs."""
    last = last_layer(module, input_shape)
    path = next(name for name, part in module.named_modules() if part is last)
    if not path or any(not name.startswith(f"{path}.") for name, _ in module.named_parameters()):
        return None
    with untouched(module), torch.no_grad():
        inputs = torch.rand(2, *input_shape).to(next(module.parameters()).device)  # for zeros a second path may be 0
        seen, outputs = features(module, inputs), module(inputs)
        return Tail(path, last, backbone) if seen.ndim == 2 and torch.equal(last(seen), outputs) else None


def on_features(client: Client, backbone: str, data: Examples, compute: Callable[[Tensor], Tensor]) -> Examples:
    """Return a client's examples with features in place of inputs, which are computed once for a backbone's digest."""
    kept = client.features.get(id(data.inputs))
    if kept is None or kept[0] is not data.inputs or kept[1] != backbone:
        made = replace(data, inputs=compute(data.inputs))
        if client.settings.low_memory and made.inputs.device.type == "cpu":
            made = made.on_disk(client.settings.folder)
        # With the inputs, as another tensor may get their id once they are gone.
        kept = client.features[id(data.inputs)] = (data.inputs, backbone, made.inputs)
    return replace(data, inputs=kept[2])
