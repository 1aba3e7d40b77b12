"""Admission: check what a client says of itself before it touches any state."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, ops
from torch.utils._python_dispatch import TorchDispatchMode

from hyperbloom.common.config import RunConfig
from hyperbloom.common.data.schema import FARTHEST, difference, divisor_of, read_schema
from hyperbloom.common.errors import ConfigError, ModelError, RefusedError
from hyperbloom.common.program.names import check_name
from hyperbloom.common.tasks import AUTO, Task, TaskSpec, make_task
from hyperbloom.common.wire.orders import LARGEST_LOSS, Introduction
from hyperbloom.common.wire.pack import LONGEST_LAYOUT
from hyperbloom.server.loop.roster import Roster
from hyperbloom.strategies.algorithm import Algorithm, Setting
from hyperbloom.strategies.exchange import Client

LONGEST_VERSION = 100
MOST_NUMBERS = 10_000
"""Most numbers in an introduction: shape, means, deviations and class shares."""
MOST_CLASSES = 5_000
"""Most classes that the first client's word alone may set; the counts of answers by class have their square."""
MOST_BYTES = 2**30
"""Most bytes of the server's parameters. Training takes three times as many, for gradients and momentum."""

_EMPTY = ops.aten.empty.memory_format


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn an error about a client, in the body or in a decorated function, into its refusal."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        raise RefusedError(str(error)) from None


class Admission:
    """Decides which clients may join, and hands them to an algorithm. The first one decides the `setting`.

    `schema` says what the columns of all clients' tables must mean; without it, the first client's table does.
    """

    def __init__(
        self,
        config: RunConfig,
        algorithm: Algorithm,
        initial: Mapping[str, Tensor] | None = None,
        schema: str | None = None,
    ) -> None:
        self._schema = schema
        self.config, self.algorithm = config, algorithm
        self.setting: Setting | None = None
        self._initial = initial
        self._open = False

    def check(self, about: Introduction, roster: Roster) -> None:
        """Raise a RefusedError if a client does not fit. The first one decides what the configuration leaves open."""
        # Before the run begins, those that have left again do not count.
        others = [c.about for c in (roster if self._open else roster.live) if c.client_id != about.client_id]
        if about.meaning and {other.meaning for other in others} - {None, about.meaning}:
            raise RefusedError("the names of its classes are not those of this federation; give them the same")
        with _refusing():  # also where the state of `init_from` does not fit this client's data
            self._check(about, (other.about for other in roster if other.client_id != about.client_id))

    def _check(self, about: Introduction, others: Iterable[Introduction]) -> None:
        """Check a client beside `others`, which have passed the check."""
        setting = check_introduction(about, self.config, self.algorithm, self.setting)
        if self.setting is not None or self._schema is not None:
            _check_schema(about.schema, self._schema)
        self.algorithm.serves(about, others)
        if self.setting is None:
            self.build(setting)
            self._schema = about.schema

    def checked(self, roster: Roster) -> Iterator[Client]:
        """Yield each client of a roster, by row, once it has passed the check beside those before it."""
        for client in roster:
            self._check(client.about, (other.about for other in islice(roster, client.row)))
            yield client

    def build(self, setting: Setting) -> None:
        """Build the algorithm for the data of the first client. Raise a RefusedError if no network fits them."""
        try:
            self.algorithm.setting = setting
            self.algorithm.metrics  # noqa: B018 - raises if a metric does not exist
            with Ration(self.config):
                self.algorithm.build(setting)
        except (ModelError, RuntimeError, OverflowError) as error:
            raise RefusedError(f"no target network can be built for its inputs and classes: {error}") from None
        except ConfigError as error:
            raise RefusedError(str(error)) from None
        if self._initial is not None:
            self.algorithm.start_from(self._initial)
        self.setting = setting

    def join(self, client: Client, first: bool) -> None:
        """Hand a client to the algorithm once `begin` has run; `begin` hands over those that join earlier."""
        if self._open:
            self.algorithm.join(client, first)

    def restore(self, roster: Roster, tensors: Mapping[str, Tensor]) -> None:
        """Restore the algorithm from a checkpoint: first hand over its clients by row, then its tensors."""
        for client in self.checked(roster):
            self.algorithm.join(client, True)
        self.algorithm.restore(tensors)

    def begin(self, roster: Roster, known: int) -> None:
        """Hand all clients to the algorithm by row, which knows the first `known`; `join` hands over later ones.

        Raises:
            RefusedError: a client of the roster does not fit this algorithm.
        """
        for client in self.checked(roster):
            self.algorithm.join(client, client.row >= known)
        if self.setting is not None and self.setting.task.standardises:
            train = [client for client in roster if not self.config.is_novel(client.row)]  # the others have no labels
            pairs = self._pooled_moments(train)[: self.setting.spec.num_classes]
            pooled = tuple(number for numbers in zip(*pairs, strict=True) for number in numbers)
            roster.moments = roster.moments or self.config.target_moments or pooled
            if len(roster.moments) not in (0, 2 * (outputs := self.setting.spec.num_classes)):
                raise ConfigError(f"target_moments: expected {outputs} means, then deviations, found {roster.moments}")
            half = len(roster.moments) // 2
            task = replace(self.setting.task.spec, mean=roster.moments[:half], std=roster.moments[half:])
            self.algorithm.setting = replace(self.setting, task=make_task(task))
        self._open = True

    def scale_columns(self, roster: Roster) -> str | None:
        """Return the schema with scales for the columns that it leaves open, by the moments that clients disclose.

        None if there are no such columns, or nobody has disclosed moments of enough values.
        """
        schema, moments = self._schema and read_schema(self._schema, "the schema"), self._pooled_moments(roster)
        if not schema or not schema.open or not moments:
            return None
        self._schema = schema.scaled(dict(zip(schema.open, moments[-len(schema.open) :], strict=True))).text
        return self._schema

    def _pooled_moments(self, clients: Iterable[Client]) -> list[tuple[float, float]]:
        """Return the mean and the deviation of each number over all values of the clients that disclose theirs.

        Nobody can check what they tell. So counts have the limit of averages. Of three clients or more none is farther
        from the median than `FARTHEST` times what is typical, or one lie would spoil the scale of all.
        """
        told = [client.about.moments for client in clients if any(client.about.moments)]  # 0 alone: too few values
        if not told:
            return []
        counts, means, deviations = torch.tensor(told, dtype=torch.float64).view(len(told), -1, 3).unbind(2)  # (C, K)
        counts = counts.minimum(self.config.examples_cap * counts.median(0).values.clamp(min=1))
        middle = means.median(0).values
        reach = FARTHEST * (deviations.median(0).values + (means - middle).abs().median(0).values)
        if len(told) > 2:
            reach[reach == 0] = math.inf  # most clients have one value, or none
            means, deviations = means.clamp(middle - reach, middle + reach), deviations.minimum(reach)
        shares = counts / counts.sum(0).clamp(min=1)
        mean = (shares * means).sum(0)
        std = (shares * (deviations**2 + (means - mean) ** 2)).sum(0).sqrt()
        return [(each, divisor_of(each, value)) for each, value in zip(mean.tolist(), std.tolist(), strict=True)]


