"""The registered data sets, and the loading of a client's data, or of a reference set, from its description."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import WeakValueDictionary

import numpy as np
import torch

from hyperbloom.common.data.digits import read_diabetes, read_digits
from hyperbloom.common.data.draws import generator
from hyperbloom.common.data.examples import ClientData
from hyperbloom.common.data.files import read_arrays
from hyperbloom.common.data.flwr_datasets import HUB, read_hub
from hyperbloom.common.data.folder import read_folder
from hyperbloom.common.data.own import BYTES, check_inputs, read_function, read_npz
from hyperbloom.common.data.partition import Deal, deal_to_clients, find_partitioner
from hyperbloom.common.data.pool import Pool, Portion
from hyperbloom.common.data.published import PUBLISHED, read_published
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.data.spec import TABLES, DataSpec
from hyperbloom.common.data.table import read_heart, read_table
from hyperbloom.common.errors import DataError
from hyperbloom.common.program.plugins import find_plugin, plugins


@dataclass(frozen=True)
class DatasetInfo:
    """A registered data set. `read` raises a DataError for missing or corrupt files."""

    read: Callable[[DataSpec], Pool]
    input_shape: tuple[int, ...]
    num_classes: int
    description: str


DATASETS: Mapping[str, DatasetInfo] = {
    "digits": DatasetInfo(read_digits, (1, 8, 8), 10, "1,797 handwritten digits that come with scikit-learn"),
    "diabetes": DatasetInfo(read_diabetes, (10,), 1, "442 patients that come with scikit-learn: a number to predict"),
    "heart-disease": DatasetInfo(read_heart, (41,), 2, "920 patients of four hospitals, a table with gaps"),
    **{
        name: DatasetInfo(read_published, source.shape, source.num_classes, source.description)
        for name, source in PUBLISHED.items()
    },
}


def read_pool(spec: DataSpec) -> Pool:
    """Open the data that `spec.data` names and read the labels. Inputs are read later if the format allows it.

    Raises:
        DataError: The data do not exist or cannot be read.
    """
    told = [name for name in ("label", "owner", "group", "schema") if getattr(spec, name) is not None]
    if told and not spec.is_table:
        raise DataError(f"--{told[0]}: expected --data to be a table ({', '.join(TABLES)}), found {spec.data!r}")
    plugin = find_plugin("datasets", spec.data, DATASETS, DataError)
    if plugin is not None:
        return read_function(spec, plugin)
    if spec.data in DATASETS:
        return DATASETS[spec.data].read(spec)
    if spec.data.startswith(HUB):
        return read_hub(spec)
    if spec.data.lower().endswith(".npz"):
        return read_npz(spec)
    if spec.is_table:
        return read_table(spec)
    if Path(spec.data).expanduser().is_dir():
        return read_folder(spec)
    if ":" in spec.data:
        return read_function(spec)
    names = ", ".join([*DATASETS, *plugins("datasets")])
    forms = f"one of {names}; a path to .npz, .csv, .tsv or .parquet; an existing folder of images by class; hf:NAME"
    raise DataError(f"data: expected {forms}; or package.module:function; found {spec.data!r}")


class DataSource:
    """An open data set with its partition, which all clients of one process share.

    Args:
        spec: The data set and its partition; the field `partition` is ignored.
    """

    def __init__(self, spec: DataSpec) -> None:
        self.spec = spec
        find_partitioner(spec.split)
        self._pool = read_pool(spec)

    @property
    def scaling(self) -> Scaling:
        """The scaling from stored numbers to a network's inputs."""
        return self._pool.scaling

    @cached_property
    def _deal(self) -> Deal:
        return deal_to_clients(self._pool, self.spec)

    def owners(self, partition: int) -> list[str]:
        """Return the names of the owners whose training examples one client has; none where the data name none."""
        train = self._pool.portions["train"].choose(self._deal.indices(partition)["train"])
        return [] if train.owners is None else [self._pool.owner_names[one] for one in np.unique(train.owners)]

    def client(self, partition: int | None, scaling: Scaling | None = None) -> ClientData:
        """Return the examples of one client on the CPU, in the same order in every call.

        Args:
            partition: Number of the client; None for all examples.
            scaling: Scaling of stored numbers; by default that of the data set.

        Raises:
            DataError: The data cannot be dealt as described, or the client has no examples.
        """
        pool, spec = self._pool, replace(self.spec, partition=partition)
        portions, names = pool.portions, pool.class_names
        _refuse_empty(portions, pool, spec)
        if partition is not None:
            deal = self._deal
            portions = {part: portions[part].choose(rows) for part, rows in deal.indices(partition).items()}
            if deal.relabel is not None:
                relabel = deal.relabel[partition]
                portions = {name: replace(part, labels=relabel[part.labels]) for name, part in portions.items()}
                names = tuple(names[label] for label in np.argsort(relabel))
            _refuse_empty(portions, pool, spec)
        if spec.max_train is not None and spec.max_train < len(portions["train"]):
            # Take the start of one permutation, so that a smaller `max_train` gives a subset.
            order = generator(spec.seed, "max_train", spec.partition or 0).permutation(len(portions["train"]))
            portions["train"] = portions["train"].choose(np.sort(order[: spec.max_train]))
        scaling = scaling or pool.scaling
        train, val, test = (portions[part].examples(scaling) for part in ("train", "val", "test"))
        return ClientData(train, val, test, len(names), names, scaling, pool.kind, pool.schema, pool.meaning)


