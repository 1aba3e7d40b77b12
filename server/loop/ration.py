"""A limit on the server's networks where the data of a client decide how large they are."""

from typing import Any

from torch import ops
from torch.utils._python_dispatch import TorchDispatchMode

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import ModelError

MOST_BYTES = 2**30
"""Most bytes of the server's parameters. Training takes three times as many, for gradients and momentum."""

_EMPTY = ops.aten.empty.memory_format


class Ration(TorchDispatchMode):
    """Counts the parameters that modules allocate while it is entered, before they are allocated.

    Raises:
        ModelError: they exceed `MOST_BYTES`, and the run leaves inputs or classes to the first client.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self._is_open = None in (config.input_shape, config.num_classes)
        self._bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _EMPTY and self._is_open:
            count = 4
            for size in args[0]:
                count *= size
            self._bytes += count
            if self._bytes > MOST_BYTES:
                raise ModelError(
                    f"the server's networks are beyond {MOST_BYTES >> 20} MiB; set input_shape and num_classes if you "
                    "mean it"
                )
        return func(*args, **(kwargs or {}))