@_refusing()
def check_introduction(
    about: Introduction, config: RunConfig, algorithm: Algorithm, setting: Setting | None
) -> Setting:
    """Return the run's setting, which the first client may decide; RefusedError if this one does not fit."""
    input_shape = setting.spec.input_shape if setting else config.input_shape
    num_classes = setting.spec.num_classes if setting else config.num_classes
    named = setting.task.spec.name if setting else None if config.task == AUTO else config.task
    if named not in (None, about.task):
        raise RefusedError(f"expected labels for {named} as in this federation, found labels for {about.task}")
    if input_shape not in (None, about.input_shape):
        raise RefusedError(f"expected inputs of shape {input_shape} as in this federation, found {about.input_shape}")
    if num_classes not in (None, about.num_classes):
        folders = ", images by a folder each, which may be empty" if about.task == "classification" else ""
        hint = f"; name them all{folders}" if about.task in ("classification", "segmentation") else ""
        raise RefusedError(f"expected {num_classes} classes as in this federation, found {about.num_classes}{hint}")
    if num_classes is None and about.num_classes > MOST_CLASSES:
        raise RefusedError(f"{about.num_classes:,} classes are beyond {MOST_CLASSES:,}; set num_classes if you mean it")
    if about.size not in config.sizes:
        raise RefusedError(f"expected --size to be one of {', '.join(config.sizes)}, found {about.size}")
    check_name(about.client_id, "--client-id")  # the name becomes a folder
    words = (about.version, about.graph or "", about.backbone or "", about.meaning or "", *(about.types or ()))
    if len(about.version) > LONGEST_VERSION or sum(map(len, words)) > LONGEST_LAYOUT:
        raise RefusedError("expected less to be said of its version and model; it is kept in every checkpoint")
    numbers = sum(map(len, (about.input_shape, about.mean, about.std, about.class_shares)))
    if numbers > MOST_NUMBERS or abs(sum(about.input_shape)) >= 2**31:
        raise RefusedError(f"expected at most {MOST_NUMBERS} numbers about its data, found {numbers}, or huge ones")
    shares = about.class_shares
    if shares and not (len(shares) == about.num_classes and min(shares) >= 0 and abs(sum(shares) - 1) < 1e-3):
        raise RefusedError("expected a share from 0 to 1 for each class, and 1 in all, found others")
    positive = (about.divisor, *about.std)
    fits = len(about.mean) == len(about.std) and len(about.std) in (0, *about.input_shape[:1])
    if not fits or not all(map(math.isfinite, (*positive, *about.mean))) or min(positive) <= 0:
        raise RefusedError("expected a divisor, and a mean and a deviation for each channel or none, found others")
    if min(about.train_examples, about.val_examples, about.test_examples) < 1:
        raise RefusedError("expected examples for training, validation and test, found an empty set")
    if about.schema is not None:
        width = read_schema(about.schema, "its schema").width
        if (width,) != about.input_shape:
            raise RefusedError(f"expected the {width} inputs of its schema, found {about.input_shape}")
    task = make_task(TaskSpec(about.task))
    if not _are_moments(about, task):
        raise RefusedError("expected count, mean and deviation of each target and open column or none, found others")
    if (about.backbone is None) != (config.backbone is None):
        raise RefusedError(f"expected {'--backbone' if config.backbone else 'no --backbone'} as in this federation")
    if setting is None:
        made = make_task(replace(task.spec, balanced=config.class_weights == "balanced"))
        try:
            setting = replace(algorithm.settle(about), task=made)
        except (RuntimeError, OverflowError) as error:
            raise RefusedError(f"no target network can be built for its inputs and classes: {error}") from None
    if config.backbone is not None and about.backbone not in setting.backbones:
        name = config.backbone if ":" in config.backbone else Path(config.backbone).name
        raise RefusedError(f"expected backbone {setting.backbones[0]}, found {about.backbone}; use the same {name}")
    return setting


