"""The interface for authors of strategies: an algorithm over clients and flat vectors of weights.

An algorithm has two abstract methods: `weights` returns what each client is sent, and `learn` learns from what came
back. All others have defaults. The round loop handles messages, admission, deadlines, compression, noise, masks, resume
points and scores.

    serves -> build -> join (each client) -> round, round, evaluate, round, ... -> checkpoint
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import get_annotations
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hyperbloom.common import models
from hyperbloom.common.config import RunConfig, Section, check
from hyperbloom.common.errors import ConfigError, ModelError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.methods import Method
from hyperbloom.common.models import ModelSpec
from hyperbloom.common.seeds import derive
from hyperbloom.common.tasks import CLASSIFICATION, Task, TaskSpec, make_task
from hyperbloom.common.wire.orders import PRIVATE, REPLIES, Introduction, Refinement
from hyperbloom.strategies.exchange import Client, Exchanges, Update, train
from hyperbloom.strategies.turn import Evaluation, Turn

LARGEST_NETWORK = 50_000_000
"""Most parameters of a target network that the first client's word alone may cause the server to build."""


@dataclass(frozen=True)
class Setting:
    """What the data of the first client decide.

    Attributes:
        spec: the target network of the first size.
        layouts: by size, the layout of the flat vector that travels.
        task: what is learned.
        backbones: digests of what is frozen in the networks; empty if nothing is.
    """

    spec: ModelSpec
    layouts: Mapping[str, Layout]
    task: Task = CLASSIFICATION
    backbones: tuple[str, ...] = ()

    def first_values(self, size: str, seed: int) -> Tensor:
        """Return the values `(P,)` with which torch would start a network of a size, from a run's seed."""
        return models.first_values(replace(self.spec, size=size), self.layouts[size], derive(seed, "model"))


@dataclass(frozen=True)
class Recipe:
    """How clients work with what they are sent.

    Attributes:
        private: the part of the target network that stays on the client, one of `PRIVATE`.
        method: the method of local training; None: plain SGD.
        refinement: local work before weights are scored; None: none.
        resemble: the target for the clients' representations.
        hypernetwork: settings of the travelling graph hypernetwork, as JSON.
    """

    private: str
    method: Method | None = None
    refinement: Refinement | None = None
    resemble: Weights | None = None
    hypernetwork: str | None = None


def target_spec(
    config: RunConfig, size: str, input_shape: tuple[int, ...], num_classes: int, task: Task = CLASSIFICATION
) -> ModelSpec:
    """Return a run's target network of a size for data of this form."""
    return ModelSpec(config.model, size, input_shape, num_classes, config.adapt, config.backbone).resolved(task)


