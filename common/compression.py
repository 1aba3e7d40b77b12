"""Compression of replies: codecs, by name, between a flat vector of changes and bytes. Both sides know the layout.

    int8              every value in one byte, times one scale per tensor: max|x| / 127
    top-k:SHARE       the SHARE of the entries with the largest magnitude, and their indices
    top-k:SHARE+int8  those entries in one byte each

The client adds the error of a codec to its next change: error feedback (`client/keep/feedback.py`). Top-k stalls
without it (Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS 2018, https://arxiv.org/abs/1809.07599).

Top-k selects over the whole vector, not per tensor: this gives the nearest of all vectors with k entries (section 2
there). Entries that are left out accumulate in the error memory until they are large enough to be sent.

The selected entries are marked by one bit for each of the P entries, or by their ascending indices if these are
shorter: two bytes each for up to 65,536 values, four beyond. The layout alone determines the length of a reply, so the
receiver never allocates memory by a length that the reply states.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyperbloom.common.errors import ConfigError, WireError
from hyperbloom.common.layout import Layout

_NAME = re.compile(r"top-k:(?P<share>(\d+(\.\d+)?|\.\d+)(e-?\d+)?)(?P<int8>\+int8)?", re.ASCII)


@dataclass(frozen=True)
class Codec:
    """Converts a `(P,)` vector of float32 to bytes, as many as the layout determines, and back.

    Attributes:
        int8: whether a value takes one byte, instead of the four of float32.
        share: share of the entries that are sent, or None for all.
    """

    name: str
    int8: bool
    share: float | None = None

    @classmethod
    def parse(cls, name: str) -> "Codec | None":
        """Return the codec with this name, None for 'none'; ConfigError if there is none."""
        if name == "none":
            return None
        if name == "int8":
            return cls(name, True)
        found = _NAME.fullmatch(name)
        share = float(found["share"]) if found else 0.0
        if not found or not 0 < share < 1:
            raise ConfigError(
                "compression: expected none, int8, top-k:SHARE with a share between 0 and 1, or top-k:SHARE+int8, "
                f"found {name[:60]!r}"
            )
        return cls(name, found["int8"] is not None, share)

    def kept(self, numel: int) -> int:
        """Return the number of entries that are sent out of `numel`."""
        return numel if self.share is None else min(numel, max(1, round(self.share * numel)))

    def size(self, layout: Layout) -> int:
        """Return the encoded size in bytes of a vector with this layout."""
        kept = self.kept(layout.numel)
        return self._index_bytes(layout) + (4 * len(layout.shapes) + kept if self.int8 else 4 * kept)

    def encode(self, flat: Tensor, layout: Layout) -> bytes:
        """Encode a `(P,)` vector of finite float32 on the CPU as `size(layout)` bytes."""
        if self.share is None:
            return self._pack_values(flat, layout.sizes)
        indices = flat.abs().topk(self.kept(layout.numel), sorted=False).indices.sort().values  # (k,)
        values = self._pack_values(flat[indices], _per_tensor(indices, layout))
        if not self._has_bits(layout.numel):
            return indices.numpy().astype(_index_dtype(layout.numel)).tobytes() + values
        chosen = np.zeros(layout.numel, dtype=np.uint8)
        chosen[indices.numpy()] = 1
        return np.packbits(chosen).tobytes() + values

    def decode(self, encoded: bytes, layout: Layout) -> Tensor:
        """Decode a `(P,)` vector of float32; WireError if the bytes do not fit this codec and layout.

        Values that are not finite pass: `Weights.check` finds them and names their tensor.
        """
        if len(encoded) != self.size(layout):
            raise WireError(
                f"{self.name}: expected {self.size(layout)} bytes for {layout.numel} values in "
                f"{len(layout.shapes)} tensors, found {len(encoded)}"
            )
        if self.share is None:
            return self._unpack_values(encoded, layout.sizes, layout)
        places = self._index_bytes(layout)
        indices = self._unpack_indices(encoded[:places], layout.numel)
        flat = torch.zeros(layout.numel)
        flat[indices] = self._unpack_values(encoded[places:], _per_tensor(indices, layout), layout)
        return flat

    def _index_bytes(self, layout: Layout) -> int:
        if self.share is None:
            return 0
        return min(-(-layout.numel // 8), self.kept(layout.numel) * _index_dtype(layout.numel).itemsize)

    def _has_bits(self, numel: int) -> bool:
        """Return whether one bit for each entry takes fewer bytes than indices."""
        return -(-numel // 8) < self.kept(numel) * _index_dtype(numel).itemsize

    def _pack_values(self, values: Tensor, groups: tuple[int, ...]) -> bytes:
        """Return `(k,)` values as bytes; the values of each group, whose sizes are `groups`, share a scale."""
        if not self.int8:
            return _bytes(values)
        parts = values.split(groups) if groups else ()
        scales = torch.tensor([float(part.abs().max()) / 127 if len(part) else 0.0 for part in parts])
        each = torch.repeat_interleave(scales, torch.tensor(groups, dtype=torch.int64))
        # A tensor of zeros has the scale 0, and 0 / 0 is NaN.
        return _bytes(scales) + _bytes((values / each).nan_to_num(nan=0.0).round().clamp(-127, 127).to(torch.int8))

    def _unpack_values(self, raw: bytes, groups: tuple[int, ...], layout: Layout) -> Tensor:
        """Return `(k,)` values; `groups[i]` of them belong to tensor i of the layout."""
        if not self.int8:
            return _tensor(raw, torch.float32)
        scales, levels = _tensor(raw[: 4 * len(groups)], torch.float32), _tensor(raw[4 * len(groups) :], torch.int8)
        wrong = torch.nonzero(~(scales.isfinite() & (scales >= 0)))
        if len(wrong):
            first = int(wrong[0])
            name = layout.shapes[first][0]
            raise WireError(f"tensor {name}: expected a finite scale from 0, found {float(scales[first])}")
        return levels * torch.repeat_interleave(scales, torch.tensor(groups, dtype=torch.int64))

    def _unpack_indices(self, raw: bytes, numel: int) -> Tensor:
        """Return `(k,)` distinct indices below `numel` in ascending order."""
        if self._has_bits(numel):
            indices = np.flatnonzero(np.unpackbits(np.frombuffer(raw, dtype=np.uint8), count=numel))
            if len(indices) != self.kept(numel):
                raise WireError(f"{self.name}: expected {self.kept(numel)} indices, found {len(indices)}")
        else:
            indices = np.frombuffer(raw, dtype=_index_dtype(numel)).astype(np.int64)
            if len(indices) and not (np.all(np.diff(indices) > 0) and indices[-1] < numel):
                raise WireError(f"{self.name}: expected indices in ascending order below {numel}, found others")
        return torch.from_numpy(indices)


def _per_tensor(indices: Tensor, layout: Layout) -> tuple[int, ...]:
    """Return the number of ascending `indices` in each tensor."""
    before = torch.searchsorted(indices, torch.tensor(layout.sizes, dtype=torch.int64).cumsum(0))
    return tuple(before.diff(prepend=before.new_zeros(1)).tolist())


def _index_dtype(numel: int) -> "np.dtype[np.unsignedinteger[Any]]":
    return np.dtype("<u2" if numel <= 2**16 else "<u4")


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def _tensor(raw: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
