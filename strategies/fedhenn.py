"""FedHeNN: clients with networks of their own that learn to see the same inputs as alike or unlike.

Makhija, Han, Ho, Ghosh: Architecture Agnostic Federated Learning for Neural Networks, ICML 2022,
https://arxiv.org/abs/2202.07757, algorithms 1 and 2. With `A_i` `(n, d_i)` what enters the last layer of client i's
network for `n` inputs X that everybody may see (the RAD), `K_i = k(A_i, A_i)` and `d = 1 - CKA` (common/cka.py), round
t is:

    fedhenn               server:  draw X;  Kbar = sum_j w_j K_j                       over all clients
                          client:  K steps of SGD on  task loss + eta(t) d(K_i, Kbar)  from where it stopped
    fedhenn-homogeneous   client:  K steps of SGD on  task loss + eta(t) d(K_i, K_g)   from the global weights; they
                                                                                       have the kernel matrix K_g
                          server:  weights averaged as in FedAvg

With eta = 0 the one is Local and the other FedAvg. eta(t) = eta t: early representations are noise.

What leaves a client: a factor of `K_i`, its centred features if these are narrow, of inputs that are not its own. The
architecture stays there. The server names X; it is sent once and known by its hash, a round draws some rows of it.

Departures: in the paper the server has all clients' weights and computes what they make of X. And each `K_j` is scaled
to a norm of 1 before it is added (`normalise: false` for the paper's sum): a client with large activations would drown
the others, by design or by malice. As CKA is a cosine, `d` then pulls towards the weighted mean of the CKA with each.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from hyperbloom.common.alignment import (
    LARGEST_REFERENCE,
    check_factor,
    digest_of,
    factor_weights,
    mean_factor,
    reference_weights,
    widest,
)
from hyperbloom.common.cka import Kernel
from hyperbloom.common.config import Rate, RunConfig, Section, Share
from hyperbloom.common.data import DataSpec, read_reference
from hyperbloom.common.errors import ConfigError, RefusedError
from hyperbloom.common.methods import Aligned
from hyperbloom.common.reasons import Reason
from hyperbloom.common.seeds import derive
from hyperbloom.common.wire import (
    Introduction,
    ReferenceOrder,
    ReferenceResult,
    RepresentOrder,
    RepresentResult,
    Weights,
)
from hyperbloom.strategies.algorithm import Algorithm, Recipe, Turn
from hyperbloom.strategies.exchange import Ask, Client, Exchanges, Train, Update, ask, train
from hyperbloom.strategies.fedavg import FedAvg

__all__ = ["FedHeNN", "FedHeNNHomogeneous", "FedHeNNHomogeneousOptions", "FedHeNNOptions"]


class _AlignmentOptions(Section):
    """Options of both strategies."""

    rad: str | None = Field(
        None,
        description="public or synthetic inputs that all clients may see: a data set's name, an .npz (its x "
        "suffices), a folder or package.module:function; read on the server, labels unused",
    )
    rad_size: Annotated[int, Field(ge=2, le=LARGEST_REFERENCE)] = Field(
        LARGEST_REFERENCE, description="inputs of rad that are sent, once to each client; drawn if it has more"
    )
    rows: Annotated[int, Field(ge=2, le=LARGEST_REFERENCE)] = Field(
        500, description="of these, how many a round draws; each local step takes a pass over them"
    )
    eta: Share = Field(1e-3, description="weight of the alignment in the local loss")
    growth: Literal["linear", "sqrt", "constant"] = Field(
        "linear", description="eta in round t: eta * t, eta * sqrt(t), or eta"
    )
    kernel: Kernel = Field("linear", description="linear or rbf")
    bandwidth: Rate = Field(1.0, description="of the rbf kernel, in root median squared distances")


class FedHeNNOptions(_AlignmentOptions):
    """Options of FedHeNN for networks that differ."""

    normalise: bool = Field(True, description="kernels of one size before they are added")
    weights: dict[str, Share] = Field(
        {}, description="weight of a client's kernel in the mean by its name; others have 1"
    )
    peers: Literal["all", "cohort"] = Field(
        "all", description="whose kernels are added, all clients' as in the paper or the cohort's"
    )


class FedHeNNHomogeneousOptions(_AlignmentOptions):
    """Options of FedHeNN for one network, which is averaged."""

    score: Literal["personal", "global"] = Field(
        "personal", description="score the weights as each client last trained them, or the average"
    )


class _Reference:
    """The inputs on which networks are compared, and who has them.

    Args:
        config: the run.
        options: of either strategy.

    Raises:
        ConfigError: they are not named, or are the clients' own.
    """

    def __init__(self, config: RunConfig, options: _AlignmentOptions) -> None:
        """Check what is named; it is read when it is first needed."""
        if options.rad is None:
            raise ConfigError(
                "options.rad: expected a public or synthetic set of inputs on which networks are compared, found none; "
                "such as --set rad=public.npz"
            )
        if options.rad == config.data.name:
            raise ConfigError(
                f"options.rad: {options.rad} is what the clients share (data.name); the inputs on which networks "
                "are compared are seen by all, so name a set that is nobody's"
            )
        self.seed, self.options = config.seed, options
        root = Path(config.data.root) if config.data.root else None
        self._spec = DataSpec(options.rad, root, seed=config.seed)
        self._holding: set[int] = set()  # rows of the clients that have taken the set
        self._doubted: set[int] = set()  # of those that have lost it since they said that they have it

    @property
    def inputs(self) -> Weights:
        """Return the inputs `(n, *shape)`, as they travel; DataError or ConfigError if they cannot be read."""
        return _read(self._spec, self.options.rad_size)[0]

    @property
    def digest(self) -> str:
        """Return what the set is known by."""
        return _read(self._spec, self.options.rad_size)[1]

    @property
    def rows(self) -> int:
        """Return how many inputs a round draws."""
        return min(self.options.rows, self.inputs.layout.shapes[0][1][0])

    def check(self, about: Introduction) -> None:
        """Refuse a client whose network cannot read the inputs."""
        shape = self.inputs.layout.shapes[0][1][1:]
        if about.input_shape != shape:
            raise RefusedError(
                f"expected inputs of shape {shape}, as those on which this run compares networks, found "
                f"{about.input_shape}"
            )

    def eta(self, number: int) -> float:
        """Return the weight of the alignment in round `number`."""
        growth = {"linear": 1.0, "sqrt": 0.5, "constant": 0.0}[self.options.growth]
        return self.options.eta * float(number**growth)

    def draw(self, number: int) -> int:
        """Return the seed that says which inputs round `number` draws."""
        return derive(self.seed, "reference", number)

    def method(self, number: int) -> Aligned:
        """Return how a client aligns with others in round `number`."""
        return Aligned(
            eta=self.eta(number),
            kernel=self.options.kernel,
            bandwidth=self.options.bandwidth,
            reference=self.digest,
            rows=self.rows,
            draw=self.draw(number),
        )

    def send(self, clients: Sequence[Client]) -> Exchanges[list[Client]]:
        """Bring the set to those of `clients` who lack it; return those who have it then."""
        lacking = [client for client in clients if not self._has(client)]
        if lacking:
            order = ReferenceOrder(self.digest, self.inputs)
            wanted: Ask[ReferenceResult] = Ask(
                lacking, lambda some: [order] * len(some), size=self.inputs.layout.numel, quorum=False
            )
            taken = {client.row for client, _ in (yield from ask(wanted))}
            self._holding |= taken
            self._doubted -= taken
        return [client for client in clients if self._has(client)]

    def _has(self, client: Client) -> bool:
        told = bool(client.about.has_reference) and client.row not in self._doubted
        return told or client.row in self._holding

    def failed(self, client: Client, reason: Reason) -> None:
        """Note who has lost the set: it is sent again."""
        if reason is Reason.LACKS_REFERENCE:
            self._holding.discard(client.row)
            self._doubted.add(client.row)


@lru_cache(maxsize=2)
def _read(spec: DataSpec, most: int) -> tuple[Weights, str]:
    """Return a reference set and its digest; checks and runs of one process read it once."""
    inputs = read_reference(spec, most)
    if len(inputs) < 2:
        raise ConfigError(f"options.rad: expected at least 2 inputs in {spec.data}, found {len(inputs)}")
    weights = reference_weights(inputs)
    return weights, digest_of(weights)


class FedHeNN(Algorithm):
    """FedHeNN: networks of any architecture, aligned in what they make of inputs that everybody may see."""

    options_type: ClassVar[type[Section]] = FedHeNNOptions
    options: FedHeNNOptions
    private: ClassVar[str] = "all"
    reply: ClassVar[str] = "nothing"
    own_models: ClassVar[Literal["no", "may", "must"]] = "may"

    def check(self) -> None:
        """There is a reference set, which is nobody's."""
        self._set = _Reference(self.config, self.options)
        self._target: Tensor | None = None  # factor of this round's mean kernel matrix

    @property
    def reference(self) -> str:  # type: ignore[override]
        """Return the digest of the reference set."""
        return self._set.digest

    def serves(self, about: Introduction, others: Iterable[Introduction]) -> None:
        """Refuse a client whose network cannot read the reference set."""
        self._set.check(about)

    def weights(self, clients: Sequence[Client]) -> None:
        """Networks stay where they are."""

    def learn(self, updates: Sequence[Update]) -> None:
        """Nothing is learned on the server."""

    def recipe(self, number: int) -> Recipe:
        """Align with the mean of the representations; train as in Local where there is none."""
        if self._target is None:
            return super().recipe(number)
        return replace(super().recipe(number), method=self._set.method(number), resemble=factor_weights(self._target))

    def round(self, turn: Turn) -> Exchanges[None]:
        """Bring the reference set, collect kernels, train."""
        self._target, there = None, list(turn.cohort)
        if self._set.eta(turn.number) > 0:
            peers = turn.candidates if self.options.peers == "all" else there
            holders = yield from self._set.send(peers)
            factors = yield from self._represent(turn, holders)
            self._target = self._mean({client.row: client.client_id for client in peers}, factors)
            there = [client for client in there if client.row in factors]
        wanted = self.training(turn, there)
        self.learn((yield from train(replace(wanted, failed=self._set.failed))))

    def training(self, turn: Turn, clients: Sequence[Client]) -> Train:
        """Its orders are as large as what is to be resembled."""
        wanted = super().training(turn, clients)
        rows = self._set.rows
        return wanted if self._target is None else replace(wanted, size=rows * widest(rows))

    def _represent(self, turn: Turn, clients: Sequence[Client]) -> Exchanges[Mapping[int, Tensor]]:
        """Ask some clients what their networks make of this round's inputs; return factors of kernels by row."""
        rows, factors = self._set.rows, {}
        order = RepresentOrder(
            turn.scope, self.target(turn.number), self._set.digest, rows, self._set.draw(turn.number)
        )

        def check(client: Client, result: RepresentResult) -> None:
            factors[client.row] = check_factor(result.factor, rows)

        wanted = Ask(
            clients, lambda some: [order] * len(some), check, size=rows * widest(rows), failed=self._set.failed
        )
        answers = yield from ask(wanted)
        return {client.row: factors[client.row] for client, _ in answers}

    def _mean(self, names: Mapping[int, str], factors: Mapping[int, Tensor]) -> Tensor | None:
        options, rows = self.options, self._set.rows
        weights = [options.weights.get(names[row], 1.0) for row in factors]
        if not any(weights):
            return None
        return mean_factor(
            list(factors.values()), weights, options.kernel, options.bandwidth, options.normalise, widest(rows)
        )


