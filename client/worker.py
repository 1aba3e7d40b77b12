"""One client's work: its data, its networks, its personal part. No Flower in here."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import nn

from hyperbloom import __version__
from hyperbloom.client import encoding, many, secure_aggregation
from hyperbloom.client.alignment import answer_representations, keep_reference, reference_rows, with_reference
from hyperbloom.client.distillation import distil
from hyperbloom.client.feedback import encode_with_feedback
from hyperbloom.client.graphs import OwnNetwork, describe, own_graph, refine, tensors_of
from hyperbloom.client.ledger import Releases
from hyperbloom.client.methods import trainer
from hyperbloom.client.settings import ClientSettings, pick_device
from hyperbloom.client.state import ClientState, FileState, Moment, Scored
from hyperbloom.client.training import Flat, FlatPart, evaluate, has_running_norms, settle_norms
from hyperbloom.common.compression import Codec
from hyperbloom.common.config import MOST_STEPS
from hyperbloom.common.data import load_client_data
from hyperbloom.common.errors import ConfigError, HyperbloomError, ModelError, WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import (
    PRIVATE,
    REPLIES,
    BackpropOrder,
    BackpropResult,
    ConfirmOrder,
    ConfirmResult,
    DescribeOrder,
    DescribeResult,
    ErrorsOrder,
    ErrorsResult,
    EvaluateOrder,
    EvaluateResult,
    FitOrder,
    FitResult,
    Introduction,
    KeysOrder,
    KeysResult,
    MaskedOrder,
    MaskedResult,
    MomentsOrder,
    MomentsResult,
    ReferenceOrder,
    ReferenceResult,
    RepresentOrder,
    RepresentResult,
    SharesOrder,
    SharesResult,
    SplitScore,
    TrainOrder,
    TrainResult,
    TryOrder,
    UnmaskOrder,
    UnmaskResult,
    Weights,
)
from hyperbloom.common.models import HEAD, OWN, ModelSpec, body_layout, build, build_own, full_layout, head_layout
from hyperbloom.common.privacy import release
from hyperbloom.common.seeds import derive

__all__ = ["Worker", "worker_for"]

Order = TrainOrder | EvaluateOrder | RepresentOrder

log = logging.getLogger("hyperbloom.client")

CHECKPOINTS = 2
"""That a server keeps, and may go back to."""

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)

LOADED_NETWORKS = 32
"""Own models, each with its hypernetwork, that stay in the memory of one process."""

LOADED_WORKERS = 256
"""Virtual clients of one process whose data stay loaded; those beyond are read again when their turn comes."""


@dataclass
class _Network:
    """A target network whose parameters live in a shared and a personal vector; all workers of a process use it.

    Attributes:
        personal: parameters of the module; or, in an order for a copy, a model beside it.
        holds: whose personal part is in memory: the worker, the run, the state of the file that it agrees with, and
            the moments to which the server had gone back by then.
        head: names of the parameters of the prediction head.
    """

    module: nn.Module
    shared: FlatPart
    personal: Flat
    holds: tuple["Worker", str, FileState, tuple[int, ...]] | None = None
    head: tuple[str, ...] = ()


class Worker:
    """Holds what a client loads once, and answers the server's orders."""

    def __init__(self, settings: ClientSettings) -> None:
        """Load the data onto the device; DataError, ConfigError or ModelError if that cannot be done."""
        self.settings = settings
        self.state = ClientState(settings.folder)
        self._releases = Releases.of(settings)
        secure_aggregation.identity_of(settings)  # says now what is wrong with the files
        self.device = pick_device(settings.device)
        data = load_client_data(settings.data)
        self.num_classes, self.input_shape = data.num_classes, data.input_shape
        self.class_shares, self.scaling = data.class_shares, data.scaling
        self.train_data, self.val_data, self.test_data = (
            part.to(self.device) for part in (data.train, data.val, data.test)
        )
        self.own: ModelSpec | None = None
        if settings.model is not None:
            self.own = ModelSpec(settings.model, settings.size, self.input_shape, self.num_classes)
            self._try_own(self.own)

    def _try_own(self, own: ModelSpec) -> None:
        """Tell now what is wrong with the own model: an error if it cannot run, a warning if it has no graph."""
        with torch.random.fork_rng(devices=[]):
            build_own(own)
        try:
            own_graph(own)
        except ModelError as error:
            log.warning("strategies that read the own model's graph (ghn) cannot use it: %s", _reason(error))

    def introduce(
        self, asks: str | None = None, norms: str | None = None, reference: str | None = None
    ) -> Introduction:
        """Say who this client is and what it can do, and of its own model what the server asks and the user allows.

        Raises:
            RefusedError: the server chooses the model of all clients, and this one has its own.
        """
        with self._private():
            types, graph = describe(self.own, self.settings.disclose, asks, norms)
        disclosed = self.settings.disclose_class_shares
        return Introduction(
            client_id=self.settings.client_id,
            token=self.state.token(),
            version=__version__,
            size=self.settings.size,
            input_shape=self.input_shape,
            num_classes=self.num_classes,
            train_examples=len(self.train_data),
            val_examples=len(self.val_data),
            test_examples=len(self.test_data),
            class_shares=tuple(self.class_shares.double().tolist()) if disclosed else (),
            types=types,
            graph=graph,
            has_reference=None if reference is None else self.state.has_reference(reference),
            divisor=self.scaling.divisor,
            mean=self.scaling.mean,
            std=self.scaling.std,
        )

    def keep_reference(self, order: ReferenceOrder) -> ReferenceResult:
        """Keep the inputs on which networks are compared; WireError if they do not fit this client."""
        return keep_reference(self.state, order, self.input_shape)

    def represent(self, order: RepresentOrder) -> RepresentResult:
        """Say what this client's network makes of a round's reference inputs.

        Raises:
            WireError: the order does not fit this client.
        """
        self._insist()
        inputs = reference_rows(self.state, order.reference, order.rows, order.draw, self.device)
        network = self._load(order)
        with self._private():
            return answer_representations(network.module, inputs)

    def train(self, order: TrainOrder) -> TrainResult:
        """Train as ordered; what is private is on the disk before the result leaves.

        Raises:
            WireError: the order does not fit this client.
        """
        start = time.perf_counter()
        with _memory():
            network, own = self.prepare(order)
            with self._private():
                loss = trainer(order)(network.module, network.shared, network.personal, self.train_data, own)
            return self.conclude(order, network, loss, time.perf_counter() - start)

    def prepare(self, order: TrainOrder) -> tuple[_Network, TrainOrder]:
        """Return the network with everything in its place, and the order with a seed of this client and round.

        The network is that of all clients of the process: what is in it stays until the next one prepares.

        Raises:
            WireError: the order does not fit this client.
        """
        steps = (order.steps, order.fit_steps) if isinstance(order, FitOrder) else (order.steps,)
        if order.reply not in REPLIES or order.steps < 1 or max(steps) > MOST_STEPS or order.batch_size < 1:
            raise WireError(
                f"order: expected reply in {REPLIES} and 1 to {MOST_STEPS} steps, found {order.reply!r}, {steps} steps"
            )
        _codec(order)  # refused before any work is done, as is a method
        trainer(order)
        self._check_privacy(order)
        network = self._load(order)
        network.holds = None  # until what it learns is on the disk
        # Client and round are mixed in here: equal seeds on all clients would couple their batches.
        own = replace(order, seed=derive(order.seed, self.settings.client_id, order.round))
        return network, with_reference(self.state, own, self.device)

    def _check_privacy(self, order: TrainOrder) -> None:
        wanted = (order.dp_clip, order.dp_noise)
        if wanted != (None, None) and not all(value is not None and value > 0 for value in wanted):
            raise WireError(f"order: expected dp_clip and dp_noise above 0, found {wanted}")
        if order.reply != "nothing" or isinstance(order, FitOrder):
            noise = order.dp_noise if not isinstance(order, FitOrder) else None
            self._insist(noise, masked=isinstance(order, MaskedOrder))

    def _insist(self, noise: float | None = None, masked: bool = False) -> None:
        """Let nothing made of training examples leave but as this client's user wants, and as often.

        Args:
            noise: with which it leaves, in units of its norm.
            masked: whether it is seen in a sum alone.
        """
        if not masked:
            self._insist_on_company("a change by itself", 0)
        least = self.settings.min_noise
        if least is not None and (noise or 0.0) < least:
            raise HyperbloomError(
                f"the client sends nothing with noise below {least:g} times its norm (--min-noise), found "
                f"{noise or 0:g}"
            )
        self._releases.spend("changes")

    def _insist_on_company(self, found: str, clients: int) -> None:
        """Let no change be in a sum of fewer clients than this one's user wants; 0 is no sum."""
        fewest = self.settings.min_masked
        if fewest is not None and clients < fewest:
            raise HyperbloomError(
                f"the client sends changes in sums of at least {fewest} clients alone (--min-masked), found {found}"
            )

    def _count_score(self, order: EvaluateOrder, module: nn.Module) -> None:
        """Count a score that tells of training examples: their labels can be read off the loss of a refined model."""
        trained = order.private != "none" or bool(order.refine_epochs) or order.distil_temperature is not None
        if trained or has_running_norms(module):
            self._releases.spend("scores")

    def conclude(self, order: TrainOrder, network: _Network, loss: float, seconds: float) -> TrainResult:
        """Keep what is private of the trained network, and return what the order asks for.

        Raises:
            HyperbloomError: the training diverged.
        """
        network.holds = None  # where several train at once, the one before has concluded on it
        noisy, masked = order.dp_noise is not None, isinstance(order, MaskedOrder)
        # The loss is of training examples.
        hidden = noisy or bool(order.quiet) or self._releases.bounded
        if not math.isfinite(loss) or not bool(network.personal.values.isfinite().all()):
            shown = "" if hidden else f" (loss {loss})"
            raise HyperbloomError(f"training diverged{shown}; lower local.learning_rate")
        if network.personal.layout.numel:
            self.state.save_personal(order.run_id, network.personal, _moment(order))
            network.holds = self._held(order)
        trained = network.shared.values.cpu()
        reply, encoded = None, None
        if order.reply != "nothing" and order.weights is not None:
            layout, codec = network.shared.layout, _codec(order)
            sent = order.weights.part(layout)
            if order.dp_clip is not None and order.dp_noise is not None:
                # Nothing below sees the change itself.
                trained = sent + release(trained - sent, order.dp_clip, order.dp_noise)
            if codec is None:
                reply = Weights(layout, trained - sent if order.reply == "delta" else trained.clone())
            else:
                bounded = order.reply == "delta"
                moment = _moment(order)
                encoded = encode_with_feedback(codec, self.state, order.run_id, layout, trained - sent, bounded, moment)
        told = not hidden or (masked and not noisy)  # then it is in the sum alone
        return TrainResult(loss if told else 0.0, seconds, reply, encoded)

    def make_keys(self, order: KeysOrder) -> KeysResult:
        """Begin a round of secure aggregation, of which this client keeps nothing on the disk."""
        return secure_aggregation.begin(self.settings, order)

    def deal_shares(self, order: SharesOrder) -> SharesResult:
        """Deal shares of the round's secrets; WireError if the order would not keep them."""
        # As many as the threshold stay to the end, or nobody reveals a share.
        self._insist_on_company(f"sums of {order.threshold} or more", order.threshold)
        with secure_aggregation.current(self.settings, order) as secure:
            return secure.share(order)

    def train_masked(self, order: MaskedOrder) -> MaskedResult:
        """Train as ordered, and return the change masked.

        Raises:
            WireError: the order does not fit this client, or this point of the round.
        """
        with secure_aggregation.current(self.settings, order) as secure:
            fewest = secure.expect(order)
            self._insist_on_company(f"a part that {fewest} or more train", fewest)
            return secure.mask(order, self.train(order), len(self.train_data))

    def confirm(self, order: ConfirmOrder) -> ConfirmResult:
        """Sign whose changes are in the sum, and all that this client was told; WireError if they are too few."""
        with secure_aggregation.current(self.settings, order) as secure:
            return secure.confirm(order)

    def unmask(self, order: UnmaskOrder) -> UnmaskResult:
        """Reveal what takes the masks off a sum; WireError if that would take them off a summand."""
        with secure_aggregation.current(self.settings, order) as secure:
            return secure.unmask(order)

    def describe(self, order: DescribeOrder) -> DescribeResult:
        """Return what the ordered encoder makes of the training examples; labels are not looked at."""
        self._insist()
        return encoding.describe(order, self.train_data.inputs, self.state)

    def backprop(self, order: BackpropOrder) -> BackpropResult:
        """Take a gradient with respect to the last descriptor back to the encoder that made it."""
        self._insist()
        return encoding.backprop(order, self.train_data.inputs, self.state)

    def fit(self, order: FitOrder) -> FitResult:
        """Train as ordered, and fit the encoder to the descriptor that the order brings."""
        result = self.train(order)
        gamma, distance = encoding.fit(order, self.train_data.inputs)
        return FitResult(**vars(result), version=order.version, distance=distance, gamma=gamma)

    def evaluate(self, order: EvaluateOrder) -> EvaluateResult:
        """Score the ordered weights, with the private part, on validation and test examples."""
        with _memory():
            return self._evaluate(order)

    def _evaluate(self, order: EvaluateOrder) -> EvaluateResult:
        network = self._load(order)
        self._count_score(order, network.module)
        with self._private():
            module = network.module
            settle_norms(module, self.train_data)
            if order.distil_temperature is not None:
                module = distil(module, self._own(), self.train_data, order, self.settings.client_id)
                settle_norms(module, self.train_data)
            elif order.refine_epochs:
                module = refine(module, network.head, self.train_data, order, self.settings.client_id)
            val, test = evaluate(module, self.val_data), evaluate(module, self.test_data)
            self._keep_scored(order, module, test)
        return EvaluateResult(val.correct, val.total, val.loss, test.correct, test.total, test.loss)

    def _keep_scored(self, order: EvaluateOrder, module: nn.Module, test: SplitScore) -> None:
        """Keep a model that is whole on this machine alone, for `flower-client export`; a full disk is no reason."""
        own = self.own if order.model == OWN or order.private == "all" or order.distil_temperature is not None else None
        if own is None and order.private == "none" and not order.refine_epochs and not has_running_norms(module):
            return  # the server can write it
        spec = own or ModelSpec(order.model, self.settings.size, self.input_shape, self.num_classes)
        spec = ModelSpec.choose(spec.name, spec.size, spec.input_shape, spec.num_classes)
        facts = Scored(
            model=spec.name,
            size=spec.size,
            input_shape=spec.input_shape,
            num_classes=spec.num_classes,
            round=order.round,
            private=order.private,
            correct=test.correct,
            total=test.total,
        )
        try:
            self.state.save_scored(order.run_id, tensors_of(module), facts)
        except HyperbloomError as error:
            log.warning("the scored model is not kept: %s", error)

    def try_many(self, order: TryOrder) -> EvaluateResult:
        """Score many models on validation and test examples: each for itself, or the mean of their logits.

        Raises:
            WireError: the order does not bring weights of as many numbers as the network has.
        """
        self._insist_on_a_common_model(order)
        layout = self._network(order).shared.layout
        sent = order.weights
        count = 0 if sent is None else sent.layout.numel // layout.numel
        if sent is None or count < 1 or sent.layout.shapes != (("models", (count, layout.numel)),):
            found = sent and sent.layout.shapes
            raise WireError(f"order: expected models of {layout.numel} weights each, found {found}")
        self._count_score(order, self._network(order).module)

        def models() -> Iterator[nn.Module]:
            for row in sent.values.view(count, layout.numel):
                network = self._load(replace(order, weights=Weights(layout, row)))
                settle_norms(network.module, self.train_data)
                yield network.module

        val, test = (many.score(models(), data, order.together) for data in (self.val_data, self.test_data))
        return EvaluateResult(val.correct, val.total, val.loss, test.correct, test.total, test.loss)

    def moments(self, order: MomentsOrder) -> MomentsResult:
        """Return mean and covariance of what the head of the ordered network sees of the training examples."""
        self._insist()
        self._insist_on_a_common_model(order)
        found = many.moments(many.features(self._load(order).module, self.train_data.inputs)).cpu()
        return MomentsResult(Weights(Layout((("moments", tuple(found.shape)),)), found))

    def errors(self, order: ErrorsOrder) -> ErrorsResult:
        """Return how often each of the ordered classifiers is wrong about the validation examples.

        Raises:
            WireError: the classifiers are not for as many features as there are.
        """
        self._insist_on_a_common_model(order)
        module = self._load(order).module
        self._count_score(order, module)
        seen = many.features(module, self.val_data.inputs).cpu()
        sent = order.classifiers
        if sent is None or len(sent.layout.shapes) != 1 or sent.layout.shapes[0][1][1:] != (seen.shape[1] + 1,):
            found = sent and sent.layout.shapes
            raise WireError(f"order: expected classifiers of {seen.shape[1]} features, found {found}")
        classifiers = sent.values.view(*sent.layout.shapes[0][1])
        return ErrorsResult(many.domain_errors(seen, classifiers, order.sign))

    def _load(self, order: Order) -> _Network:
        """Put the order's weights and this run's personal part into the network."""
        if order.num_classes != self.num_classes:
            raise WireError(f"order: {order.num_classes} classes, but this client's data have {self.num_classes}")
        network = self._network(order)
        if network.shared.layout.numel:
            if order.weights is None:
                raise WireError("order: expected weights, found none")
            expected = network.shared.layout
            if order.private == "body" and len(order.weights.layout.shapes) > len(expected.shapes):
                expected = Layout.of(network.module)
            order.weights.check(expected, torch.float32)
            network.shared.load(order.weights.part(network.shared.layout))
        with self._private():
            if network.personal.layout.numel:
                # The file is the truth: another process may have served this client since (--engine ray).
                wanted = self._held(order)
                if network.holds != wanted:
                    network.holds = None
                    if self.state.load_personal(order.run_id, network.personal, _moment(order)):
                        network.holds = wanted
                    else:
                        self._initialise(order, network)
        if order.private == "copy" and isinstance(order, EvaluateOrder):
            network.shared.load(network.personal.values)
        return network

    def _held(self, order: Order) -> tuple["Worker", str, FileState, tuple[int, ...]]:
        return self, order.run_id, self.state.personal_file(order.run_id), _moment(order).rewound

    def _network(self, order: Order) -> _Network:
        if order.private not in PRIVATE:
            raise WireError(f"order: expected private to be one of {PRIVATE}, found {order.private!r}")
        if order.model == OWN:
            own = self._own()
            if order.private != "none":
                raise WireError(f"order: expected private 'none' for the client's own model, found {order.private!r}")
            # Which weights fit tells all names and shapes, and so does the reason why others do not.
            if order.hypernetwork is None and self.settings.disclose != "graph":
                raise WireError("order: for weights of a model whose graph this client does not disclose")
            with self._private():
                return _own_network(OwnNetwork.ordered(own, order), self.device)
        if order.private == "all" and self.own is not None:  # where nothing travels, the server has no say in it
            return _private_network(self.own, self.device)
        spec = ModelSpec(order.model, self.settings.size, self.input_shape, self.num_classes)
        return _network(spec, order.private, self.device)

    def _insist_on_a_common_model(self, order: Order) -> None:
        """Answer what depends on the sizes of a network's layers for networks alone that the server knows."""
        if self.own is not None and (order.model == OWN or order.private == "all"):
            raise WireError("order: expected a model that the server chose, found the client's own")

    def _own(self) -> ModelSpec:
        if self.own is None:
            raise WireError("order: for the client's own model, but this client has none; join with --model")
        return self.own

    @contextmanager
    def _private(self) -> Iterator[None]:
        """Keep what Python says of a failing own model on this machine: it names modules and shapes."""
        try:
            yield
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            told = isinstance(error, HyperbloomError) and not isinstance(error, ModelError)
            if self.own is None or told:
                raise
            if isinstance(error, ModelError):  # it says all in a line, and has been said at the start
                log.error("the own model cannot be used here: %s", _reason(error))
            else:
                log.exception("the own model %s fails", self.own.name)
            raise HyperbloomError("the client's own model fails; the client's log says how") from None

    def _initialise(self, order: Order, network: _Network) -> None:
        """Give the personal part what the server sent for it or, most often, values from a seed of this client's."""
        wanted = network.personal.layout
        own = self.own is not None and (order.model == OWN or order.private == "all")
        # Not of an own model: whether what was sent fits would tell its names and shapes.
        if not own and order.weights is not None and set(wanted.shapes) <= set(order.weights.layout.shapes):
            network.personal.load(order.weights.part(wanted))
            return
        spec = ModelSpec(order.model, self.settings.size, self.input_shape, self.num_classes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(order.seed, self.settings.client_id, HEAD))
            fresh = dict((build_own(self._own()) if own else build(spec)).named_parameters())
        network.personal.load(wanted.flatten(fresh))


