"""The head alone stands for a network only where the network adds nothing to it."""

import pytest
import torch
from torch import Tensor, nn

from hyperbloom.client.work.features import tail_of
from hyperbloom.common.models.parts import features


class WideAndDeep(nn.Module):
    """Adds a linear path without a bias, which is zero for zeros, to what the head makes of the body."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 3, bias=False).requires_grad_(False) if wide else None
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3)
        path = self.wide.weight if self.wide is not None else None
        if path is not None:  # frozen as in a backbone, whose parameters are buffers
            del self.wide.weight
            self.wide.register_buffer("weight", path.detach())
        for name, parameter in list(self.body.named_parameters()):
            delattr(self.body, name)
            self.body.register_buffer(name, parameter.detach())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x).relu())
        return found if self.wide is None else found + self.wide(x)


@pytest.mark.parametrize("wide", [False, True])
def test_a_network_with_a_second_path_is_not_its_head_alone(wide: bool) -> None:
    module, x = WideAndDeep(wide).eval(), torch.randn(5, 6)
    tail = tail_of(module, (6,))
    assert (tail is None) == wide
    if tail is not None:
        assert torch.equal(tail(features(module, x)), module(x))
