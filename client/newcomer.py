"""A newcomer's side of a model on demand: describe the examples, take the weights. No Flower in here.

What is computed from the examples and leaves is the `Description`: the size of model that is wanted, the encoder's
hash, and the descriptor, with noise if a guarantee was asked for. What goes wrong with the examples is told to the
user, not to the server.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hyperbloom.client.privacy import Guarantee, Ledger, guarantee, noise_scale, privatise
from hyperbloom.client.training import evaluate, settle_norms
from hyperbloom.common.data import ClientData, DataSpec, Examples, data_source
from hyperbloom.common.data.own import BYTES
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.data.unlabelled import is_unlabelled, read_inputs, scaling_of_bytes
from hyperbloom.common.encoders import EncoderSpec, build_encoder, descriptor_layout, encode, encoder_layout, version_of
from hyperbloom.common.errors import ConfigError, DataError, HyperbloomError, ModelError, RefusedError, WireError
from hyperbloom.common.export import Card, write_model
from hyperbloom.common.messages import Delivery, Description, Offer, Weights
from hyperbloom.common.models import ModelSpec, build, full_layout, model_names

__all__ = ["Newcomer", "Promise", "Sources"]

log = logging.getLogger("hyperbloom.client")

_UNLIKE = (
    "these data look unlike those of all %d clients that trained (noise on the descriptor counts); try the model on "
    "examples whose labels you know before you rely on it"
)


@dataclass(frozen=True)
class Promise:
    """The guarantee that a user asks for."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        """Find out now whether there is such a guarantee."""
        noise_scale(self.epsilon, self.delta, 1.0)


class Sources:
    """The newcomer's examples: with labels, as `flower-client` reads them, or without.

    Raises:
        DataError: they cannot be read.

    Attributes:
        data: the examples with their labels, if there are any; scaled as the run was, once its offer has come.
    """

    def __init__(self, spec: DataSpec) -> None:
        """Read examples with labels; others wait until the model's input shape is known."""
        self.path = Path(spec.data).expanduser()
        self.data: ClientData | None = None
        if not is_unlabelled(self.path):
            self._source, self._partition = data_source(spec), spec.partition
            self.data = self._source.client(self._partition)
        elif not self.path.exists():
            raise DataError(f"--data: expected a file or folder, found none at {self.path}")

    def inputs(self, offer: Offer) -> Tensor:
        """Return the examples to describe `(N, *input_shape)`, all that there are.

        A part of them would be a guarantee's end: which example is in which part is decided by all labels together,
        so that to exchange one example would be to exchange many in the part.

        Raises:
            DataError: they do not fit the models on offer.
        """
        if self.data is None:
            parts = read_inputs([self.path], offer.input_shape, self.scaling(offer))
            return torch.cat([part.values for part in parts])
        found = (self.data.input_shape, self.data.num_classes)
        if found[0] != offer.input_shape or found[1] > offer.num_classes:
            raise DataError(
                f"--data: expected inputs of shape {offer.input_shape} in {offer.num_classes} classes as the models on "
                f"offer, found {found[0]} in {found[1]}"
            )
        if self.data.scaling != self.scaling(offer):
            self.data = self._source.client(self._partition, self.scaling(offer))
        elif self.data.scaling != _offered(offer):
            log.warning(
                "most clients that trained took stored numbers %s, these data are taken %s; prepare them alike, or "
                "bring bytes, which are scaled as theirs",
                _in_words(_offered(offer)),
                _in_words(self.data.scaling),
            )
        return self.data.whole.inputs

    def scaling(self, offer: Offer) -> Scaling:
        """Return what is done to stored numbers: what the data demand, to plain bytes what those who trained did."""
        if self.data is None:
            return _offered(offer)
        return scaling_of_bytes(_offered(offer)) if self._source.scaling == BYTES else self._source.scaling

    def scored(self, offer: Offer) -> bool:
        """Return whether the labels are known to be those of the models on offer."""
        return self.data is not None and (self.data.num_classes == offer.num_classes or self._numbered)

    def class_names(self, offer: Offer) -> tuple[str, ...]:
        """Return the names of the classes, which are numbers where nobody has named them all."""
        if self.data is not None and self.data.num_classes == offer.num_classes:
            return self.data.class_names
        return tuple(str(label) for label in range(offer.num_classes))

    @property
    def _numbered(self) -> bool:
        assert self.data is not None
        return self.data.class_names == tuple(str(label) for label in range(self.data.num_classes))