class Algorithm(ABC):
    """Base class of all algorithms.

    Attributes:
        options: the strategy's own options, validated.
        device: where the server's networks live; set before `build`. What an algorithm gives to the round loop, and
            gets from it, is on the CPU.
        setting: what the first client's data decided; exists after `build`.
        clients: all clients that have joined, by row.

    Raises:
        ConfigError: the options are wrong, or contradict the rest of the run.
    """

    options_type: ClassVar[type[Section]] = Section
    """The type of `options`, which a subclass declares."""
    private: ClassVar[str] = "none"
    """The part of the target network that stays on the client."""
    reply: ClassVar[str] = "delta"
    """What clients send back from training, one of `REPLIES`."""
    asynchronous: ClassVar[bool] = False
    """Whether `learn` accepts single replies at any time."""
    sums: ClassVar[bool] = False
    """Whether `learn` uses only the mean of the updates, weighted by `examples`."""
    noise_at: ClassVar[tuple[str, ...]] = ()
    """The places of `PrivacyConfig.where` at which noise covers all that training sends."""
    keeps_sent: bool = True
    """Whether `learn` needs the weights that were sent."""
    own_models: ClassVar[Literal["no", "may", "must"]] = "no"
    """Whether clients bring models of their own."""
    asks: ClassVar[str] = "own"
    """What clients must disclose of their own models, one of `ASKS`."""
    reference: str | None = None
    """Digest of the reference set that clients need."""

    device = torch.device("cpu")
    options: Section
    setting: Setting

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "options" in cls.__annotations__ and "options_type" not in vars(cls):
            cls.options_type = get_annotations(cls, eval_str=True)["options"]

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.options = check(self.options_type, config.options, f"options of {config.strategy}")
        self.clients: dict[int, Client] = {}
        kind = type(self)
        stateless = (kind.state, kind.checkpoint) == (Algorithm.state, Algorithm.checkpoint)
        if kind.restore is Algorithm.restore and not stateless:
            raise ConfigError(f"{config.strategy}: expected a method restore, or --resume would forget its state")
        adapts = models.Adapt.parse(config.adapt).kind != models.ALL or config.backbone
        if adapts and (self.own_models == "must" or self.adapt != config.adapt):
            raise ConfigError(f"adapt: expected all, and no backbone, with {config.strategy}; it writes whole networks")
        if self.private == "head" and models.Adapt.parse(config.adapt).kind == "head":
            raise ConfigError(f"adapt: expected more than head with {config.strategy}, whose clients keep the head")
        if self.reply not in REPLIES or self.private not in PRIVATE:
            found = f"found {self.reply!r} and {self.private!r}"
            raise ConfigError(f"{config.strategy}: expected reply in {REPLIES} and private in {PRIVATE}, {found}")
        self.check()

    def check(self) -> None:
        """Raise a ConfigError for settings that cannot work together; called before anything starts."""

    @property
    def adapt(self) -> str:
        """Return what of the target network is adapted, for `ModelSpec.adapt`."""
        return self.config.adapt

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics that clients compute. The first one selects the best round."""
        config, task = self.config, self.setting.task
        return task.asked([*([config.select] if config.select else []), *task.asked(()), *config.metrics])

    def settle(self, about: Introduction) -> Setting:
        """Return what the data of the first client decide.

        Raises:
            ModelError: no target network fits them and their task, or it exceeds `LARGEST_NETWORK` and a client's data
                decide on it.
        """
        of = {"head": models.body_layout, "body": models.head_layout}.get(self.private, models.full_layout)
        data = (about.input_shape, about.num_classes)
        task = make_task(TaskSpec(about.task))
        specs = [replace(target_spec(self.config, size, *data, task), adapt=self.adapt) for size in self.config.sizes]
        layouts = {spec.size: of(spec) for spec in specs}
        largest = max(layout.numel for layout in layouts.values())
        if largest > LARGEST_NETWORK and None in (self.config.input_shape, self.config.num_classes):
            raise ModelError(
                f"{largest:,} parameters are beyond {LARGEST_NETWORK:,}; set input_shape and num_classes if you mean it"
            )
        for spec in specs:
            models.check_outputs(spec, task)
        frozen = () if specs[0].is_new else tuple(models.backbone_digest(spec) for spec in specs)
        return Setting(specs[0], layouts, backbones=frozen)

    def serves(self, about: Introduction, others: Iterable[Introduction]) -> None:
        """Raise a RefusedError if a client cannot take part; `others` are the clients admitted before."""

    def build(self, setting: Setting) -> None:
        """Make the server's networks."""
        self.setting = setting

    def join(self, client: Client, first: bool) -> None:
        """Add a client; called in order of rows. If `first` is False, the client has come back and may have changed."""
        self.clients[client.row] = client

    def trains(self, client: Client) -> bool:
        """Return whether a client may be drawn for a cohort."""
        return True

    def recipe(self, number: int) -> Recipe:
        """Return how clients work in round `number`."""
        return Recipe(self.private)

    def layout(self, client: Client) -> Layout:
        """Return the layout `(P,)` of what a client sends back."""
        return self.setting.layouts[client.about.size]

    @abstractmethod
    def weights(self, clients: Sequence[Client]) -> Sequence[Weights] | None:
        """Return what each of `clients` is sent, or None if nothing travels."""

    def personal(self, clients: Sequence[Client]) -> Sequence[Weights] | None:
        """Return the models of clients that are scored and exported, by default their present weights."""
        return self.weights(clients)

    @abstractmethod
    def learn(self, updates: Sequence[Update]) -> None:
        """Learn from updates: all of a round by row, or a single one in asynchronous mode."""

    def round(self, turn: Turn) -> Exchanges[None]:
        """Play the exchanges of a training round. By default one: the cohort trains."""
        self.learn((yield from train(turn.training(turn.cohort))))

    def evaluate(self, turn: Turn, clients: Sequence[Client]) -> Exchanges[Evaluation]:
        """Play the exchanges that score clients. By default one: each scores its personal model."""
        return Evaluation((yield from turn.score(clients)))

    def common(self, client: Client) -> Weights | None:
        """Return the model for all, as clients of this one's size would be sent it; None: there is none."""
        return None

    def state(self) -> dict[str, Tensor]:
        """Return the server's learned state by name, as the run folder stores it."""
        return {}

    def checkpoint(self) -> dict[str, Tensor]:
        """Return by name all that `restore` needs to continue exactly where this run is."""
        return self.state()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `checkpoint` returned. The networks are built and the clients of that time have joined."""

    def check_start(self, tensors: Mapping[str, Tensor]) -> None:
        """Check before anything starts whether `start_from` accepts another run's state; ConfigError if it does not."""
        raise ConfigError(f"init_from: {self.config.strategy} has no way to start from another run")

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from another run's `state` and make room for its clients, whom `join` gets with `first=False`."""
        self.check_start(tensors)
