"""Data sets of the Hugging Face hub, and the partitioners of Flower's `flwr-datasets`, both by the extra `datasets`.

A data set is the one that `FederatedDataset(dataset=NAME, seed=SEED)` partitions, shuffled by that seed. So if it has
parts `validation` and `test`, a client of `flower-client --data hf:NAME --split flwr-iid --partition 2/10 --data-seed
42` has the training examples that `FederatedDataset(dataset=NAME, partitioners={"train": 10}).load_partition(2)` has.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from hyperbloom.common.data.draws import IntArray
from hyperbloom.common.data.files import need
from hyperbloom.common.data.own import build_pool, check_pair
from hyperbloom.common.data.pool import Pool, Portion
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.errors import DataError

HUB = "hf:"
"""Beginning of such a data set's name: `hf:NAME`, `hf:FOLDER`, `hf:NAME?label=COLUMN&input=COLUMN&subset=SUBSET`."""

_EXTRA = "'hyperbloom[datasets]'"


def read_hub(spec: DataSpec) -> Pool:
    """Read the data set `spec.data`: a name on the hub, a folder of its files, or of `DatasetDict.save_to_disk`.

    What is missing is held out of the training examples, as in users' own files; of two parts the second is the test.
    """
    name, _, query = spec.data.removeprefix(HUB).partition("?")
    asked = dict(parse_qsl(query))
    splits = _load(name, asked.pop("subset", None), spec)
    if "train" not in splits:
        raise DataError(f"{spec.data}: expected a part train, and validation and test or not; found {sorted(splits)}")
    keys = [key for key in ("train", "validation", "test") if key in splits]
    label = asked.pop("label", None) or _column(splits["train"], spec, "label", _is_label)
    column = asked.pop("input", None) or _column(splits["train"], spec, "input", lambda n, f: not _is_label(n, f))
    if asked:
        raise DataError(f"{spec.data}: expected input, label or subset behind '?', found {min(asked)}")
    named = {f"{spec.data}: {key}": splits[key] for key in keys}
    portions = {name: _portion(part, column, label, name) for name, part in named.items()}
    return build_pool(spec.data, portions, spec.seed, getattr(splits["train"].features[label], "names", None))


def _load(name: str, subset: str | None, spec: DataSpec) -> Mapping[str, Any]:
    """Return the parts of a data set, shuffled as `FederatedDataset` does before it partitions."""
    datasets = need("datasets", _EXTRA)
    folder = Path(name).expanduser()
    try:
        saved = (folder / "dataset_dict.json").is_file()
        loaded = datasets.load_from_disk(str(folder)) if saved else datasets.load_dataset(name, subset)
        return loaded.shuffle(seed=spec.seed)
    except Exception as error:  # files of any format, and the network
        raise DataError(f"{spec.data}: cannot be loaded: {' '.join(str(error).split())[:300]}") from error


def _is_label(name: str, feature: Any) -> bool:
    return hasattr(feature, "names") or name in ("label", "labels", "y")


def _column(part: Any, spec: DataSpec, what: str, fits: Callable[[str, Any], bool]) -> str:
    found = [name for name, feature in part.features.items() if fits(name, feature)]
    if len(found) != 1:
        among = f"{', '.join(found) or 'none'} among {', '.join(part.column_names)}"
        raise DataError(f"{spec.data}: expected one column for the {what}, found {among}; name it: ?{what}=COLUMN")
    return str(found[0])


def _portion(part: Any, column: str, label: str, where: str) -> Portion:
    if missing := {column, label} - set(part.column_names):
        raise DataError(f"{where}: expected a column {min(missing)}, found {', '.join(part.column_names)}")
    rows = part.with_format("numpy", columns=[column, label])[:]
    return check_pair(np.asarray(rows[column]), np.asarray(rows[label]), f"{where}, {column}", f"{where}, {label}")


FLWR_SPLITS: Mapping[str, Callable[[Any, DataSpec], Any]] = {
    "flwr-iid": lambda of, spec: of.IidPartitioner(spec.partitions),
    "flwr-dirichlet": lambda of, spec: of.DirichletPartitioner(spec.partitions, "label", spec.alpha, seed=spec.seed),
    "flwr-pathological": lambda of, spec: of.PathologicalPartitioner(
        spec.partitions, "label", spec.classes_per_client, seed=spec.seed
    ),
    "flwr-shard": lambda of, spec: of.ShardPartitioner(
        spec.partitions, "label", num_shards_per_partition=spec.classes_per_client, seed=spec.seed
    ),
}
"""A partitioner of flwr-datasets by the name of its split, from its module and the description of the data."""


def flwr_owners(strata: IntArray, spec: DataSpec) -> IntArray:
    """Return the owner of each training example, `(N,)`: the client by a partitioner of flwr-datasets, -1 for none.

    Raises:
        DataError: The partitioner refuses these labels or numbers, or is not installed.
    """
    partitioner = FLWR_SPLITS[spec.split](need("flwr_datasets.partitioner", _EXTRA), spec)
    owners = np.full(len(strata), -1, dtype=np.int64)
    try:
        columns = {"label": strata, "row": np.arange(len(strata))}
        partitioner.dataset = need("datasets", _EXTRA).Dataset.from_dict(columns)
        for client in range(spec.partitions):
            owners[np.asarray(partitioner.load_partition(client)["row"], dtype=np.int64)] = client
    except (ValueError, IndexError) as error:
        raise DataError(f"split {spec.split!r}: {' '.join(str(error).split())}") from error
    return owners
