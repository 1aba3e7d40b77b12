"""The description of a run: one frozen, typed object from a YAML file and flags, checked before anything starts.

Unknown keys, wrong types and impossible combinations raise `ConfigError` with one line that names the key, what was
expected and what was found.
"""

import copy
import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hyperbloom.common.errors import ConfigError, WireError

Positive = Annotated[int, Field(gt=0, le=10**9)]
Count = Annotated[int, Field(gt=0, le=10**6)]  # of clients, or of what grows with them
Rate = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
# Errors that PyYAML raises for text that it cannot parse. Its own error class does not cover all of them.
_UNREADABLE = (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
_STRATEGY = re.compile(r"\w[\w.:-]*")  # a baseline's name becomes a folder's
SectionT = TypeVar("SectionT", bound="Section")

MOST_NODES = 100_000
"""Most keys and values of a YAML file, where what an alias repeats counts each time."""
FEWEST_CLIENTS = 3
"""Smallest number of clients in a secure sum. In a sum of two, each client can compute the other's part."""
MOST_CLIENTS = 512
"""Largest cohort of a secure sum. Beyond it fixed-point steps are coarse, and a mask for every pair is costly."""


class Section(BaseModel):
    """Base of every part of the configuration: immutable, strictly typed, closed to unknown keys."""

    # Sections are built at their first use: a client never uses most of them.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    @classmethod
    def from_wire(cls, text: str, where: str) -> Self:
        """Read JSON from an untrusted sender; `where` names it in errors.

        Raises:
            WireError: the text is no JSON, or a value is missing, unknown, of the wrong type or out of range.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            details = error.errors()[0]
            key = ".".join([where, *map(str, details["loc"])])
            raise WireError(f"{key[:60]}: {details['msg']}") from None


MOST_STEPS = 100_000
"""Most local steps in one order. The client draws all their batches before the first step."""


def decay(number: int, rounds: int) -> float:
    """Return the share of the learning rate in round `number`, from 1 to `rounds`: half a wave of a cosine."""
    return (1 + math.cos(math.pi * (number - 1) / rounds)) / 2


class LocalConfig(Section):
    """Local training on a client: SGD as in pFedHN's public code, whose constant rate, 0.005, is the mean rate here."""

    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = Field(50, description="steps K of local SGD in a round")
    batch_size: Positive = Field(64, description="examples in a local batch, drawn anew at each step")
    learning_rate: Rate = Field(1e-2, description="learning rate of local SGD, at the first round if it decays")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="momentum of local SGD")
    weight_decay: NonNegative = Field(5e-5, description="weight decay of local SGD")
    clip: Rate = Field(50.0, description="total norm to which a local gradient is clipped")
    schedule: Literal["constant", "cosine"] = Field(
        "cosine", description="learning rate over the rounds; cosine: half a wave to almost 0 (not asynchronously)"
    )

    def rate(self, number: int, rounds: int) -> float:
        """Return the learning rate of round `number`, from 1 to `rounds`."""
        return self.learning_rate * (decay(number, rounds) if self.schedule == "cosine" else 1.0)

    @property
    def mean_rate(self) -> float:
        """The mean of the learning rate over many rounds."""
        return self.learning_rate / (2 if self.schedule == "cosine" else 1)


class DataConfig(Section):
    """The benchmark data set that the printed `flower-client` lines and `--local-clients` name.

    The server itself never reads data. Clients with data of their own ignore this section.
    """

    model_config = ConfigDict(str_min_length=1)
    name: str = Field("digits", description="data set that the clients split among themselves")
    root: str | None = Field(None, description="folder with the data set's files")
    split: str = Field("auto", description="how the data set is split over the clients")
    classes_per_client: Positive = Field(2, description="classes (or concepts) of each client, for splits that use it")
    alpha: Rate = Field(0.5, description="concentration of the Dirichlet split")
    max_train: Positive | None = Field(None, description="keep at most this many training examples per client")
    label: str | None = Field(None, description="column of a table to predict, or several: A,B")
    owner: str | None = Field(None, description="column of a table that says whose a row is, for split owner")
    group: str | None = Field(None, description="column of a table that says which rows no split may part")
    schema_file: str | None = Field(None, description="what a table's columns mean, for all (flower-client schema)")
    parts: Count | None = Field(None, description="number of parts of the split; default: one for each client")
    first: Annotated[int, Field(ge=0, le=10**6)] = Field(0, description="part of the first client; others get the next")