# Weak references, because a process with one client must not keep the whole data set in memory.
sources: WeakValueDictionary[DataSpec, DataSource] = WeakValueDictionary()


def data_source(spec: DataSpec) -> DataSource:
    """Return the open source of a client's data. Keep a reference to load several clients without reopening it."""
    whole = replace(spec, partition=None)
    source = sources.get(whole)
    if source is None:
        source = sources[whole] = DataSource(whole)
    return source


def source_under(spec: DataSpec, schema: str) -> DataSource:
    """Return the open source of a table that is read by a schema in JSON, whatever schema `spec` names."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "schema.json")
        path.write_text(schema, encoding="utf-8")
        return data_source(replace(spec, schema=path))


def load_client_data(spec: DataSpec) -> ClientData:
    """Read one client's examples onto the CPU, as `DataSource.client` does; DataError also if there are no data."""
    return data_source(spec).client(spec.partition)


def _refuse_empty(portions: Mapping[str, Portion], pool: Pool, spec: DataSpec) -> None:
    for part in (part for part, portion in portions.items() if len(portion) == 0):
        if (total := len(pool.portions[part])) == 0:
            raise DataError(f"{pool.name}: expected examples in {part}, found none; add some")
        advice = "lower partitions, raise classes_per_client or alpha, or change the seed"
        if spec.split == "owner":
            here = {int(one) for each in portions.values() if each.owners is not None for one in each.owners}
            names = ", ".join(pool.owner_names[one] for one in sorted(here))
            advice = f"leave small owners out, here {names}, or take fewer clients, so that each has more"
        raise DataError(
            f"client {spec.partition} of {spec.partitions}: expected examples in {part}, found none of the {total} "
            f"that split {spec.split!r} deals; {advice}"
        )


def read_reference(spec: DataSpec, most: int) -> torch.Tensor:
    """Return up to `most` inputs of a data set, float32 `(n, *shape)`, which depend only on the seed.

    Args:
        spec: any data set that a client can name, of which all portions count, or an `.npz` with only the key x.
        most: number of inputs above which that many are drawn at random.

    Raises:
        DataError: the set cannot be found or read.
    """
    portions, scaling = _unlabelled(spec)
    sizes = [len(portion) for portion in portions]
    drawn = generator(spec.seed, "unlabelled").permutation(sum(sizes))[:most]
    starts = np.cumsum([0, *sizes])
    chosen = []
    for portion, start in zip(portions, starts, strict=False):
        here = np.sort(drawn[(drawn >= start) & (drawn < start + len(portion))]) - start
        if len(here):
            chosen.append(portion.choose(here).examples(scaling).inputs)
    return torch.cat(chosen)


def _unlabelled(spec: DataSpec) -> tuple[list[Portion], Scaling]:
    path = Path(spec.data).expanduser()
    if spec.data.lower().endswith(".npz") and path.is_file():
        arrays = read_arrays(path)
        if set(arrays) == {"x"}:
            stored = check_inputs(arrays["x"], f"{path}: key 'x'")
            made = Portion.of(stored, np.zeros(len(stored), dtype=np.int64))
            return [made], BYTES if stored.dtype == np.uint8 else Scaling(1.0)
    pool = read_pool(replace(spec, partition=None))
    return list(pool.portions.values()), pool.scaling