@dataclass
class Newcomer:
    """Answers one offer, once.

    Args:
        sources: the examples.
        size: of the model that this machine can run.
        promise: the guarantee to keep, None for no noise.
        budget: epsilon that may be spent in all.
        ledger: where it is entered.
        server: its address, for the ledger and the card.

    Attributes:
        failure: what went wrong, for the user.
        weights: the model, once it is here.
        unlike: whether the server finds no client that trained like this one.
    """

    sources: Sources
    size: str
    promise: Promise | None
    budget: float | None
    ledger: Ledger
    server: str
    failure: HyperbloomError | None = None
    weights: Tensor | None = None
    unlike: bool = False
    guarantee: Guarantee | None = None
    spent: tuple[float, float] | None = None
    _offer: Offer | None = None
    _sent: Description | None = None
    _inputs: Tensor = field(default_factory=lambda: torch.empty(0))

    def describe(self, offer: Offer) -> Description | None:
        """Return what an offer is answered with; the same again to the same offer, as after a lost connection.

        None if the offer or the examples do not fit: why is in `failure`, and no business of the server's.
        """
        try:
            return self._describe(offer)
        except Exception as error:
            self.failure = error if isinstance(error, HyperbloomError) else HyperbloomError(f"cannot join: {error!r}")
            return None

    def _describe(self, offer: Offer) -> Description:
        if self._sent is not None:
            if offer.encoder_version != self._sent.encoder_version:
                raise RefusedError("the server has another encoder now; another descriptor is another join: join again")
            return self._sent
        if self.size not in offer.sizes:
            raise ConfigError(f"--size: expected one of {', '.join(offer.sizes)}, found {self.size}")
        if offer.model not in model_names():
            raise ModelError(f"the server offers the model {offer.model!r}, which this version does not know")
        inputs = self.sources.inputs(offer)
        spec = EncoderSpec(offer.encoder, offer.input_shape, offer.dim)
        offer.weights.check(encoder_layout(spec), torch.float32)
        if version_of(offer.weights.values) != offer.encoder_version:
            raise WireError(f"the encoder is not the one that the server says, {offer.encoder_version}")
        encoder = build_encoder(spec).eval()
        with torch.no_grad():
            for name, value in offer.weights.layout.views(offer.weights.values).items():
                encoder.get_parameter(name).copy_(value)
            descriptor = encode(encoder, inputs)
        if self.promise:
            one = self.promise
            self.guarantee = guarantee(encoder, len(inputs), one.epsilon, one.delta)
            descriptor = privatise(descriptor, self.guarantee)
        elif not bool(descriptor.isfinite().all()):
            raise DataError("the descriptor is not finite; are the inputs? Nothing was sent")
        self.spent = self.ledger.spend(self.guarantee, self.budget, self.server)
        self._offer, self._inputs = offer, inputs
        self._sent = Description(self.size, offer.encoder_version, Weights(descriptor_layout(offer.dim), descriptor))
        for sentence in self.guarantee.sentences() if self.guarantee else ():
            log.info(sentence)
        return self._sent

    def receive(self, delivery: Delivery) -> None:
        """Keep the weights; WireError if they are not those of the model on offer."""
        if self._offer is None:
            raise WireError("weights came before an offer")
        delivery.weights.check(full_layout(self._spec(self._offer)), torch.float32)
        self.weights, self.unlike = delivery.weights.values, delivery.unlike
        if self.unlike:
            log.warning(_UNLIKE, self._offer.clients)

    def write(self, folder: Path) -> list[str]:
        """Write the model folder and return the names of its files."""
        assert self._offer is not None and self.weights is not None
        offer, spec = self._offer, self._spec(self._offer)
        module = build(spec)
        with torch.no_grad():
            for name, value in full_layout(spec).views(self.weights).items():
                module.get_parameter(name).copy_(value)
        settle_norms(module, Examples(self._inputs, torch.zeros(len(self._inputs), dtype=torch.int64)))
        names = self.sources.class_names(offer)
        return write_model(folder, module, spec, names, self.sources.scaling(offer), self._card(offer, module))

    def _spec(self, offer: Offer) -> ModelSpec:
        return ModelSpec(offer.model, self.size, offer.input_shape, offer.num_classes)

    def _card(self, offer: Offer, module: torch.nn.Module) -> Card:
        assert self._sent is not None
        data, size = self.sources.data, self._sent.weights.values.numel()
        score = evaluate(module, data.whole) if data and self.sources.scored(offer) else None
        here = f"{100 * score.accuracy:.1f} % on {score.total} labelled examples here" if score else "not known here"
        novel = "" if offer.accuracy is None else f"; {offer.accuracy:.1f} % on average for the run's own newcomers"
        origin = {
            "made by": f"the hypernetwork of run {offer.run}, round {offer.round}, on {self.server}",
            "trained with": f"{offer.clients} clients; this machine was none of them",
            "described by": f"{len(self._inputs)} examples, without labels, and encoder {offer.encoder_version}",
            "test accuracy": here + novel,
        }
        noisy = "with noise" if self.guarantee else "without noise"
        sent = (
            f"The descriptor, {size} numbers {noisy}; the encoder's hash; the size of the model, {self.size}.",
            "No example, no label, no number of examples, no name.",
        )
        privacy = self.guarantee.sentences() if self.guarantee else ()
        if self.guarantee and self.spent:
            total = f"epsilon {self.spent[0]:g}, delta {self.spent[1]:g}"
            privacy += (f"All descriptors of this state folder together, by basic composition: {total}.",)
        elif self.guarantee:
            privacy += ("An earlier descriptor of this state folder had no noise: together there is no guarantee.",)
        remarks = []
        if not (data and data.num_classes == offer.num_classes):
            remarks.append("The classes are numbered as by the clients that trained; these data do not name them all.")
        if self.sources.scaling(offer) == _offered(offer):
            remarks.append(offer.scaling_known_by)
        if self.unlike:
            said = _UNLIKE % offer.clients
            remarks.append(f"{said[0].upper()}{said[1:]}.")
        return Card("A model on demand", origin, sent, privacy, tuple(remarks))


def _in_words(scaling: Scaling) -> str:
    by = "as they are" if scaling.divisor == 1.0 else f"divided by {scaling.divisor:g}"
    return by + (f", less {list(scaling.mean)}, divided by {list(scaling.std)}" if scaling.mean else "")


def _offered(offer: Offer) -> Scaling:
    return Scaling(offer.divisor, offer.mean, offer.std)
