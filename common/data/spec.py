"""Description of one client's data, as given on the command line or in a file."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from hyperbloom.common.errors import DataError

TABLES = (".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class DataSpec:
    """A data set, its partition, and one client's part of it.

    Args:
        data: Name of a registered data set, path of an `.npz` file, a table (`.csv`, `.tsv`, `.parquet`) or a folder
            of images by class, `hf:NAME` or `hf:FOLDER` of a data set of the Hugging Face hub, or
            `package.module:function`.
        root: Folder of a registered data set's files; by default `$HYPERBLOOM_DATA`, else `~/.cache/hyperbloom`.
        download: Fetch a registered data set that is not in `root`, if torchvision can.
        split: Name of the partitioner; it must be the same for all clients.
        classes_per_client: Classes of a client (`shares`), shards of a client (`shards`), or number of
            concepts (`concepts`).
        alpha: Concentration of the Dirichlet distribution. Smaller values make clients differ more.
        partition: Number of the client, from 0; None for all of the data.
        partitions: Number of clients that share the data.
        max_train: Most training examples of the client. A smaller number keeps a subset of a larger one's.
        seed: Seed of the partition, of `max_train` and of the splitting of users' own data.
        label: Column of a table to predict, or several, separated by commas.
        owner: Column of a table that says whose a row is.
        group: Column of a table that says which rows belong together.
        schema: File that says what the columns of a table mean, instead of a proposal from the table itself.
        backbone: Pretrained network of the run: a folder, or `package.module:function`.

    Raises:
        DataError: A number is out of range.
    """

    data: str = "digits"
    root: Path | None = None
    download: bool = False
    split: str = "auto"
    classes_per_client: int = 2
    alpha: float = 0.5
    partition: int | None = None
    partitions: int = 1
    max_train: int | None = None
    seed: int = 0
    label: str | None = None
    owner: str | None = None
    group: str | None = None
    schema: Path | None = None
    backbone: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("partitions", self.partitions), ("classes_per_client", self.classes_per_client)):
            if value < 1:
                raise DataError(f"{name}: expected at least 1, found {value}")
        if self.max_train is not None and self.max_train < 1:
            raise DataError(f"max_train: expected at least 1 or nothing at all, found {self.max_train}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise DataError(f"alpha: expected a number above 0, found {self.alpha}")
        if self.partition is not None and not 0 <= self.partition < self.partitions:
            raise DataError(f"partition: expected 0 to {self.partitions - 1} (partitions - 1), found {self.partition}")

    @property
    def is_table(self) -> bool:
        """Whether the data are a table in a file."""
        return self.data.lower().endswith(TABLES)

    @property
    def folder(self) -> Path:
        """The folder with the files of registered data sets."""
        return Path(self.root or os.environ.get("HYPERBLOOM_DATA") or "~/.cache/hyperbloom").expanduser()
