"""One client: the data and state that it loads once for all orders."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from hyperbloom.client.keep.releases import Releases
from hyperbloom.client.keep.state import ClientState
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.own_network import own_graph
from hyperbloom.common.data import load_client_data
from hyperbloom.common.data.schema import Schema, difference, load_schema, read_schema
from hyperbloom.common.errors import ConfigError, DataError, HyperbloomError, ModelError, RefusedError, WireError
from hyperbloom.common.files.storage import write_bytes
from hyperbloom.common.models import BACKBONE, ModelSpec, backbone_digest, build, check_outputs
from hyperbloom.common.models.pretrained import check_tokens, vocabulary
from hyperbloom.common.program.device import pick_device
from hyperbloom.common.reasons import Reason
from hyperbloom.common.secrecy.keys import read_fingerprints, read_private_key
from hyperbloom.common.seeds import derive
from hyperbloom.common.tasks import Task, TaskSpec, make_task
from hyperbloom.common.wire.orders import Scope

log = logging.getLogger("hyperbloom.client")

LOADED_CLIENTS = 256
"""Virtual clients of one process whose data stay loaded. Data of others are read again when they are needed."""
MOST_SCHEMAS = 10
"""Schemas by which servers may read a client's table, over all its runs and restarts."""


class Client:
    """A client's settings, its state on the disk, its data on the device, and its own model if it has one."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.state = ClientState(settings.folder)
        self.releases = Releases(settings)
        identity_of(settings)  # report problems with the files now
        self.device = pick_device(settings.device)
        self._handed: Schema | None = None  # the first schema that the server handed out
        try:
            self._load()
        except DataError:
            if settings.source == settings.data:
                raise
            settings.schema_file.unlink()  # of an earlier start; the table or the server's schema may differ by now
            self._load()

    def _load(self) -> None:
        settings, data = self.settings, load_client_data(self.settings.source)
        self.num_classes, self.input_shape = data.num_classes, data.input_shape
        self.class_shares, self.scaling, self.schema = data.class_shares, data.scaling, data.schema
        self.meaning = data.meaning
        parts = [part.to(self.device) for part in (data.train, data.val, data.test)]
        if settings.low_memory and self.device.type == "cpu":
            settings.folder.mkdir(parents=True, exist_ok=True)
            parts = [part.on_disk(settings.folder) for part in parts]
        self.train_data, self.val_data, self.test_data = parts
        self.task = self.train_data.task
        about = (settings.size, self.input_shape, self.num_classes)
        self.features: dict[int, tuple[torch.Tensor, str, torch.Tensor]] = {}
        """By the id of inputs: these, the digest of a backbone, and its features of them."""
        self.lone: tuple[object, Any] | None = None
        """What the model that it trains alone depends on, and that model with its scores."""
        self.pretrained: ModelSpec | None = None
        self.backbone: str | None = None  # digest of the pretrained network
        if settings.data.backbone is not None:
            self.pretrained = ModelSpec(BACKBONE, *about, backbone=settings.data.backbone)
            self.backbone = backbone_digest(self.pretrained)
            known = vocabulary(build(self.pretrained))
            check_tokens("--backbone", known, *(part.inputs for part in (data.train, data.val, data.test)))
        self.own: ModelSpec | None = None
        if settings.model is not None:
            self.own = ModelSpec(settings.model, *about).resolved(self.task)
            check_outputs(self.own, self.task)  # report now that it cannot run
            try:
                own_graph(self.own)
            except ModelError as error:
                log.warning("strategies that read the own model's graph (ghn) cannot use it: %s", _in_short(error))

    def adopt(self, text: str | None) -> None:
        """Read this client's table by the schema that the server hands out, or else by the user's; others stay.

        Raises:
            RefusedError: The user gave another schema, the server an earlier one, or the table does not fit; the log
                says where. From schema after schema a server could learn which values occur.
        """
        path = self.settings.data.schema
        if (text is None and path is None) or not self.settings.data.is_table or self.schema is None:
            return
        try:
            own = None if path is None else load_schema(path)
            wanted = own if text is None else read_schema(text, "the server's schema")
            assert wanted is not None
            first = self._handed = self._handed or wanted
            if text is not None and own is None:
                self._count_schema(wanted)
            if own is None and (why := difference(first.scaled(wanted.scales), wanted)):
                raise DataError(f"the server has handed out another schema before: {why}; start the client anew")
            if wanted == self.schema and self.settings.source.schema is not None:
                return
            if own is not None and (why := difference(wanted, own.scaled(wanted.scales))):
                raise DataError(f"--schema: not the server's: {why}")
            before = self.settings.schema_file.read_bytes() if self.settings.schema_file.exists() else None
            write_bytes(self.settings.schema_file, wanted.text.encode())
            try:
                self._load()
            except HyperbloomError:
                self.settings.schema_file.unlink() if before is None else write_bytes(self.settings.schema_file, before)
                raise
            log.info("%s: by the schema, reads %s", self.settings.data.data, [each.name for each in wanted.columns])
        except HyperbloomError as error:
            log.error("%s", error)  # what stands in the table stays here
            raise RefusedError(
                "the table does not fit the server's schema; the client's log says where", reason=Reason.UNFIT
            ) from None

    def _count_schema(self, schema: Schema) -> None:
        """Keep the digest of a schema that a server hands out; DataError for one more than `MOST_SCHEMAS`, ever."""
        path = self.settings.folder / "schemas.txt"
        unscaled = [each.model_copy(update={"mean": None, "std": None}) for each in schema.columns]
        digest = sha256(schema.model_copy(update={"columns": tuple(unscaled)}).text.encode()).hexdigest()
        known = {*path.read_text(encoding="utf-8").split()} if path.exists() else set[str]()
        if len(known | {digest}) > MOST_SCHEMAS:
            raise DataError(f"servers have handed out {len(known)} schemas; delete {path} if you trust this one")
        write_bytes(path, "\n".join(sorted(known | {digest})).encode(), mode=0o600)

    def task_for(self, name: str | None) -> Task:
        """Return the task that a run names, or that of the labels; RefusedError if the labels are not for it."""
        try:
            task = self.task if name in (None, self.task.spec.name) else make_task(TaskSpec(str(name)))
            for part in (self.train_data, self.val_data, self.test_data):
                task.check(part.labels, self.num_classes)
            return task
        except (ConfigError, DataError) as error:
            raise RefusedError(f"the labels are not for the task of this run: {error}", reason=Reason.UNFIT) from None

    def learn(self, spec: TaskSpec) -> None:
        """Take the examples for a task from now on; WireError if the labels are not for it."""
        if spec == self.train_data.task.spec:
            return
        try:
            task = make_task(spec)
            task.check(self.train_data.labels, self.num_classes)
            parts = [part.under(task) for part in (self.train_data, self.val_data, self.test_data)]
        except (ConfigError, DataError) as error:
            raise WireError(f"order: {error}") from None
        self.train_data, self.val_data, self.test_data = parts

    def seed(self, scope: Scope, *more: str | int) -> int:
        """Return a seed of this client. With equal seeds all clients would draw the same batches."""
        return derive(scope.seed, self.settings.client_id, *more)

    def own_spec(self) -> ModelSpec:
        """Return the own model; WireError if there is none."""
        if self.own is None:
            raise WireError("order: for the client's own model, but this client has none; join with --model")
        return self.own

    @contextmanager
    def hide_own_model(self) -> Iterator[None]:
        """Replace errors of the own model, which name modules and shapes, by a HyperbloomError without details."""
        try:
            yield
        except Exception as error:
            told = _is_memory(error) or (isinstance(error, HyperbloomError) and not isinstance(error, ModelError))
            if self.own is None or told:
                raise
            if isinstance(error, ModelError):  # no traceback: one line says all
                log.error("the own model cannot be used here: %s", _in_short(error))
            else:
                log.exception("the own model %s fails", self.own.name)
            where = "the client's log says how; virtual clients log to server.log in the run folder"
            raise HyperbloomError(f"the client's own model fails; {where}") from None


def identity_of(settings: ClientSettings) -> tuple[EllipticCurvePrivateKey | None, frozenset[str] | None]:
    """Return a client's signing key, and the fingerprints of the clients that its user knows; None for either.

    Raises:
        ConfigError: a file cannot be read, or has the wrong content.
    """
    key = read_private_key(settings.key, "--key") if settings.key else None
    return key, read_fingerprints(settings.peers, "--peers") if settings.peers else None


@lru_cache(LOADED_CLIENTS)
def client_for(settings: ClientSettings) -> Client:
    """Return this process's client with these settings. The first call loads the data."""
    return Client(settings)


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn an out-of-memory error into a HyperbloomError with advice, and free cached memory; also a decorator."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_memory(error):
            raise
        log.error("out of memory: %s", error)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise HyperbloomError(
            "the client's memory is not enough; lower local.batch_size, or let it join with a smaller --size",
            reason=Reason.MEMORY,
        ) from None


def _is_memory(error: Exception) -> bool:
    """Return whether an error says that memory is not enough; on a CPU and with MPS, torch has no type for it."""
    untyped = any(words in str(error) for words in ("DefaultCPUAllocator", "MPS backend out of memory"))
    return untyped or isinstance(error, torch.OutOfMemoryError | MemoryError)


def _in_short(error: ModelError) -> str:
    """Return an error's text without the list of supported layers."""
    return str(error).partition("; supported: ")[0]
