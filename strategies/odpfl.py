"""ODPFL-HN: a personal model on demand, for clients with no label at all.

Ohad Amosy, Gal Eyal, Gal Chechik: On-Demand Unlabeled Personalized Federated Learning, 2021,
https://arxiv.org/abs/2111.08356.

    e_i = g({x_i}; gamma)      descriptor of client i's examples, without labels, from the encoder g
    w_i = f(e_i; theta)        weights of client i from the hypernetwork f
    client: trains from w_i and sends delta_i = trained - w_i
    server: (d w_i / d[theta, e_i])^T (-delta_i)    gradients for theta and for e_i, f as it was when it wrote w_i
    client: (d e_i / d gamma)^T (gradient for e_i)  gradient for gamma

Who never trained sends a descriptor and gets weights: two trips, no label and no gradient. Such clients are the last
`novel` percent; their scores stand apart.

Trips (an order and its reply) in a round of training:

* `end-to-end`: three. Encoder down, descriptor up; weights down, change up; gradient for e down, for gamma up. Not
  fewer: each order needs the reply before it, and the last one cannot wait for the next round, whose cohort is another
  and whose encoder should be better. All three speak of one gamma: they carry its hash, and a reply with another is
  refused.
* `two-phase` (appendix B.2), phase 1: one. e_i is a learned embedding as in pFedHN, and the server knows it beforehand;
  weights, encoder and e_i go down together, the change of the weights and that of the encoder, which the client fits to
  e_i, come up together.
* `two-phase`, phase 2: one. The encoder is frozen, so a client's descriptor is asked for once (a trip of its own, when
  the client is first drawn or scored). f learns on; the f of before, with its embeddings, goes on serving those who
  trained.

An evaluation has one trip for those whom embeddings serve, and two for the others.

Departures: a cohort's replies are applied as in pFedHN (`proximal` or `mean`), and the gradient for a descriptor is the
one that an embedding would get. Before the first round the encoder's last layer is scaled and shifted such that the
descriptors of some clients have mean 0 and deviation 1, as embeddings have: of a fresh encoder they differ by a
hundredth of that, which no hypernetwork can tell apart. One exchange, once in a run; two for `encoder: private`, whose
features are centred first. That layer then multiplies
gradients as well, by a factor that data and architecture decide, and what is left to learn makes them a hundred times
smaller in the end. So the encoder is trained by Adam, whose steps depend on neither.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from flwr.app import Message
from pydantic import Field
from torch import Tensor, nn

from hyperbloom.common.config import Positive, Rate, Section
from hyperbloom.common.encoders import (
    ENCODERS,
    EncoderSpec,
    build_encoder,
    descriptor_layout,
    encoder_layout,
    version_of,
)
from hyperbloom.common.errors import ConfigError, WireError
from hyperbloom.common.messages import (
    LARGEST_NORM,
    BackpropOrder,
    BackpropResult,
    DescribeOrder,
    DescribeResult,
    EvaluateResult,
    FitOrder,
    FitResult,
    TrainResult,
    Weights,
)
from hyperbloom.common.seeds import derive
from hyperbloom.strategies.hypernetworks import Hypernetwork
from hyperbloom.strategies.personalised import ClientUpdate, Evaluation, Leg
from hyperbloom.strategies.pfedhn import PFedHN, PFedHNOptions
from hyperbloom.strategies.roster import Client

__all__ = ["ODPFL", "ODPFLOptions"]

CALIBRATION = 64
"""Clients by whose descriptors a fresh encoder is scaled, at most."""

FARTHEST = 100.0
"""Root mean square of a descriptor beyond which it is refused: sound ones have deviation 1, fresh ones less."""

OUTLIER = 7.5
"""Distance from the median, in medians of such distances, that counts in calibration: 5 deviations of a Gaussian."""

FEWEST = 8

ADAM = "adam.encoder."
"""Prefix of the names under which the state of the encoder's optimiser is kept."""


class ODPFLOptions(PFedHNOptions):
    """Options of ODPFL-HN beside those of its hypernetwork."""

    mode: Literal["end-to-end", "two-phase"] = Field(
        "end-to-end", description="two-phase: learn embeddings first, the encoder towards them (appendix B.2)"
    )
    encoder: str = Field("deepset", description=f"what describes a client's examples: {', '.join(ENCODERS)}")
    encoder_learning_rate: Rate = Field(
        1e-4, description="learning rate of the server's Adam for the encoder (end-to-end)"
    )
    fit_steps: Positive = Field(5, description="two-phase: steps in which a client fits the encoder to its embedding")
    fit_rate: Rate = Field(1e-2, description="two-phase: learning rate of these")
    tune: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="two-phase: share of the rounds in phase 2")