class PrivacyConfig(Section):
    """Differential privacy of what training sends (docs/privacy.md)."""

    where: Literal["none", "client", "server"] = Field(
        "none", description="where noise is added: none, client, or server (averages only)"
    )
    clip: Rate = Field(1.0, description="norm to which each client's change is clipped")
    noise: Annotated[float, Field(ge=1e-6, le=1e6)] = Field(
        1.0, description="standard deviation of the noise in each coordinate, in units of clip"
    )
    delta: Annotated[float, Field(gt=0, lt=1)] = Field(1e-5, description="delta of the guarantee that is reported")
    largest_change: Rate = Field(8.0, le=1000, description="secure_aggregation: clients scale changes down to this")


class RunConfig(Section):
    """Everything that decides the result of a run."""

    model_config = ConfigDict(str_min_length=1)
    strategy: str = Field("pfedhn", description="how the federation learns; see --list")
    rounds: Positive = Field(100, description="number of rounds")
    clients: Count = Field(6, description="clients that must have joined before the first round")
    cohort: Count = Field(1, description="clients drawn at random for a round; 1 is the paper's setting")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="seed of all random draws on server and clients")
    eval_every: Positive = Field(10, description="rounds between evaluations; unless set, at most a quarter of all")
    model: str = Field("auto", description="target network; auto: lenet for images of 28 pixels or more, else mlp")
    adapt: str = Field("all", description="what trains: all, head, norms, bias, lora:r=8[,alpha=16][,targets=PATTERN]")
    backbone: str | None = Field(None, description="pretrained network: folder or module:function (docs/backbones.md)")
    sizes: tuple[Literal["S", "M", "L"], ...] = Field(("M",), description="sizes of the target network on offer")
    models: tuple[str, ...] = Field((), description="own models of clients started here: names or module:factory")
    input_shape: tuple[Positive, ...] | None = Field(None, description="shape of an input; default: the first client's")
    num_classes: Positive | None = Field(None, description="number of classes; default: the first client's")
    task: str = Field("auto", description="what is learned; see --list; auto: what the first client's labels suggest")
    select: str | None = Field(None, description="metric that chooses the best round; default: the task's first one")
    metrics: tuple[str, ...] = Field((), description="further metrics to report (docs/tasks.md)")
    patience: Positive | None = Field(None, description="end when so many evaluations brought nothing better")
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="weights of classes in the loss; balanced: the inverse of their frequency on each client"
    )
    target_moments: tuple[float, ...] = Field(
        (), description="regression: mean of each target, then deviations; default: of the clients that disclose theirs"
    )
    compression: str = Field("none", description="codec of replies: none, int8, top-k:SHARE, or top-k:SHARE+int8")
    local: LocalConfig = Field(LocalConfig(), description="local training on the clients")
    data: DataConfig = Field(DataConfig(), description="benchmark data set of the printed client lines")
    privacy: PrivacyConfig = Field(PrivacyConfig(), description="differential privacy of the clients")
    secure_aggregation: bool = Field(False, description="clients mask changes; only sums are seen (docs/privacy.md)")
    options: dict[str, Any] = Field({}, description="options of the strategy itself; see --explain STRATEGY")
    novel: Annotated[int, Field(ge=0, le=90)] = Field(
        0, description="percent of the clients, the last by name, that never train and are scored apart"
    )
    baselines: tuple[str, ...] = Field((), description="strategies to run after this one, with the same clients")
    init_from: str | None = Field(None, description="run folder whose hypernetwork to start from")
    join_timeout_s: Annotated[float, Field(gt=0, le=1e9)] = Field(600.0, description="seconds to wait for clients")
    round_timeout_s: Rate = Field(300.0, description="seconds after which an exchange goes on without missing replies")
    min_replies: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="by rounds: fraction of the cohort that must answer by then, or the round is dropped"
    )
    examples_cap: Annotated[float, Field(ge=1, le=1e9, allow_inf_nan=False)] = Field(
        100.0, description="averages: most examples that a client counts for, in units of the cohort's median"
    )
    checkpoint_every: Annotated[int, Field(ge=0)] = Field(
        10, description="rounds between checkpoints, from which --resume continues after a crash; 0: none"
    )
    gains: bool = Field(True, description="at the end, each client compares its model with one that it trains alone")
    gains_every: Positive | None = Field(
        None, description="rounds after which they compare in the middle of the run, too; default: only after the last"
    )
    asynchronous: bool = Field(False, description="no rounds: `cohort` clients train, each reply is applied on arrival")
    max_staleness: Positive | None = Field(
        None,
        description="asynchronous: drop a reply if more than so many others were applied since its order; "
        "default: 20 times cohort",
    )

    def is_novel(self, row: int) -> bool:
        """Return whether the client in this row is among the last `novel` percent. These never train."""
        return bool(self.novel) and row >= self.clients - math.ceil(self.clients * self.novel / 100)

    def has_lost_patience(self, best: int | None, number: int) -> bool:
        """Return whether the evaluations since the best one, of round `best`, are as many as `patience` by `number`."""
        return None not in (self.patience, best) and number - (best or 0) >= (self.patience or 0) * self.eval_every

    def part(self, index: int) -> tuple[int, int]:
        """Return the part of the data set for local client `index`, and the number of parts."""
        return self.data.first + index, self.data.parts or self.clients


