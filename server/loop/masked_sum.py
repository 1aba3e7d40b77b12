"""The layout of the one sum that secure aggregation reveals: where each client's tensors lie in it."""

import logging
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hyperbloom.common.config import FEWEST_CLIENTS
from hyperbloom.common.layout import Layout
from hyperbloom.common.secrecy.masks import Scale, Words
from hyperbloom.common.secrecy.sums import part_digests
from hyperbloom.common.wire.weights import Weights

log = logging.getLogger("hyperbloom.server")


class MaskedSum:
    """Lays out the tensors of all clients in one sum.

    Clients share a tensor only if they were sent the same values for it. A tensor that too few have is left out: at
    least `FEWEST_CLIENTS` owners must remain after the worst loss of clients, or the sum would tell too much of each.

    Attributes:
        owners: by part, the rows of the clients that have it.
        slices: by part, its place in the sum.
    """

    def __init__(self, sent: Mapping[int, Weights], digest: bytes, threshold: int) -> None:
        self._layouts = {row: weights.layout for row, weights in sent.items()}
        known: dict[tuple[Layout, int], dict[bytes, str]] = {}  # most clients are sent the very same vector
        self._names: dict[int, dict[bytes, str]] = {}
        self.owners: dict[bytes, list[int]] = {}
        lengths: dict[bytes, int] = {}
        for row, weights in sent.items():
            key = weights.layout, weights.values.data_ptr()
            if key not in known:
                known[key] = part_digests(weights, digest)
            self._names[row] = known[key]
            places = {name: place for name, place, _ in weights.layout.slices()}
            for part, name in known[key].items():
                self.owners.setdefault(part, []).append(row)
                lengths[part] = places[name].stop - places[name].start
        fewest = len(sent) - threshold + FEWEST_CLIENTS
        self.slices: dict[bytes, slice] = {}
        self.total = 0
        for part, length in lengths.items():
            if len(self.owners[part]) >= fewest:
                self.slices[part] = slice(self.total, self.total + length)
                self.total += length
        left_out = sum(lengths.values()) - self.total
        if left_out:
            log.warning("%d weights are not summed: fewer than %d clients of the round have them", left_out, fewest)

    def mean(self, total: Words, scale: Scale, weights: Mapping[int, int]) -> NDArray[np.float64]:
        """Return the mean change `(total,)` of the unmasked sum; `weights` has those of its clients by row.

        Raises:
            WireError: no honest clients can have sent numbers with this sum.
        """
        mean = np.empty(len(total))
        for part, place in self.slices.items():
            weight = sum(weights.get(row, 0) for row in self.owners[part])
            mean[place] = scale.decode(total[place], weight)
        return mean

    def gather(self, values: NDArray[np.float64], row: int) -> NDArray[np.float64]:
        """Return the values of a sum that belong to a client's vector `(P,)`, with zeros for tensors not in the sum."""
        gathered = np.zeros(self._layouts[row].numel)
        parts = {name: part for part, name in self._names[row].items() if part in self.slices}
        for name, place, _ in self._layouts[row].slices():
            if name in parts:
                gathered[place] = values[self.slices[parts[name]]]
        return gathered
