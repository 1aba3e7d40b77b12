"""FedHeNN: clients with networks of their own that learn to see the same inputs as alike or unlike.

Makhija, Han, Ho, Ghosh: Architecture Agnostic Federated Learning for Neural Networks, ICML 2022,
https://arxiv.org/abs/2202.07757, algorithms 1 and 2. With `A_i` `(n, d_i)` what enters the last layer of client i's
network for `n` inputs X that everybody may see (the RAD), `K_i = k(A_i, A_i)` and `d = 1 - CKA` (common/cka.py), round
t is:

    heterogeneous    server:  draw X;  Kbar = sum_j w_j K_j                       over all clients
                     client:  K steps of SGD on  task loss + eta(t) d(K_i, Kbar)  each goes on from where it stopped
    homogeneous      client:  K steps of SGD on  task loss + eta(t) d(K_i, K_g)   from the global weights, whose K_g is
                     server:  weights averaged as in FedAvg

With eta = 0 the one is Local and the other FedAvg. eta(t) = eta t: early representations are noise.

What leaves a client: a factor of `K_i`, its centred features if these are narrow, of inputs that are not its own. The
architecture stays there. The server names X; it is sent once and known by its hash, a round draws some rows of it.

Departures: in the paper the server has all clients' weights and computes what they make of X. And each `K_j` is scaled
to a norm of 1 before it is added (`normalise: false` for the paper's sum): a client with large activations would drown
the others, by design or by malice. As CKA is a cosine, `d` then pulls towards the weighted mean of the CKA with each.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from flwr.app import Message
from pydantic import Field
from torch import Tensor

from hyperbloom.common.alignment import (
    LARGEST_REFERENCE,
    MISSING,
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
from hyperbloom.common.messages import (
    Greeting,
    Introduction,
    ReferenceOrder,
    ReferenceResult,
    RepresentOrder,
    RepresentResult,
)
from hyperbloom.common.methods import Aligned
from hyperbloom.common.seeds import derive
from hyperbloom.strategies.fedavg import FedAvg
from hyperbloom.strategies.personalised import ClientUpdate, Leg, PersonalisedStrategy
from hyperbloom.strategies.roster import Client

__all__ = ["FedHeNN", "FedHeNNHomogeneous", "FedHeNNOptions"]


class FedHeNNOptions(Section):
    """Options of both variants."""

    rad: str | None = Field(
        None,
        description="public or synthetic inputs that all clients may see: a data set's name, an .npz (its x "
        "suffices), a folder or package.module:function; read on the server, labels unused",
    )
    variant: Literal["heterogeneous", "homogeneous"] = Field(
        "heterogeneous", description="each client its own network, nothing averaged; or one network, averaged"
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
    normalise: bool = Field(True, description="heterogeneous: kernels of one size before they are added")
    weights: dict[str, Share] = Field(
        {}, description="heterogeneous: weight of a client's kernel in the mean by its name; others have 1"
    )
    peers: Literal["all", "cohort"] = Field(
        "all", description="heterogeneous: whose kernels are added, all clients' as in the paper or the cohort's"
    )
    score: Literal["personal", "global"] = Field(
        "personal", description="homogeneous: score the weights as each client last trained them, or the average"
    )


class _Alignment(PersonalisedStrategy):
    """What both variants share: the reference set, who has it, and how strongly a round aligns."""

    options_type: ClassVar[type[Section]] = FedHeNNOptions
    options: FedHeNNOptions

    @classmethod
    def for_run(cls, config: RunConfig) -> type[PersonalisedStrategy]:
        """The variant decides."""
        return FedHeNNHomogeneous if config.options.get("variant") == "homogeneous" else FedHeNN

    def check_config(self) -> None:
        """Read the reference set, of which the local method speaks."""
        self._holding: set[int] = set()  # rows of the clients that have taken the reference set
        self._doubted: set[int] = set()  # of those that have lost it since they said that they have it
        self._heaviest = 0  # numbers in a message of the leg that comes
        self._round = 1
        self.target: Tensor | None = None
        if self.options.rad is None:
            raise ConfigError(
                "options.rad: expected a public or synthetic set of inputs on which networks are compared, found none; "
                "such as --set rad=public.npz"
            )
        if self.options.rad == self.config.data.name:
            raise ConfigError(
                f"options.rad: {self.options.rad} is what the clients share (data.name); the inputs on which networks "
                "are compared are seen by all, so name a set that is nobody's"
            )
        root = Path(self.config.data.root) if self.config.data.root else None
        inputs = read_reference(DataSpec(self.options.rad, root, seed=self.config.seed), self.options.rad_size)
        if len(inputs) < 2:
            raise ConfigError(f"options.rad: expected at least 2 inputs in {self.options.rad}, found {len(inputs)}")
        self.input_shape = tuple(inputs.shape[1:])
        self.rows = min(self.options.rows, len(inputs))
        self.reference = reference_weights(inputs)
        self.digest = digest_of(self.reference)
        super().check_config()

    def greeting(self) -> Greeting:
        """Ask too whether the reference set is there already."""
        return replace(super().greeting(), reference=self.digest)

    def check_newcomer(self, about: Introduction) -> None:
        """Refuse a client whose network cannot read the reference set."""
        if about.input_shape != self.input_shape:
            raise RefusedError(
                f"expected inputs of shape {self.input_shape}, as those on which this run compares networks, found "
                f"{about.input_shape}"
            )
        super().check_newcomer(about)

    def eta(self) -> float:
        """Return the weight of the alignment in this round."""
        growth = {"linear": 1.0, "sqrt": 0.5, "constant": 0.0}[self.options.growth]
        return self.options.eta * float(self._round**growth)

    def method(self) -> Aligned | None:
        """Align, on the rows that this round draws."""
        return Aligned(
            eta=self.eta(),
            kernel=self.options.kernel,
            bandwidth=self.options.bandwidth,
            reference=self.digest,
            rows=self.rows,
            draw=self._draw(),
        )

    def train_orders(self, server_round: int, clients: Sequence[Client]) -> list[Message]:
        """Order some clients to train, with this round's eta and rows."""
        self._round = server_round
        return super().train_orders(server_round, clients)

    def largest(self) -> int:
        """Nor is the reference set, or what is to be resembled, small."""
        return max(super().largest(), self._heaviest)

    def _draw(self) -> int:
        return derive(self.config.seed, "reference", self._round)

    def _sending(self, server_round: int, clients: Sequence[Client]) -> Iterator[Leg]:
        """Yield a leg that brings the reference set to those of `clients` who lack it, if there are any."""
        lacking = [client for client in clients if not self._holds(client)]
        if not lacking:
            return
        order = ReferenceOrder(self.digest, self.reference)

        def take(replies: Iterable[Message]) -> None:
            taken = {client.row for client, _ in self.collect(replies, ReferenceResult, quorum=False)}
            self._holding |= taken
            self._doubted -= taken

        self._heaviest = self.reference.layout.numel
        yield Leg(lacking, lambda some: self.post(server_round, [(client, order) for client in some]), take)
        self._heaviest = 0

    def _holds(self, client: Client) -> bool:
        told = bool(client.about.has_reference) and client.row not in self._doubted
        return told or client.row in self._holding

    def _holders(self, clients: Sequence[Client]) -> list[Client]:
        return [client for client in clients if self._holds(client)]

    def accept(self, reply: Message) -> ClientUpdate | None:
        """As always; who has lost the reference set is sent it again."""
        update = super().accept(reply)
        if update is None:
            self._forget_lost()
        return update

    def _forget_lost(self) -> None:
        lost = {name for name, reason in self.round.refused.items() if MISSING in reason}
        failed = {client.row for client in self.roster if client.client_id in lost}
        self._holding -= failed
        self._doubted |= failed


