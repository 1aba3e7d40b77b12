"""A newcomer's examples, scaled like those of the clients that trained."""

import logging
from pathlib import Path

import torch
from torch import Tensor

from hyperbloom.common.data import ClientData, DataSpec, data_source, source_under
from hyperbloom.common.data.own import BYTES
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.data.schema import Schema, difference, read_schema
from hyperbloom.common.data.unlabelled import is_unlabelled, read_inputs
from hyperbloom.common.errors import DataError
from hyperbloom.common.tasks import make_task
from hyperbloom.common.wire.newcomers import Offer

log = logging.getLogger("hyperbloom.client")


class Sources:
    """The newcomer's examples: with labels, as `flower-client` reads them, or without.

    Raises:
        DataError: they cannot be read.

    Attributes:
        data: the examples with labels, or None if they have none. `inputs` scales them like those of the run.
        backbone: the pretrained network on this machine, if the user has named one.
    """

    def __init__(self, spec: DataSpec) -> None:
        self.path, self._spec, self.backbone = Path(spec.data).expanduser(), spec, spec.backbone
        self.data: ClientData | None = None
        self.schema: Schema | None = None
        if not (is_unlabelled(self.path) or (spec.is_table and not spec.label and not spec.schema)):
            self._source, self._partition = data_source(spec), spec.partition
            self.data = self._source.client(self._partition)
        elif not self.path.exists():
            raise DataError(f"--data: expected a file or folder, found none at {self.path}")

    def inputs(self, offer: Offer) -> Tensor:
        """Return all examples `(N, *input_shape)`, for the descriptor.

        A subset would break the privacy guarantee. The split depends on all labels, so one changed example could change
        many examples of the subset.

        Raises:
            DataError: the examples do not fit the models on offer.
        """
        self.schema = read_schema(offer.schema, "the server's schema") if offer.schema else None
        if self.data is None:
            parts = read_inputs([self.path], offer.input_shape, self.scaling(offer), self.schema, self.backbone)
            return torch.cat([part.values for part in parts])
        if self.schema and self._spec.is_table:
            own = self.data.schema
            if self._spec.schema and own and (why := difference(self.schema, own.scaled(self.schema.scales))):
                raise DataError(f"--schema: not the server's: {why}")
            self._source = source_under(self._spec, self.schema.text)
            self.data = self._source.client(self._partition)
        elif self._spec.is_table and not self._spec.schema:  # a schema of these cells would scale by them
            raise DataError("--schema: expected what the columns mean, as the server does not say it")
        found = (self.data.input_shape, self.data.num_classes)
        if found[0] != offer.input_shape or found[1] > offer.num_classes:
            raise DataError(
                f"--data: expected inputs of shape {offer.input_shape} in {offer.num_classes} classes as the models on "
                f"offer, found {found[0]} in {found[1]}"
            )
        if self.data.scaling != self.scaling(offer):
            self.data = self._source.client(self._partition, self.scaling(offer))
        elif self.data.scaling != offer.scaling:
            log.warning(
                "most clients that trained took stored numbers %s, these data are taken %s; prepare them alike, or "
                "bring bytes, which are scaled as theirs",
                _in_words(offer.scaling),
                _in_words(self.data.scaling),
            )
        return self.data.whole.inputs

    def scaling(self, offer: Offer) -> Scaling:
        """Return the scaling of stored numbers: that of the data, or in training if the data are plain bytes."""
        if self.data is None:
            return offer.scaling
        return offer.scaling.of_bytes if self._source.scaling == BYTES else self._source.scaling

    def scored(self, offer: Offer) -> bool:
        """Return whether there are labels that match the classes of the models on offer."""
        if self.data is None or not _fits(self.data, offer):
            return False
        classes, names = self.data.num_classes, self.data.class_names
        return self.names_all(offer) or names == tuple(map(str, range(classes)))

    def names_all(self, offer: Offer) -> bool:
        """Return whether the data have all classes of the models on offer, by the same names if both name them."""
        if self.data is None or self.data.num_classes != offer.num_classes or not _fits(self.data, offer):
            return False
        return self.data.meaning is None or offer.meaning in (None, self.data.meaning)

    def class_names(self, offer: Offer) -> tuple[str, ...]:
        """Return the names of the classes; they are numbers unless the data or the schema name all of them."""
        if self.data is not None and self.names_all(offer):
            return self.data.class_names
        if self.schema is not None and len(known := self.schema.classes or self.schema.label) == offer.num_classes:
            return known
        return tuple(map(str, range(offer.num_classes)))


def _fits(data: ClientData, offer: Offer) -> bool:
    """Return whether the labels are of the kind that the models on offer answer for."""
    try:
        make_task(offer.task).check(data.whole.labels, offer.num_classes)
    except DataError:
        return False
    return True


def _in_words(scaling: Scaling) -> str:
    by = "as they are" if scaling.divisor == 1.0 else f"divided by {scaling.divisor:g}"
    return by + (f", less {list(scaling.mean)}, divided by {list(scaling.std)}" if scaling.mean else "")
