"""The registered data sets, and the choice between them and a user's file, folder or function."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hyperbloom.common.data.digits import read_diabetes, read_digits
from hyperbloom.common.data.flwr_datasets import HUB, read_hub
from hyperbloom.common.data.folder import read_folder
from hyperbloom.common.data.own import read_function, read_npz
from hyperbloom.common.data.pool import Pool
from hyperbloom.common.data.published import PUBLISHED, read_published
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
        raise DataError(f"--{told[0]}: expected with a table ({', '.join(TABLES)}), found {spec.data!r}")
    plugin = find_plugin("datasets", spec.data, DATASETS, DataError)
    if plugin is not None:
        return read_function(spec, plugin)
    if spec.data in DATASETS:
        return DATASETS[spec.data].read(spec)
    if spec.data.startswith(HUB):
        return read_hub(spec)
    if spec.data.endswith(".npz"):
        return read_npz(spec)
    if spec.is_table:
        return read_table(spec)
    if Path(spec.data).expanduser().is_dir():
        return read_folder(spec)
    if ":" in spec.data:
        return read_function(spec)
    names = ", ".join([*DATASETS, *plugins("datasets")])
    forms = f"one of {names}; a path ending in .npz, .csv or .parquet; an existing folder of images by class; hf:NAME"
    raise DataError(f"data: expected {forms}; or package.module:function; found {spec.data!r}")