@contextmanager
def _memory() -> Iterator[None]:
    """Say what to do where the memory was not enough, and give it back."""
    try:
        yield
    except OUT_OF_MEMORY as error:
        log.error("out of memory: %s", error)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise HyperbloomError(
            "the client's memory is not enough; lower local.batch_size, or let it join with a smaller --size"
        ) from None


def _reason(error: ModelError) -> str:
    """Return what is wrong, without the list of what would be right."""
    return str(error).partition("; supported: ")[0]


def _moment(order: Order) -> Moment:
    # Whatever a server says, no more versions stay than there are checkpoints.
    return Moment(order.round, (order.resume_points or ())[-CHECKPOINTS:], order.rewound or ())


def _codec(order: TrainOrder) -> Codec | None:
    try:
        return Codec.parse(order.compression or "none")
    except ConfigError as error:
        raise WireError(f"order: {error}") from None


@cache
def _network(spec: ModelSpec, private: str, device: torch.device) -> _Network:
    """Return this process's network of an architecture: every order brings its weights, so clients can share it."""
    module = build(spec).to(device)
    full = full_layout(spec)
    shared = {"head": body_layout(spec), "body": head_layout(spec), "all": Layout(())}.get(private, full)
    personal = Layout(tuple(item for item in full.shapes if item not in shared.shapes))
    head = tuple(name for name, _ in head_layout(spec).shapes)
    if private == "copy":
        part = FlatPart(module, full)
        return _Network(module, part, Flat(full, part.values.clone()), head=head)
    return _Network(module, FlatPart(module, shared), FlatPart(module, personal), head=head)


@lru_cache(LOADED_NETWORKS)
def _own_network(wanted: OwnNetwork, device: torch.device) -> _Network:
    """Return this process's network of an own model, generated or not."""
    module, shared, personal = wanted.make(device)
    return _Network(module, shared, personal, head=wanted.head)


@lru_cache(LOADED_NETWORKS)
def _private_network(spec: ModelSpec, device: torch.device) -> _Network:
    """Return this process's network of an own model of which nothing travels."""
    module = build_own(spec).to(device)
    return _Network(module, FlatPart(module, Layout(())), FlatPart(module, Layout.of(module)))


@lru_cache(LOADED_WORKERS)
def worker_for(settings: ClientSettings) -> Worker:
    """Return this process's worker for these settings, loading the data on first use."""
    return Worker(settings)