def load_run_config(path: Path | None, overrides: Mapping[str, Any]) -> RunConfig:
    """Read a run's description.

    Args:
        path: YAML file, or None for the defaults.
        overrides: values that replace those of the file, by dotted key (`local.steps`). A key that the run does not
            have is an option of the strategy.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, of the wrong type, out of range or impossible.
    """
    where = f"{path} or the command line" if path and overrides else str(path or "the command line")
    return make_run_config(read_yaml(path) if path else {}, overrides, where)


def make_run_config(values: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> RunConfig:
    """Return the run with a file's values and overrides, as `load_run_config` does; errors name the file `where`."""
    result: dict[str, Any] = copy.deepcopy(dict(values))
    paths = {k if k.split(".")[0] in RunConfig.model_fields else f"options.{k}": v for k, v in overrides.items()}
    for key, value in sorted(copy.deepcopy(paths).items(), key=lambda item: item[0].count(".")):  # sections come first
        *parents, name = key.split(".")
        target = result
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ConfigError(f"{parent}: expected a section with keys of its own, found {target!r}")
        target[name] = value
    config = check(RunConfig, result, where)
    if "eval_every" not in config.model_fields_set:  # validation must have several rounds to select from
        config = config.model_copy(update={"eval_every": min(config.eval_every, max(1, config.rounds // 4))})
        config.model_fields_set.discard("eval_every")  # another number of rounds has another default
    if config.asynchronous and "schedule" not in config.local.model_fields_set:
        config = config.model_copy(update={"local": config.local.model_copy(update={"schedule": "constant"})})
    _check_combinations(config)
    return config


def dump_run_config(config: RunConfig) -> str:
    """Return the YAML from which `load_run_config` makes an equal configuration."""
    return dump_yaml(json.loads(config.model_dump_json()))


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Return the YAML from which `read_yaml` makes equal values."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False)


def check(section: type[SectionT], values: Mapping[str, Any] | str, where: str) -> SectionT:
    """Validate `values`, or a text in JSON, as a `section` and return it; `where` names their source in errors.

    Raises:
        ConfigError: a key is wrong. The message names the first such key, what was expected and what was found.
    """
    try:
        if isinstance(values, str):
            return section.model_validate_json(values)
        return section.model_validate(_tuples(values))
    except RecursionError:
        raise ConfigError(f"a section contains itself in {where}") from None
    except ValidationError as error:
        details = error.errors()[0]
        key = " ".join(".".join(str(part) for part in details["loc"]).split())
        if details["type"] == "extra_forbidden":
            raise ConfigError(f"{key}: unknown key in {where}.{_suggest(section, details['loc'])}") from None
        if not key:  # no JSON, or no keys and values
            raise ConfigError(f"{where}: {details['msg']}") from None
        said = re.sub(r"^Input should be ", "expected ", details["msg"])
        said = said if said.startswith("expected ") else said[:1].lower() + said[1:]
        raise ConfigError(f"{key}: {said}, found {repr(details['input'])[:200]} in {where}") from None


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split `key=value`, reading the value as YAML; ConfigError if there is no `=`, or the value is not YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set: expected KEY=VALUE such as local.steps=20, found {text!r}")
    try:
        return key.strip(), yaml.load(value, _Loader)
    except _UNREADABLE:
        raise ConfigError(f"{key}: expected a value in YAML, found {value!r}") from None


def _tuples(value: Any) -> Any:
    """Turn lists into tuples, because strict validation accepts no lists for tuples."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _suggest(section: type[Section], loc: Iterable[int | str]) -> str:
    *parents, name = [part for part in loc if isinstance(part, str)]
    for parent in parents:
        annotation = section.model_fields[parent].annotation
        inside = (annotation, *get_args(annotation))  # a section, or a tuple of sections, or one that may be absent
        section = next(each for each in inside if isinstance(each, type) and issubclass(each, Section))
    known = sorted(section.model_fields)
    if close := difflib.get_close_matches(name, [*known, *RunConfig.model_fields], n=1):
        return f" Did you mean {close[0]}?"
    return f" Known keys: {', '.join(known)}." if known else " There are none."


def _check_combinations(config: RunConfig) -> None:
    if config.cohort > config.clients:
        raise ConfigError(f"cohort: expected at most clients = {config.clients}, found {config.cohort}")
    if config.eval_every > config.rounds:
        raise ConfigError(f"eval_every: expected at most rounds = {config.rounds}, found {config.eval_every}")
    for name in (config.strategy, *config.baselines):
        if not _STRATEGY.fullmatch(name):
            raise ConfigError(f"strategy, baselines: expected a name or package.module:Class, found {name!r}")
    training = config.clients - math.ceil(config.clients * config.novel / 100)
    if training < (least := FEWEST_CLIENTS if config.secure_aggregation else 1):
        raise ConfigError(f"clients, novel: expected at least {least} clients that train, found {training}")
    last, parts = config.part(config.clients)
    if last > parts:
        raise ConfigError(f"data.parts: expected at least data.first + clients = {last}, found {parts}")
    if config.backbone is not None and (config.model != "auto" or config.sizes != ("M",)):
        raise ConfigError("backbone: expected model: auto and sizes: [M], as the backbone is the model")
    moments, half = config.target_moments, len(config.target_moments) // 2
    if len(moments) % 2 or not all(map(math.isfinite, moments)) or min(moments[half:], default=1) <= 0:
        raise ConfigError(f"target_moments: expected means, then as many deviations above 0, found {list(moments)}")
    if config.secure_aggregation:
        _check_secure_aggregation(config)
    if config.asynchronous and config.local.schedule != "constant":
        raise ConfigError("local.schedule: expected constant with asynchronous: true, which has no rounds to count")
    if len(set(config.sizes)) != len(config.sizes) or not config.sizes:
        raise ConfigError(f"sizes: expected one or more of S, M, L without repetition, found {list(config.sizes)}")


def _check_secure_aggregation(config: RunConfig) -> None:
    if config.asynchronous:
        raise ConfigError("asynchronous: expected false with secure_aggregation, which sums the replies of a round")
    if config.compression != "none":
        raise ConfigError("compression: expected none with secure_aggregation: masked numbers cannot be made smaller")
    privacy = config.privacy
    if privacy.where == "server":
        raise ConfigError("privacy.where: expected client or none with secure_aggregation, which hides each change")
    least = privacy.clip * (1 + 6 * privacy.noise)
    if privacy.where == "client" and privacy.largest_change < least:
        raise ConfigError(
            f"privacy.largest_change: expected at least clip + 6 * noise * clip = {least:g}, or noise is scaled down; "
            f"found {privacy.largest_change:g}"
        )


def read_yaml(path: Path) -> dict[str, Any]:
    """Return a YAML file's keys and values; ConfigError if the file cannot be read, is no mapping, or repeats a key."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except _UNREADABLE as error:
        raise ConfigError(f"--config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"--config: expected keys and values in {path}, found {type(values).__name__}")
    return values or {}


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.2's core schema (1e-3 is a number, 010 is ten, dates are words) and refuses repeated keys."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own way, which types it as an instance's

    def compose_document(self) -> yaml.Node | None:
        document: yaml.Node | None = super().compose_document()
        if document is not None and _nodes(document, {}) > MOST_NODES:
            raise yaml.constructor.ConstructorError(None, None, f"with its aliases it has over {MOST_NODES} values")
        return document

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"key {sorted(repeated)[0]!r} stands twice")
        return super().construct_mapping(node, deep)

    def construct_int(self, node: yaml.ScalarNode) -> int:
        """Read decimal numbers, octal ones (0o17) and hexadecimal ones (0x1F)."""
        text = str(node.value).lower()
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _nodes(node: yaml.Node, counted: dict[int, int]) -> int:
    """Return how many nodes there are if each alias is replaced by what it stands for."""
    if id(node) not in counted:
        counted[id(node)] = 1  # for a node that contains itself, which is refused later
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        each = [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
        counted[id(node)] = 1 + sum(_nodes(part, counted) for part in each)
    return counted[id(node)]


class _Dumper(yaml.SafeDumper):
    """Quotes every string that the loader would read as another type."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_int)
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))