class ODPFL(PFedHN):
    """Weights on demand: from an encoder on the client by way of a hypernetwork on the server (algorithm 1)."""

    options_type: ClassVar[type[Section]] = ODPFLOptions
    options: ODPFLOptions
    asynchronous: ClassVar[bool] = False
    noise_at: ClassVar[tuple[str, ...]] = ()
    spec_of_encoder: EncoderSpec
    gamma: nn.Parameter  # all of the encoder's parameters; the server never runs it
    version: str

    def check_config(self) -> None:
        """Refuse what makes no sense where descriptors come from an encoder."""
        super().check_config()
        options = self.options
        if options.encoder not in ENCODERS:
            raise ConfigError(f"options.encoder: expected one of {', '.join(ENCODERS)}, found {options.encoder!r}")
        for key, expected in (("freeze", (False,)), ("descriptor", ("learned",)), ("embeddings", ("dense",))):
            if getattr(options, key) not in expected:
                raise ConfigError(f"options.{key}: odpfl has no use for {getattr(options, key)!r}; leave it out")
        if options.update not in ("proximal", "mean"):
            raise ConfigError(
                "options.update: expected proximal or mean, as all gradients are taken with the hypernetwork that "
                f"wrote the weights, found {options.update}"
            )
        if options.mode == "two-phase" and self.config.rounds < 2:
            raise ConfigError("rounds: expected at least 2 for mode: two-phase, found 1")

    def build(self) -> None:
        """Make the encoder beside the hypernetwork, from the run's seed."""
        super().build()
        assert self.spec is not None
        self.spec_of_encoder = EncoderSpec(self.options.encoder, self.spec.input_shape, self.learner.table.dim)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.config.seed, "encoder"))
            module = build_encoder(self.spec_of_encoder)
        self._layout = encoder_layout(self.spec_of_encoder)
        self.gamma = nn.Parameter(self._layout.flatten(dict(module.named_parameters())))
        rate = self.options.encoder_learning_rate
        self._optimizer = torch.optim.Adam([self.gamma], lr=rate)
        self._original: tuple[Hypernetwork, Tensor] | None = None  # f and embeddings of before phase 2
        self._original_scores: dict[int, EvaluateResult] = {}  # nothing in them changes any more
        self._tuned: dict[str, float] = {}  # validation accuracy in phase 2 by way of the encoder, by name
        self._gradients: dict[int, Tensor] = {}  # of this round's loss for the descriptors, by row
        self._fitted: dict[int, Tensor] = {}  # changes of the encoder in phase 1, by row
        self._descriptors: dict[int, tuple[str, int | None, Tensor]] = {}  # version and node that it came from
        self._calibrated = False
        self.learner.given = self.options.mode == "end-to-end"
        self.version = version_of(self.gamma)

    @property
    def encoder_weights(self) -> Weights:
        """The encoder's parameters, as they travel."""
        return Weights(self._layout, self.gamma.detach())

    def largest(self) -> int:
        """The encoder may travel with the weights."""
        return super().largest() + self.gamma.numel()

    # ------------------------------------------------------------------ training

    def legs(self, server_round: int, cohort: Sequence[Client]) -> Iterator[Leg]:
        """Three exchanges end to end, one in phase 1; in phase 2 one, after that which describes newcomers."""
        yield from self.calibration(server_round)
        first = max(1, self.config.rounds - max(1, round(self.options.tune * self.config.rounds)))
        self.trained, self._fitted, self._gradients = TrainResult, {}, {}
        if self.options.mode == "end-to-end":
            for client in cohort:  # who does not answer now must not pass for described
                self._descriptors.pop(client.row, None)
            yield self._describe(server_round, cohort, keep=True)
            yield from self._train(server_round, cohort)
            trained = [client for client in cohort if client.row in self._gradients]
            yield Leg(trained, partial(self._ask_back, server_round), self._step)
        elif server_round <= first:
            self.trained = FitResult
            yield Leg(cohort, partial(self._fit_orders, server_round), partial(self.aggregate_train, server_round))
        else:
            self._freeze()
            yield self._describe(server_round, [client for client in cohort if not self._known(client)], keep=False)
            yield from self._train(server_round, cohort)

    def calibration(self, server_round: int) -> Iterator[Leg]:
        """Once, give the descriptors of a fresh encoder mean 0 and deviation 1 over some clients.

        In each dimension; where a bound on the tail matters, by one factor for all: a dimension in which clients hardly
        differ would decide how much noise all of them get.
        """
        if self._calibrated:
            return
        clients = self.roster.draw(0, CALIBRATION, self.candidates())
        views = self._layout.views(self.gamma.detach())
        bounded = "centre" in views  # encoder: private
        if bounded:
            yield self._describe(server_round, clients, keep=False)
            if self._descriptors:
                views["centre"].copy_(self._some_descriptors().mean(0))  # of features, as the tail is fresh
                self._renew()
        yield self._describe(server_round, clients, keep=False)
        self._calibrated = True
        if len(self._descriptors) < 2:  # nothing to tell apart
            return
        descriptors = self._some_descriptors()
        deviation = descriptors.std(0)
        if bounded:
            deviation = deviation.square().mean().sqrt().expand_as(deviation)
        # A dimension in which they hardly differ shall not become one of rounding errors.
        deviation = deviation.clamp_min(max(1e-6, 0.1 * float(deviation.mean())))
        views["tail.weight"].div_(deviation[:, None])
        views["tail.bias"].sub_(descriptors.mean(0)).div_(deviation)
        self._renew()

    def _some_descriptors(self) -> Tensor:
        return without_outliers(torch.stack([descriptor for _, _, descriptor in self._descriptors.values()]))

    def _train(self, server_round: int, cohort: Sequence[Client]) -> Iterator[Leg]:
        """Train those of the cohort that are described."""
        described = [client for client in cohort if self._known(client)]
        yield Leg(described, partial(self.train_orders, server_round), partial(self.aggregate_train, server_round))

    def update(self, updates: Sequence[ClientUpdate]) -> None:
        """One step for the hypernetwork; keep the descriptors' gradients, or average the encoders of phase 1."""
        super().update(updates)
        if updates and self.learner.given and self.learner.gradient is not None:
            self._gradients = {update.client.row: self.learner.gradient[update.client.row] for update in updates}
        if updates and self._fitted:
            changes = torch.stack([self._fitted[update.client.row] for update in updates])
            with torch.no_grad():
                self.gamma.add_(changes.mean(0))
            self._renew()

    def accept(self, reply: Message) -> ClientUpdate | None:
        """In phase 1 also check and keep the change of the encoder, which must be the one that was sent."""
        update = super().accept(reply)
        if update is None or not isinstance(update.result, FitResult):
            return update
        try:
            self._fitted[update.client.row] = self._checked(update.result.version, update.result.gamma)
        except WireError as error:
            self.refuse(update.client.client_id, error)
            return None
        return replace(update, result=replace(update.result, gamma=None))

    def _step(self, replies: Iterator[Message]) -> None:
        """Take the encoder's step on the gradients that come back."""

        def check(client: Client, result: BackpropResult) -> None:
            self._checked(result.version, result.weights)

        gradients = [result.weights.values for _, result in self.collect(replies, BackpropResult, check)]
        if not gradients:
            return
        self.gamma.grad = torch.stack(gradients).sum(0)
        nn.utils.clip_grad_norm_([self.gamma], self.options.clip)
        self._optimizer.step()
        self._renew()

    def _renew(self) -> None:
        """Give the changed encoder its name; descriptors of the one before are of no use."""
        self.version = version_of(self.gamma)
        self._descriptors = {}

    def _freeze(self) -> None:
        """Begin phase 2: keep what serves those who trained, and take descriptors from the encoder from now on."""
        if self._original is None:
            self._original = copy.deepcopy(self.learner.hypernetwork), self.learner.table.weight.detach().clone()
            self.learner.given = True

    # ------------------------------------------------------------------ evaluation

    def evaluation_legs(self, server_round: int, clients: Sequence[Client]) -> Iterator[Leg]:
        """Describe those whom no embedding serves, then score; in phase 2 score both models of those who trained."""
        unknown = [client for client in clients if not self._embedded(client) and not self._known(client)]
        yield self._describe(server_round, unknown, keep=False)
        served = [client for client in clients if self._embedded(client) or self._known(client)]
        orders = partial(self.score_orders, server_round, self._served)
        if self._original is None:
            yield Leg(served, orders, partial(self.aggregate_evaluate, server_round))
            return
        yield Leg(served, orders, self._take_tuned)
        trained = [client for client in clients if self._trained_before(client)]
        unscored = [client for client in trained if client.row not in self._original_scores]
        orders = partial(self.score_orders, server_round, self._originals)
        yield Leg(unscored, orders, self._take_original)
        self.record({c.client_id: self._original_scores[c.row] for c in trained if c.row in self._original_scores})

    def _take_tuned(self, replies: Iterator[Message]) -> None:
        """Record the scores of those whom the encoder serves; of the others what rounds are selected by."""
        for client, result in self.collect(replies, EvaluateResult, self.check_score, quorum=False):
            if self._trained_before(client):
                self._tuned[client.client_id] = 100 * result.score("val").accuracy
            else:
                self.record({client.client_id: result})

    def _take_original(self, replies: Iterator[Message]) -> None:
        for client, result in self.collect(replies, EvaluateResult, self.check_score, quorum=False):
            self._original_scores[client.row] = result

    def evaluation(self, scores: Mapping[str, EvaluateResult]) -> Evaluation:
        """In phase 2 rounds are selected by what the encoder's path gives those who trained."""
        evaluation = super().evaluation(scores)
        tuned = [self._tuned[name] for name in scores if name in self._tuned]
        return replace(evaluation, rank=(1, sum(tuned) / len(tuned))) if self._original and tuned else evaluation

    def _served(self, clients: Sequence[Client]) -> list[Tensor]:
        """Return clients' weights, from embeddings where these are learned, else from descriptors."""
        table = self.learner.table.weight.detach()
        of = {c.row: table[c.row] if self._embedded(c) else self._descriptors[c.row][2] for c in clients}
        return self.by_head(
            clients, lambda rows, size: self.learner.write(torch.stack([of[row] for row in rows]), size)
        )

    @torch.no_grad()
    def _originals(self, clients: Sequence[Client]) -> list[Tensor]:
        """Return the weights from before phase 2."""
        assert self._original is not None
        network, table = self._original
        return self.by_head(clients, lambda rows, size: network.eval()(table[rows], size))

    def _embedded(self, client: Client) -> bool:
        """Return whether it is an embedding of its own that a client's weights come from: in phase 1."""
        return self.options.mode == "two-phase" and self._original is None and not self.is_novel(client)

    def _trained_before(self, client: Client) -> bool:
        """Return whether a client was of the federation before phase 2."""
        return self._original is not None and not self.is_novel(client) and client.row < len(self._original[1])

    # ------------------------------------------------------------------ descriptors

    def _describe(self, server_round: int, clients: Sequence[Client], keep: bool) -> Leg:
        """Ask clients what the encoder makes of their examples; with `keep` they are asked for its gradient later."""
        order = DescribeOrder(
            run_id=self.run_id,
            round=server_round,
            encoder=self.options.encoder,
            dim=self.spec_of_encoder.dim,
            version=self.version,
            keep=keep,
            weights=self.encoder_weights,
        )

        def check(client: Client, result: DescribeResult) -> None:
            self._check_version(result.version)
            result.weights.check(descriptor_layout(self.spec_of_encoder.dim), self.gamma.dtype)
            _check_norm(result.weights.values, FARTHEST * math.sqrt(self.spec_of_encoder.dim))

        def take(replies: Iterator[Message]) -> None:
            for client, result in self.collect(replies, DescribeResult, check, quorum=keep):
                self._descriptors[client.row] = (result.version, client.node_id, result.weights.values)
                if not self._embedded(client):  # novel clients too: whoever reads the state finds all of one encoder
                    with torch.no_grad():
                        self.learner.table.weight[client.row] = result.weights.values

        return Leg(clients, lambda some: self.post(server_round, ((client, order) for client in some)), take)

    def _known(self, client: Client) -> bool:
        """Return whether the present encoder has described a client; one that comes back may have other examples."""
        version, node, _ = self._descriptors.get(client.row, ("", None, None))
        return version == self.version and node == client.node_id

    def _ask_back(self, server_round: int, clients: Sequence[Client]) -> list[Message]:
        """Send each client the gradient for its descriptor."""
        layout = descriptor_layout(self.spec_of_encoder.dim)
        return self.post(
            server_round,
            (
                (
                    client,
                    BackpropOrder(
                        run_id=self.run_id,
                        encoder=self.options.encoder,
                        dim=self.spec_of_encoder.dim,
                        version=self.version,
                        weights=Weights(layout, self._gradients[client.row]),
                    ),
                )
                for client in clients
            ),
        )

    def _fit_orders(self, server_round: int, clients: Sequence[Client]) -> list[Message]:
        """Order some clients to train, and to fit the encoder to their embeddings."""
        table, layout = self.learner.table.weight.detach(), descriptor_layout(self.spec_of_encoder.dim)

        def order(client: Client, weights: Tensor) -> FitOrder:
            return FitOrder(
                **self.training(server_round),
                weights=Weights(self.layout_for(client), weights),
                encoder=self.options.encoder,
                version=self.version,
                gamma=Weights(self._layout, self.gamma.detach()),
                descriptor=Weights(layout, table[client.row]),
                fit_steps=self.options.fit_steps,
                fit_rate=self.options.fit_rate,
            )

        rows = self.weights_for(clients)
        pairs = zip(clients, rows, strict=True)
        return self.post(server_round, ((client, order(client, row)) for client, row in pairs))

    def _checked(self, version: str, weights: Weights | None) -> Tensor:
        """Return a gradient or change of the encoder; WireError if it is none of the one that was sent."""
        self._check_version(version)
        if weights is None:
            raise WireError("expected a change of the encoder, found none")
        weights.check(self._layout, self.gamma.dtype)
        _check_norm(weights.values)
        return weights.values

    def _check_version(self, version: str) -> None:
        if version != self.version:
            raise WireError(f"expected what the encoder {self.version} makes, found {version}; its reply is dropped")

    def descriptors_of_trained(self) -> Tensor:
        """Return the descriptors `(n, k)` of the clients that train, as the state holds them after an evaluation."""
        table = self.learner.table.weight.detach()
        rows = [client.row for client in self.roster if client.row < len(table) and not self.is_novel(client)]
        return table[rows].cpu()

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Tensor]:
        """Hypernetwork, embeddings and encoder; in phase 2 also what serves those who trained."""
        tensors = super().state()
        tensors |= {f"encoder.{name}": value for name, value in self._layout.views(self.gamma.detach()).items()}
        tensors |= {f"{ADAM}{name}": value for name, value in self._optimizer.state.get(self.gamma, {}).items()}
        if self._original is not None:
            network, table = self._original
            tensors |= {f"original.hypernetwork.{name}": value for name, value in network.state_dict().items()}
            tensors["original.embeddings"] = table
        return tensors

    def checkpoint(self) -> dict[str, Tensor]:
        """Also whether the encoder has been scaled."""
        return super().checkpoint() | {"calibrated": torch.tensor(self._calibrated)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take all of it over; descriptors are asked for again."""
        super().restore(tensors)
        self._load_encoder(tensors)
        self._calibrated = bool(tensors["calibrated"])
        moments = {name.removeprefix(ADAM): x.clone() for name, x in tensors.items() if name.startswith(ADAM)}
        if moments:
            self._optimizer.state[self.gamma] = moments
        if "original.embeddings" in tensors:
            self._freeze()
            assert self._original is not None
            prefix = "original.hypernetwork."
            network = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
            self._original[0].load_state_dict(network)
            self._original = self._original[0], tensors["original.embeddings"].clone()

    def check_initial(self, tensors: Mapping[str, Tensor]) -> None:
        """Demand a hypernetwork with an encoder."""
        if not any(name.startswith("encoder.") for name in tensors):
            raise ConfigError(f"init_from: expected a run of odpfl, found tensors {sorted(tensors)[:3]}")
        super().check_initial(tensors)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from another run's hypernetwork and encoder."""
        super().load(tensors)
        self._load_encoder(tensors)
        self._calibrated = True

    def _load_encoder(self, tensors: Mapping[str, Tensor]) -> None:
        prefix = "encoder."
        found = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        if {name: tuple(value.shape) for name, value in found.items()} != dict(self._layout.shapes):
            raise ConfigError(f"options.encoder: expected the encoder of init_from, found {self.options.encoder}")
        with torch.no_grad():
            self.gamma.copy_(self._layout.flatten(found))
        self._renew()


def without_outliers(descriptors: Tensor) -> Tensor:
    """Return descriptors `(n, dim)` with what is far from the rest of a dimension brought to its edge.

    Calibration is done once and stays: one client's lie must not decide by what those of all others are divided. Of
    fewer than `FEWEST` nobody can tell what is far.
    """
    if len(descriptors) < FEWEST:
        return descriptors
    middle = descriptors.quantile(0.5, dim=0)
    spread = (descriptors - middle).abs().quantile(0.5, dim=0)
    reach = OUTLIER * spread.clamp_min(0.1 * float(spread.mean()))
    return descriptors.clamp(middle - reach, middle + reach)


def _check_norm(values: Tensor, most: float = LARGEST_NORM) -> None:
    norm = float(values.double().norm())
    if norm > most:
        raise WireError(f"expected a norm of at most {most:.0e}, found {norm:.1e}")