class FedHeNNHomogeneous(FedAvg):
    """FedAvg whose clients stay aligned with the global model that they start from."""

    options_type: ClassVar[type[Section]] = FedHeNNHomogeneousOptions
    options: FedHeNNHomogeneousOptions
    private: ClassVar[str] = "copy"
    noise_at: ClassVar[tuple[str, ...]] = ()
    sums: ClassVar[bool] = False

    def check(self) -> None:
        """There is a reference set, which is nobody's."""
        self._set = _Reference(self.config, self.options)
        super().check()

    @property
    def reference(self) -> str:  # type: ignore[override]
        """Return the digest of the reference set."""
        return self._set.digest

    def serves(self, about: Introduction, others: Iterable[Introduction]) -> None:
        """Refuse a client whose network cannot read the reference set."""
        self._set.check(about)

    def recipe(self, number: int) -> Recipe:
        """Align; what is scored decides whether clients keep what they trained."""
        private = "copy" if self.options.score == "personal" else "none"
        return replace(super().recipe(number), private=private, method=self._set.method(number))

    def round(self, turn: Turn) -> Exchanges[None]:
        """Bring the reference set, train."""
        there = turn.cohort
        if self._set.eta(turn.number) > 0:
            there = yield from self._set.send(there)
        wanted = replace(self.training(turn, there), failed=self._set.failed)
        self.learn((yield from train(wanted)))
