"""FedHeNN: clients with different networks learn similar representations of the same inputs.

Makhija, Han, Ho, Ghosh: Architecture Agnostic Federated Learning for Neural Networks, ICML 2022,
https://arxiv.org/abs/2202.07757, algorithms 1 and 2. X are `n` inputs that all clients may see (the RAD). `A_i`
`(n, d_i)` is the input of the last layer of client i's network for X. With `K_i = k(A_i, A_i)` and `d = 1 - CKA`
(common/cka.py), round t is:

    fedhenn               server:  draw X;  Kbar = sum_j K_j / |K_j|                   over all clients
                          client:  K steps of SGD on  task loss + eta(t) d(K_i, Kbar)  from where it stopped
    fedhenn-homogeneous   client:  K steps of SGD on  task loss + eta(t) d(K_i, K_g)   from the global weights; they
                                                                                       have the kernel matrix K_g
                          server:  weights averaged as in FedAvg

With eta = 0, the first is Local and the second FedAvg. eta(t) = eta t, because early representations are noise.

A client sends a factor of `K_i`, or its centred features if these are narrower, on inputs that are not its own. Its
architecture stays private. The server sends X once; clients know it by its hash. Each round draws some of its rows.

Departures: in the paper, the server has the weights of all clients and computes their representations itself. Here,
each `K_j` is scaled to norm 1 before the sum, because a client with large activations could otherwise dominate it. As
CKA is a cosine, `d` then pulls towards the mean of all CKAs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from hyperbloom.common import alignment
from hyperbloom.common.alignment import LARGEST_REFERENCE, check_factor, widest
from hyperbloom.common.config import NonNegative, Section
from hyperbloom.common.data import DataSpec, read_reference
from hyperbloom.common.errors import ConfigError, RefusedError
from hyperbloom.common.layout import Weights
from hyperbloom.common.methods import Aligned
from hyperbloom.common.models import Adapt
from hyperbloom.common.reasons import Reason
from hyperbloom.common.seeds import derive
from hyperbloom.common.wire.exchanges import ReferenceOrder, ReferenceResult, RepresentOrder, RepresentResult
from hyperbloom.common.wire.orders import Introduction
from hyperbloom.strategies.algorithm import Algorithm, Recipe
from hyperbloom.strategies.exchange import Ask, Client, Exchanges, Update, ask, train
from hyperbloom.strategies.fedavg import FedAvg
from hyperbloom.strategies.turn import Turn


class FedHeNNOptions(Section):
    """Options of FedHeNN, which both strategies share."""

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
    eta: NonNegative = Field(1e-3, description="weight of the alignment in the local loss")
    growth: Literal["linear", "sqrt", "constant"] = Field("linear", description="in round t: eta t, eta sqrt(t), eta")


class FedHeNNHomogeneousOptions(FedHeNNOptions):
    """Options of FedHeNN for one shared architecture, which is averaged."""

    score: Literal["personal", "global"] = Field("personal", description="what each client last trained, or the mean")


@lru_cache(maxsize=2)
def _read(spec: DataSpec, most: int) -> tuple[Weights, str]:
    """Return a reference set and its digest; cached, as checks and runs in one process both need it."""
    inputs = read_reference(spec, most)
    if len(inputs) < 2:
        raise ConfigError(f"options.rad: expected at least 2 inputs in {spec.data}, found {len(inputs)}")
    weights = alignment.reference_weights(inputs)
    return weights, alignment.digest_of(weights)


class _OverReference(Algorithm):
    """What both strategies share: the reference set, which clients need and their networks must read."""

    options: FedHeNNOptions

    def check(self) -> None:
        """Refuse to start without a reference set, or with the clients' own data set as one."""
        rad, data = self.options.rad, self.config.data
        if rad is None:
            raise ConfigError(
                "options.rad: expected a public or synthetic set of inputs on which networks are compared, found none; "
                "such as --set rad=public.npz"
            )
        if Adapt.parse(self.config.adapt).kind == "head":
            raise ConfigError("adapt: expected more than head, as what the frozen layers see cannot be aligned")
        if rad == data.name:
            raise ConfigError(
                f"options.rad: {rad} is what the clients share (data.name); the inputs on which networks "
                "are compared are seen by all, so name a set that is nobody's"
            )
        self._spec = DataSpec(rad, Path(data.root) if data.root else None, seed=self.config.seed)
        self._holding: dict[int, bool] = {}  # by row, whether a client has the set, where we know better than its word
        super().check()

    @property
    def inputs(self) -> Weights:
        """Return the inputs `(n, *shape)` as they travel. Raise a DataError or ConfigError if they cannot be read."""
        return _read(self._spec, self.options.rad_size)[0]

    @property
    def reference(self) -> str:  # type: ignore[override]
        """Return the digest by which clients know the set."""
        return _read(self._spec, self.options.rad_size)[1]

    @property
    def rows(self) -> int:
        return min(self.options.rows, self.inputs.layout.shapes[0][1][0])

    def serves(self, about: Introduction, others: Iterable[Introduction]) -> None:
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
        """Return the seed that decides the inputs of round `number`."""
        return derive(self.config.seed, "reference", number)

    def method(self, number: int) -> Aligned:
        return Aligned(eta=self.eta(number), reference=self.reference, rows=self.rows, draw=self.draw(number))

    def send(self, clients: Sequence[Client]) -> Exchanges[list[Client]]:
        """Send the set to those of `clients` that lack it; return all of them that have it afterwards."""
        lacking = [client for client in clients if not self._has(client)]
        if lacking:
            order = ReferenceOrder(self.reference, self.inputs)
            wanted: Ask[ReferenceResult] = Ask(
                lacking, lambda some: [order] * len(some), size=self.inputs.layout.numel, quorum=False
            )
            self._holding |= {client.row: True for client, _ in (yield from ask(wanted))}
        return [client for client in clients if self._has(client)]

    def join(self, client: Client, first: bool) -> None:
        """Take the word of a client that comes back: its disk may be a new one."""
        super().join(client, first)
        self._holding.pop(client.row, None)

    def _has(self, client: Client) -> bool:
        return self._holding.get(client.row, bool(client.about.has_reference))

    def failed(self, client: Client, reason: Reason) -> None:
        """Remember that a client has lost the set, so that it is sent again."""
        if reason is Reason.LACKS_REFERENCE:
            self._holding[client.row] = False