class FedHeNN(_Alignment):
    """FedHeNN: networks of any architecture, aligned in what they make of inputs that everybody may see."""

    private: ClassVar[str] = "all"
    reply: ClassVar[str] = "nothing"
    own_models: ClassVar[Literal["no", "may", "must"]] = "may"

    def check_config(self) -> None:
        """There is nothing global to score."""
        super().check_config()
        if self.options.score != "personal":
            raise ConfigError("options.score: expected personal with variant=heterogeneous, which has no global model")

    def weights_for(self, clients: Sequence[Client]) -> None:
        """Networks stay where they are."""

    def update(self, updates: Sequence[ClientUpdate]) -> None:
        """Nothing is learned on the server."""

    def method(self) -> Aligned | None:
        """Train as in Local where there is nothing to align with."""
        return super().method() if self.target is not None else None

    def training(self, server_round: int) -> dict[str, Any]:
        """Say too what the representations are to resemble."""
        target = None if self.target is None else factor_weights(self.target)
        return super().training(server_round) | {"target": target}

    def legs(self, server_round: int, cohort: Sequence[Client]) -> Iterator[Leg]:
        """Bring the reference set, collect kernels, train."""
        self._round, self.target, there = server_round, None, list(cohort)
        if self.eta() > 0:
            peers = self.candidates() if self.options.peers == "all" else there
            yield from self._sending(server_round, peers)
            factors: dict[int, Tensor] = {}
            self._heaviest = self.rows * widest(self.rows)
            yield Leg(
                self._holders(peers),
                partial(self.represent_orders, server_round),
                lambda replies: factors.update(self.take_representations(replies)),
            )
            self.target = self._mean({client.row: client.client_id for client in peers}, factors)
            there = [client for client in cohort if client.row in factors]
        yield from super().legs(server_round, there)
        self._heaviest = 0

    def represent_orders(self, server_round: int, clients: Sequence[Client]) -> list[Message]:
        """Ask some clients what their networks make of this round's rows."""
        order = RepresentOrder(
            **self._common(server_round), weights=None, reference=self.digest, rows=self.rows, draw=self._draw()
        )
        return self.post(server_round, [(client, order) for client in clients])

    def take_representations(self, replies: Iterable[Message]) -> Mapping[int, Tensor]:
        """Return the factors of kernel matrices that have arrived and can be believed, by client's row."""
        factors: dict[int, Tensor] = {}

        def check(client: Client, result: RepresentResult) -> None:
            factors[client.row] = check_factor(result.factor, self.rows)

        accepted = self.collect(replies, RepresentResult, check)
        self._forget_lost()
        return {client.row: factors[client.row] for client, _ in accepted}

    def _mean(self, names: Mapping[int, str], factors: Mapping[int, Tensor]) -> Tensor | None:
        weights = [self.options.weights.get(names[row], 1.0) for row in factors]
        if not any(weights):
            return None
        options = self.options
        return mean_factor(
            list(factors.values()), weights, options.kernel, options.bandwidth, options.normalise, widest(self.rows)
        )


class FedHeNNHomogeneous(_Alignment, FedAvg):
    """FedAvg whose clients stay aligned with the global model that they start from."""

    private: ClassVar[str] = "copy"
    noise_at: ClassVar[tuple[str, ...]] = ()
    sums: ClassVar[bool] = False

    def check_config(self) -> None:
        """Options of the other variant would do nothing."""
        super().check_config()
        if self.options.weights:
            raise ConfigError("options.weights: expected none with variant=homogeneous, which averages by examples")

    def legs(self, server_round: int, cohort: Sequence[Client]) -> Iterator[Leg]:
        """Bring the reference set, train."""
        self._round, there = server_round, cohort
        if self.eta() > 0:
            yield from self._sending(server_round, cohort)
            there = self._holders(cohort)
        yield from super().legs(server_round, there)

    def _common(self, server_round: int) -> dict[str, Any]:
        """What is scored decides whether clients keep what they trained."""
        private = "copy" if self.options.score == "personal" else "none"
        return super()._common(server_round) | {"private": private}