def _check_schema(found: str | None, expected: str | None) -> None:
    """Refuse a client whose columns mean something else; both schemas are valid."""
    if found is None or expected is None:
        if found != expected:
            with_one, without = ("its", "this federation's") if found else ("this federation's", "its")
            raise RefusedError(f"expected data alike: {with_one} are a table with a schema, {without} are not")
        return
    if where := difference(read_schema(expected, "the schema"), read_schema(found, "its schema")):
        raise RefusedError(f"the columns of its table mean something else; {where[:300]}; join with the same --schema")


def _are_moments(about: Introduction, task: Task) -> bool:
    """Return whether the moments that a client discloses can be of its data; its schema is valid."""
    columns = len(read_schema(about.schema, "its schema").open) if about.schema else 0
    told = torch.tensor(about.moments, dtype=torch.float64)
    if len(told) not in (0, 3 * (columns + about.num_classes * task.standardises)):
        return False
    counts, means, deviations = told.view(-1, 3).T
    fits = (counts >= 0) & (counts <= about.train_examples) & (deviations >= 0)
    return bool((fits & (deviations < LARGEST_LOSS) & (means.abs() < LARGEST_LOSS)).all())  # false for NaN


class Ration(TorchDispatchMode):
    """Counts the parameters that modules allocate while it is entered, before they are allocated.

    Raises:
        ModelError: they exceed `MOST_BYTES`, and the run leaves inputs or classes to the first client.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self._is_open = None in (config.input_shape, config.num_classes)
        self._bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _EMPTY and self._is_open:
            self._bytes += 4 * math.prod(args[0])
            if self._bytes > MOST_BYTES:
                raise ModelError(
                    f"the server's networks are beyond {MOST_BYTES >> 20} MiB; set input_shape and num_classes if you "
                    "mean it"
                )
        return func(*args, **(kwargs or {}))