class FedHeNN(_OverReference):
    """FedHeNN: networks of any architecture, aligned in their representations of common inputs."""

    options: FedHeNNOptions
    private = "all"
    reply = "nothing"
    own_models = "may"
    _target: Tensor | None = None  # factor of this round's mean kernel matrix

    def weights(self, clients: Sequence[Client]) -> None:
        """Send no weights: networks stay on the clients."""

    def learn(self, updates: Sequence[Update]) -> None:
        """Ignore updates: the server has no model."""

    def recipe(self, number: int) -> Recipe:
        """Align with the mean kernel; without one, train as in Local."""
        if self._target is None:
            return super().recipe(number)
        target = alignment.factor_weights(self._target)
        return replace(super().recipe(number), method=self.method(number), resemble=target)

    def round(self, turn: Turn) -> Exchanges[None]:
        """Send the reference set, collect kernels, train."""
        self._target, there = None, list(turn.cohort)
        if self.eta(turn.number) > 0:
            factors = yield from self._represent(turn, (yield from self.send(turn.candidates)))
            if factors:
                self._target = alignment.mean_factor([*factors.values()], widest(self.rows))
            there = [client for client in there if client.row in factors]
        # Orders carry the mean kernel's factor.
        size = 0 if self._target is None else self.rows * widest(self.rows)
        yield from train(replace(turn.training(there), size=size, failed=self.failed))

    def _represent(self, turn: Turn, clients: Sequence[Client]) -> Exchanges[Mapping[int, Tensor]]:
        """Ask clients for the kernels of this round's inputs; return factors `(rows, width)` by row."""
        rows = self.rows
        order = RepresentOrder(turn.scope, turn.target, self.reference, rows, self.draw(turn.number))
        factors: dict[int, Tensor] = {}

        def check(client: Client, result: RepresentResult) -> None:
            factors[client.row] = check_factor(result.factor, rows)

        wanted = Ask(clients, lambda some: [order] * len(some), check, size=rows * widest(rows), failed=self.failed)
        return {client.row: factors[client.row] for client, _ in (yield from ask(wanted))}


class FedHeNNHomogeneous(_OverReference, FedAvg):
    """FedAvg whose clients stay aligned with the global model from which they start."""

    options: FedHeNNHomogeneousOptions
    private = "copy"
    noise_at = ()
    sums = False

    def recipe(self, number: int) -> Recipe:
        """Align; clients keep what they trained if it is to be scored."""
        private = "copy" if self.options.score == "personal" else "none"
        return replace(super().recipe(number), private=private, method=self.method(number))

    def round(self, turn: Turn) -> Exchanges[None]:
        """Send the reference set, then train."""
        there = turn.cohort
        if self.eta(turn.number) > 0:
            there = yield from self.send(there)
        wanted = replace(turn.training(there), failed=self.failed)
        self.learn((yield from train(wanted)))
