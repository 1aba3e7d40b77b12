"""ODPFL-HN: a personal model on demand, also for clients without labels.

Ohad Amosy, Gal Eyal, Gal Chechik: On-Demand Unlabeled Personalized Federated Learning, 2021,
https://arxiv.org/abs/2111.08356.

    e_i = g({x_i}; gamma)      descriptor of client i's examples, without labels, from the encoder g
    w_i = f(e_i; theta)        weights of client i from the hypernetwork f
    client: trains from w_i and sends delta_i = trained - w_i
    server: (d w_i / d[theta, e_i])^T (-delta_i)    gradients for theta and for e_i, f as it was when it wrote w_i
    client: (d e_i / d gamma)^T (gradient for e_i)  gradient for gamma

With a backbone, g reads the features of x_i that enter the backbone's last layer, and w_i is what a run adapts.

A novel client sends a descriptor and receives weights: two trips, without labels or gradients. Novel clients are the
last `novel` percent. They never train, and their scores stand apart.

Training is `end-to-end`, with three exchanges in a round, or `two-phase` (appendix B.2): first e_i is a learned
embedding as in pFedHN, to which the client fits the encoder; then the encoder is frozen and f continues to learn, while
the earlier f and its embeddings still serve the clients that trained. docs/odpfl.md lists the exchanges.

Departures: a cohort's replies are applied as in pFedHN, and a descriptor gets the gradient that an embedding would get.
Before the first round, the encoder's last layer is scaled once, and Adam trains the encoder, because that layer also
scales gradients; docs/odpfl.md says why.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from hyperbloom.common.config import Positive, Rate
from hyperbloom.common.encoders import ENCODERS, FIT_CLIP, FIT_MOMENTUM, EncoderSpec, descriptor_layout
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.layout import Weights
from hyperbloom.common.metrics import scale_of
from hyperbloom.common.models import backbone_shape
from hyperbloom.common.newcomers import SHARES, Expectation, expect
from hyperbloom.common.wire import exchanges as wire
from hyperbloom.common.wire.orders import TrainOrder, TrainResult
from hyperbloom.strategies.encoder import ServerEncoder
from hyperbloom.strategies.exchange import Ask, Client, Exchanges, Train, ask, draw, train
from hyperbloom.strategies.hypernetworks import Hypernetwork
from hyperbloom.strategies.pfedhn import PFedHN, PFedHNOptions
from hyperbloom.strategies.turn import Evaluation, Turn

CALIBRATION = 64
"""Most clients whose descriptors calibrate a fresh encoder."""


class ODPFLOptions(PFedHNOptions):
    """Options of ODPFL-HN in addition to those of its hypernetwork."""

    mode: Literal["end-to-end", "two-phase"] = Field(
        "end-to-end", description="two-phase: learn embeddings first, the encoder towards them (appendix B.2)"
    )
    learning_rate: Rate = Field(2e-3, description="learning rate of the hypernetwork; pFedHN's code has 0.01")
    personal: Literal["trained", "written"] | None = Field("written", description="written: as newcomers get it")
    encoder: str = Field("deepset", description=f"what describes a client's examples: {', '.join(ENCODERS)}")
    encoder_learning_rate: Rate = Field(1e-4, description="learning rate of the encoder's Adam (end-to-end)")
    fit_steps: Positive = Field(5, description="two-phase: steps in which a client fits the encoder to its embedding")
    fit_rate: Rate = Field(1e-2, description="two-phase: learning rate of these")
    tune: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="two-phase: share of the rounds in phase 2")


class ODPFL(PFedHN):
    """Weights on demand, from an encoder on the client and a hypernetwork on the server (algorithm 1)."""

    options: ODPFLOptions
    asynchronous = False
    noise_at = ()
    encoder: ServerEncoder

    def check(self) -> None:
        """Refuse options that do not work with descriptors from an encoder."""
        super().check()
        options = self.options
        if options.encoder not in ENCODERS:
            raise ConfigError(f"options.encoder: expected {', '.join(sorted(ENCODERS))}, found {options.encoder!r}")
        for key in ("freeze", "personal", "descriptor", "embeddings"):
            if getattr(options, key) != ODPFLOptions.model_fields[key].default:
                raise ConfigError(f"options.{key}: odpfl has no use for {getattr(options, key)!r}; leave it out")
        if options.mode == "two-phase" and self.config.rounds < 2:
            raise ConfigError("rounds: expected at least 2 for mode: two-phase, found 1")
        if options.mode == "two-phase" and self.config.patience:
            raise ConfigError("patience: expected none with mode: two-phase, whose last rounds are for newcomers")

    def make(self, dim: int) -> None:
        """Make hypernetwork and encoder from the run's seed."""
        super().make(dim)
        network = self.setting.spec
        shape = backbone_shape(network) if self.config.backbone else network.input_shape
        spec = EncoderSpec(self.options.encoder, shape, dim)
        self.encoder = ServerEncoder(spec, self.config.seed, self.options.encoder_learning_rate)
        self._original: tuple[Hypernetwork, Tensor] | None = None  # f and embeddings before phase 2
        self._descriptors: dict[int, Tensor] = {}  # by row, from the present encoder
        self._stale = set[int]()  # rows of those to ask again; an evaluation that goes on uses what they said
        self.learner.given = self.options.mode == "end-to-end"

    def join(self, client: Client, first: bool) -> None:
        """Ask a client that comes back for its descriptor again: it may have other examples."""
        super().join(client, first)
        self._stale.add(client.row)

    def round(self, turn: Turn) -> Exchanges[None]:
        """Play three exchanges end to end, one in phase 1, and in phase 2 one after describing new clients."""
        yield from self._calibrate(turn)
        rounds = self.config.rounds
        if self.options.mode == "end-to-end":
            yield from self._round_end_to_end(turn)
        elif turn.number <= max(1, rounds - max(1, round(self.options.tune * rounds))):
            # Train with learned embeddings while each client fits the encoder to its own; average the encoders.
            updates = yield from train(self._fitting(turn, turn.cohort))
            self.learn(updates)
            if updates:
                results = [update.result for update in updates]
                self.encoder.add([each.gamma.values for each in results if isinstance(each, wire.FitResult)])
                self._descriptors = {}
        else:
            self._freeze()
            there = yield from self._described(turn, turn.cohort)
            self.learn((yield from train(turn.training(there))))

    def _round_end_to_end(self, turn: Turn) -> Exchanges[None]:
        """Describe, train, and backpropagate through the encoder; take one step for each network."""
        for client in turn.cohort:  # a client that does not answer now must not count as described
            self._descriptors.pop(client.row, None)
        yield from self._describe(turn, turn.cohort, keep=True)
        described = [client for client in turn.cohort if client.row in self._descriptors]
        updates = yield from train(turn.training(described))
        self.learn(updates)
        gradient = self.learner.gradient
        if not updates or gradient is None:
            return
        gradients = {update.client.row: gradient[update.client.row].cpu() for update in updates}
        changes = yield from self._backpropagate(turn, [update.client for update in updates], gradients)
        if changes:
            self.encoder.step(changes, self.learner.clip)
            self._descriptors = {}  # of the encoder before

    def _calibrate(self, turn: Turn) -> Exchanges[None]:
        """Once per run, give a fresh encoder's descriptors mean 0 and deviation 1 over some clients."""
        if self.encoder.calibrated:
            return
        clients = draw(self.config.seed, 0, CALIBRATION, turn.candidates)
        if self.encoder.lacks_centre:
            yield from self._describe(turn, clients, keep=False)
            if not self._descriptors:  # nobody answered; the next round tries again
                return
            self.encoder.centre(torch.stack(list(self._descriptors.values())))  # of features, as the tail is fresh
            self._descriptors = {}
        yield from self._describe(turn, clients, keep=False)
        self.encoder.calibrated = bool(self._descriptors)
        if len(self._descriptors) > 1:
            self.encoder.scale(torch.stack(list(self._descriptors.values())))
            self._descriptors = {}

    def _freeze(self) -> None:
        """Begin phase 2: keep the models of the clients that trained, and take new descriptors from the encoder."""
        if self._original is None:
            self._original = copy.deepcopy(self.learner.hypernetwork), self.learner.table.weight.detach().clone()
            self.learner.given = True

    def evaluate(self, turn: Turn, clients: Sequence[Client]) -> Exchanges[Evaluation]:
        """Describe clients without an embedding, then score; in phase 2, score both models of clients that trained.

        In phase 2, these clients keep their earlier models. Their validation accuracy with the encoder selects rounds.
        """
        served = yield from self._described(turn, clients)
        scores = yield from turn.score(served)
        if self._original is None:
            return Evaluation(scores)
        known = len(self._original[1])
        trained = [client for client in clients if client.row < known and not self.config.is_novel(client.row)]
        names = {client.client_id for client in trained}
        kept = yield from turn.score(trained, self._originals)
        others = {name: result for name, result in scores.items() if name not in names}
        metric, scale = self.metrics[0], scale_of(self.metrics[0])
        told = [scores[name].val.value(metric) for name in names & scores.keys()]
        values = [value for value in told if value is not None]
        return Evaluation(kept | others, (1, scale.sign * scale.factor * fmean(values)) if values else None)

    def personal(self, clients: Sequence[Client]) -> list[Weights]:
        """Return weights from embeddings in phase 1, otherwise from descriptors."""
        table = self.learner.table.weight.detach().cpu()
        of = {c.row: table[c.row] if self._embedded(c) else self._descriptors[c.row] for c in clients}
        return self.by_head(clients, lambda rows, size: self.learner.write(torch.stack([of[r] for r in rows]), size))

    @torch.no_grad()
    def _originals(self, clients: Sequence[Client]) -> list[Weights]:
        assert self._original is not None
        network, table = self._original
        return self.by_head(clients, lambda rows, size: network.eval()(table[rows], size).cpu())

    def _embedded(self, client: Client) -> bool:
        """Return whether a client's weights come from its own embedding, as in phase 1."""
        return self.options.mode == "two-phase" and self._original is None and not self.config.is_novel(client.row)

    def expectation(self, turn: Turn, clients: Sequence[Client]) -> Exchanges[Expectation]:
        """Let novel clients score what a newcomer can get, just after an evaluation.

        It counts those for which the selecting metric is defined with every share of the written model.
        """
        novel = [c for c in clients if self.config.is_novel(c.row) and c.row in self._descriptors]
        metric, found = self.metrics[0], list[dict[str, tuple[float, float]]]()
        for share in SHARES if novel else ():
            scores = yield from turn.score(novel, partial(self._mixed, share=share))
            pairs = {name: (each.val.value(metric), each.test.value(metric)) for name, each in scores.items()}
            found.append({name: (a, b) for name, (a, b) in pairs.items() if a is not None and b is not None})
        names = [c.client_id for c in novel if all(c.client_id in each for each in found)]
        val, test = ([[each[name][at] for name in names] for each in found] for at in (0, 1))
        return expect(val, test, len(self.descriptors_of_trained()), metric)

    def _mixed(self, clients: Sequence[Client], share: float) -> list[Weights]:
        """Return this share of the weights from each descriptor, and for the rest those of the common model."""
        rows: list[Weights] = []
        commons = {head: self.common(client) for head, client in {self.head_of(c): c for c in clients}.items()}
        for client, weights in zip(clients, self.personal(clients), strict=True):
            common = commons[self.head_of(client)]
            rows.append(replace(weights, values=common.values.lerp(weights.values, share)) if common else weights)
        return rows

    def _described(self, turn: Turn, clients: Sequence[Client]) -> Exchanges[list[Client]]:
        """Describe those of `clients` that need it; return those for which weights can be generated."""
        yield from self._describe(turn, [c for c in clients if not self._has_weights(c)], keep=False)
        return [client for client in clients if self._has_weights(client)]

    def _has_weights(self, client: Client) -> bool:
        return self._embedded(client) or (client.row in self._descriptors and client.row not in self._stale)

    def _describe(self, turn: Turn, clients: Sequence[Client], keep: bool) -> Exchanges[None]:
        """Ask clients for their descriptors. With `keep`, they will also be asked for the encoder's gradient."""
        dim = self.encoder.spec.dim
        order = wire.DescribeOrder(
            run_id=turn.scope.run_id,
            encoder=self.options.encoder,
            dim=dim,
            version=self.encoder.version,
            keep=keep,
            weights=self.encoder.weights,
        )

        def check(client: Client, result: wire.DescribeResult) -> None:
            self.encoder.check_version(result.version)
            result.weights.check(descriptor_layout(dim), self.encoder.gamma.dtype)
            result.check()

        answers = yield from ask(
            Ask(clients, lambda some: [order] * len(some), check, self.encoder.gamma.numel(), quorum=keep)
        )
        for client, result in answers:
            self._descriptors[client.row] = result.weights.values
            self._stale.discard(client.row)
            if not self._embedded(client):  # novel clients too, so that the stored table comes from one encoder
                with torch.no_grad():
                    self.learner.table.weight[client.row] = result.weights.values

    def _backpropagate(
        self, turn: Turn, clients: Sequence[Client], gradients: Mapping[int, Tensor]
    ) -> Exchanges[list[Tensor]]:
        """Send each client the gradient for its descriptor; return its gradients for the encoder, `(Q,)` each."""
        layout = descriptor_layout(self.encoder.spec.dim)

        def orders(some: Sequence[Client]) -> list[wire.BackpropOrder]:
            about = (turn.scope.run_id, self.options.encoder, self.encoder.spec.dim, self.encoder.version)
            return [wire.BackpropOrder(*about, Weights(layout, gradients[client.row])) for client in some]

        def check(client: Client, result: wire.BackpropResult) -> None:
            self.encoder.check_change(result.version, result.weights)

        return [result.weights.values for _, result in (yield from ask(Ask(clients, orders, check)))]

    def _fitting(self, turn: Turn, clients: Sequence[Client]) -> Train:
        wanted, layout = turn.training(clients), descriptor_layout(self.encoder.spec.dim)
        table, options = self.learner.table.weight.detach().cpu(), self.options
        farthest = options.fit_steps * options.fit_rate * FIT_CLIP / (1 - FIT_MOMENTUM)  # that the steps can lead

        def orders(some: Sequence[Client]) -> list[TrainOrder]:
            return [
                wire.FitOrder(
                    **vars(order),
                    fit=wire.Fit(
                        options.encoder,
                        self.encoder.version,
                        self.encoder.weights,
                        Weights(layout, table[client.row]),
                        options.fit_steps,
                        options.fit_rate,
                    ),
                )
                for client, order in zip(some, wanted.orders(some), strict=True)
            ]

        def check(client: Client, result: TrainResult) -> None:
            assert isinstance(result, wire.FitResult)
            self.encoder.check_change(result.version, result.gamma)
            result.gamma.check_norm(farthest)

        return replace(wanted, orders=orders, check=check, size=wanted.size + self.encoder.gamma.numel())

    def descriptors_of_trained(self) -> Tensor:
        """Return the descriptors `(n, k)` of the training clients, as the state holds them after an evaluation."""
        table = self.learner.table.weight.detach()
        clients = (client for _, client in sorted(self.clients.items()))
        return table[[c.row for c in clients if c.row < len(table) and not self.config.is_novel(c.row)]].cpu()

    def state(self) -> dict[str, Tensor]:
        """Return hypernetwork, embeddings and encoder; in phase 2 also the models of the clients that trained."""
        tensors = super().state() | self.encoder.state() | {"calibrated": torch.tensor(self.encoder.calibrated)}
        if self._original is not None:
            network, table = self._original
            tensors |= {f"original.hypernetwork.{name}": x.cpu() for name, x in network.state_dict().items()}
            tensors["original.embeddings"] = table.cpu()
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore everything but the descriptors, which are requested again."""
        super().restore(tensors)
        self.encoder.load(tensors, with_optimizer=True)
        self.encoder.calibrated = bool(tensors.get("calibrated", True))  # which earlier versions did not store
        if "original.embeddings" in tensors:  # of phase 2: the models of the clients that trained
            self._freeze()
            assert self._original is not None
            prefix = "original.hypernetwork."
            network = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
            self._original[0].load_state_dict(network)
            self._original = self._original[0], tensors["original.embeddings"].clone().to(self.device)

    def check_start(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse a hypernetwork without an encoder."""
        if not any(name.startswith("encoder.") for name in tensors):
            raise ConfigError(f"init_from: expected a run of odpfl, found tensors {sorted(tensors)[:3]}")
        super().check_start(tensors)

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from another run's hypernetwork and encoder."""
        super().start_from(tensors)
        self.encoder.load(tensors, with_optimizer=False)
        self.encoder.calibrated = True
