"""Files that keep earlier versions as long as the server may go back to them."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch
from safetensors import SafetensorError
from torch import Tensor

from hyperbloom.common.files.storage import keep, write_tensors
from hyperbloom.common.wire.orders import Scope

CHECKPOINTS = 2
"""Number of checkpoints that a server keeps. A client ignores older resume points, which bounds its versions."""


class _Version(NamedTuple):
    """A version of a file, written in round `round` after the server had gone back `rewinds` times."""

    path: Path
    round: int
    rewinds: int


class Versioned:
    """A file that keeps earlier versions as long as the server may go back to them, with at most three files in all.

    The newest version is at `path`. A version that a checkpoint needs is hard-linked elsewhere before it is replaced.
    """

    def __init__(self, path: Path, earlier: Path, name: str) -> None:
        self.path, self._earlier, self._name = path, earlier, name

    def find(self, scope: Scope) -> Path | None:
        """Return the path of the newest version that is part of the run, or None.

        Raises:
            SafetensorError: the file at `path` is damaged.
            OSError: the file at `path` cannot be read.
        """
        known = [version for version in [*self._kept(), *self._current()] if _is_part(version, scope)]
        return max(known, key=lambda version: version.round).path if known else None

    def write(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], scope: Scope) -> None:
        """Write a new version, and keep those earlier ones to which the server may go back."""
        try:
            current = list(self._current())
        except (SafetensorError, OSError):
            current = []  # a damaged version is not worth keeping
        kept, new = list(self._kept()), _Version(self.path, scope.round, len(scope.rewound))
        known, needed = [new, *(each for each in (*kept, *current) if _is_part(each, scope))], set[_Version]()
        for point in scope.resume_points[-CHECKPOINTS:]:
            before = [version for version in known if version.round <= point]
            needed |= {max(before, key=lambda version: version.round)} if before else set()
        for version in needed.intersection(current):
            keep(self.path, self._earlier / f"{self._name}@{version.round}-{version.rewinds}.safetensors")
        when = torch.tensor(new[1:])  # safetensors writes metadata in varying order
        write_tensors(self.path, {**tensors, "moment": when}, metadata)
        for version in kept:
            if version not in needed:
                version.path.unlink(missing_ok=True)

    def _current(self) -> Iterator[_Version]:
        if self.path.exists():
            with safetensors.safe_open(self.path, framework="pt") as file:
                yield _Version(self.path, *file.get_tensor("moment").tolist())

    def _kept(self) -> Iterator[_Version]:
        for path in sorted(self._earlier.glob("*.safetensors")) if self._earlier.exists() else ():
            name, _, when = path.stem.rpartition("@")
            with suppress(ValueError):  # a foreign file
                number, rewinds = map(int, when.split("-"))
                if name == self._name:
                    yield _Version(path, number, rewinds)


def _is_part(version: _Version, scope: Scope) -> bool:
    """Return whether a version is still part of the run: the server has not gone back to an earlier round since."""
    return all(version.round <= point for point in scope.rewound[version.rewinds :])
