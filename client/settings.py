"""A client's settings: its name, its data, its device. The client decides them, never the server."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import TypeAdapter, ValidationError

from hyperbloom.common.config import FEWEST_CLIENTS
from hyperbloom.common.data import DataSpec
from hyperbloom.common.data.schema import load_schema
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.program.names import check_name, default_state_dir
from hyperbloom.common.secrecy.keys import server_of

Disclosure = Literal["types", "graph"]
"""The most that a client discloses of its own model: its layer types, nothing, or the whole graph."""

Scalar = str | int | float | bool

PATHS = {"state_dir", "root", "schema", "key", "peers", "root_certificates"}
"""Keys of a node config that name files or folders."""


@dataclass(frozen=True)
class ClientSettings:
    """One client's settings. They are hashable, so that a process can cache what it loads for them."""

    client_id: str
    data: DataSpec = field(default_factory=DataSpec)
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    size: str = "M"  # size of the target network that this machine can run
    state_dir: Path | None = None
    disclose_class_shares: bool = False
    model: str | None = None  # own model: a registered name, auto, or package.module:factory
    disclose: Disclosure = "types"  # most that it discloses of the own model
    min_noise: float | None = None  # least noise on a change, in units of its norm
    min_masked: int | None = None  # send changes only masked, in sums of at least so many clients
    key: Path | None = None  # private key for signatures in secure aggregation; None: a new one each round
    peers: Path | None = None  # fingerprints of the clients that may be in a sum with this one; None: any
    server: str | None = None  # HOST:PORT, and its CA: it has a secret of its own
    root_certificates: Path | None = None
    max_changes: int | None = None  # most changes over all runs; None: 1,000 with min_noise or min_masked, else any
    max_scores: int | None = None  # most scores over all runs; None: 0 with min_noise or min_masked, else any
    disclose_moments: bool = False  # mean and deviation of regression targets, and of columns without a scale
    moments_noise: float | None = None  # noise on them, in units of their standard errors
    disclose_counts: bool = False  # counts of answers, and of scores in bins, of an evaluation
    disclose_gain: bool = False  # what the federation gains this client over training alone
    low_memory: bool = False  # examples paged in from the disk

    def __post_init__(self) -> None:
        if self.min_noise is not None and not 0 < self.min_noise < float("inf"):
            raise ConfigError(f"--min-noise: expected a number above 0, found {self.min_noise}")
        if self.moments_noise is not None and not 0 < self.moments_noise < float("inf"):
            raise ConfigError(f"--moments-noise: expected a number above 0, found {self.moments_noise}")
        if self.min_masked is not None and self.min_masked < FEWEST_CLIENTS:
            raise ConfigError(f"--min-masked: expected {FEWEST_CLIENTS} clients or more, found {self.min_masked}")
        if self.peers is not None and self.key is None:
            raise ConfigError("--peers: expected with --key, by which the others know this client")
        for flag, most in (("--max-changes", self.max_changes), ("--max-scores", self.max_scores)):
            if most is not None and most < 0:
                raise ConfigError(f"{flag}: expected a number from 0, found {most}")
        check_name(self.client_id, "--client-id")

    @property
    def folder(self) -> Path:
        """The state folder of this client."""
        return self.state_dir or default_state_dir(self.client_id)

    @property
    def schema_file(self) -> Path:
        """Where the schema is kept that this client's server has handed out for its table; others must not see it."""
        server = server_of(self.root_certificates) or self.server
        return self.folder / (f"schema-{sha256(server.encode()).hexdigest()[:16]}.json" if server else "schema.json")

    @property
    def source(self) -> DataSpec:
        """The data; a table without --schema, or with one without scales, is read by the server's once there is one."""
        own = self.data.schema
        if self.data.is_table and self.schema_file.exists() and (own is None or load_schema(own).open):
            return replace(self.data, schema=self.schema_file)
        return self.data

    def to_node_config(self) -> dict[str, Scalar]:
        """Return the settings as Flower's flat node config, for a stock `flower-supernode`."""
        flat = {**asdict(self), **asdict(self.data)} | {"data": self.data.data}
        return {
            key.replace("_", "-"): str(value) if isinstance(value, Path) else value
            for key, value in flat.items()
            if value is not None
        }

    def to_flags(self) -> list[str]:
        """Return the flags of `flower-client` for these settings: name, data set, and all that is no default."""
        flat, usual = ({**asdict(each), **asdict(each.data)} for each in (self, ClientSettings("unnamed")))
        words = ["--client-id", self.client_id, "--data", self.data.data]
        for key, value in flat.items():
            if value != usual[key] and key not in ("client_id", "data", "partition", "partitions"):
                flag = "--data-seed" if key == "seed" else f"--{key.replace('_', '-')}"
                words += [flag] if value is True else [flag, str(value)]
        if self.data.partition is not None:
            words += ["--partition", f"{self.data.partition}/{self.data.partitions}"]
        return words

    @classmethod
    def from_node_config(cls, config: Mapping[str, Scalar]) -> "ClientSettings":
        """Read a node config with the keys of `to_node_config`.

        Raises:
            ConfigError: the client's name is missing, a key is unknown, or a value is not valid.
            DataError: a number of the data's description is out of range.
        """
        values: dict[str, Any] = {key.replace("-", "_"): value for key, value in config.items()}
        for key in PATHS & values.keys():
            values[key] = Path(os.path.expanduser(str(values[key])))  # no shell has read a SuperNode's
        for key, value in values.items():
            name = key.replace("_", "-")
            if key not in _KINDS:
                raise ConfigError(f"node config: unknown key {name!r}")
            try:
                TypeAdapter(_KINDS[key]).validate_python(value, strict=True)
            except ValidationError as error:
                expected = error.errors()[0]["msg"].removeprefix("Input should be ")
                raise ConfigError(f"node config: {name}: expected {expected}, found {value!r}") from None
        own = {name: values.pop(name) for name in cls.__dataclass_fields__ if name != "data" and name in values}
        if "client_id" not in own:
            raise ConfigError('node config: expected client-id="NAME" among the keys')
        return cls(data=DataSpec(**values), **own)


_KINDS: dict[str, Any] = {**get_type_hints(DataSpec), **get_type_hints(ClientSettings)}
_KINDS |= {"data": str, "size": Literal["S", "M", "L"]}
