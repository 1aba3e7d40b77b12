"""Files of the data sets that the studies alone read."""

from pathlib import Path

from hyperbloom.common.data.files import missing


def find_file(folder: Path, name: str, how: str) -> Path:
    """Return the path of a file in a data set's folder; DataError, which says `how` to get it, if it is not there."""
    if not (folder / name).is_file():
        raise missing(name, [folder / name], folder, how)
    return folder / name
