"""The embedding table: one row per client. It grows as clients join."""

import torch
from torch import Tensor, nn

from hyperbloom.common.seeds import derive


class EmbeddingTable(nn.Module):
    """One descriptor `v_i` of dimension k per client.

    A row's initial value depends on the seed and the client's name, not on the order of joining.

    Args:
        dim: dimension k of a descriptor.
        seed: of the run.
        trainable: False for fixed descriptors (appendix C.5 of pFedHN).

    Shape:
        `weight` is `(n, k)`; `forward(rows)` maps `(C,)` row numbers to `(C, k)`.
    """

    def __init__(self, dim: int, seed: int, trainable: bool = True) -> None:
        super().__init__()
        self.dim = dim
        self.seed = seed
        self.weight = nn.Parameter(torch.empty(0, dim), requires_grad=trainable)

    def grow(self, client_id: str, row: Tensor | None = None) -> None:
        """Append a row for `client_id`: standard normal like `nn.Embedding`, or the given descriptor `(k,)`."""
        if row is None:
            generator = torch.Generator().manual_seed(derive(self.seed, "embedding", client_id))
            row = torch.randn(self.dim, generator=generator)
        self.weight.data = append_row(self.weight.data, row.to(self.weight))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the descriptors of some clients."""
        return self.weight[rows]


def append_row(rows: Tensor, row: Tensor) -> Tensor:
    """Return `(n + 1, k)` from `rows` `(n, k)` and `row` `(k,)`.

    The storage doubles when it is full, so ten thousand joining clients cause only a few copies of the table. Do not
    use `rows` afterwards: the result may share its storage.
    """
    count, dim = rows.shape
    if rows.untyped_storage().nbytes() < (count + 1) * dim * rows.element_size():
        larger = rows.new_empty(2 * count + 1, dim)
        larger[:count] = rows
        rows = larger
    grown = rows.as_strided((count + 1, dim), (dim, 1))
    grown[count] = row
    return grown
