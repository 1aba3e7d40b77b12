"""A newcomer's side of a model on demand, without Flower: it describes the examples and receives the weights.

Only the `Description` leaves this machine: the size of the model, the encoder's hash, and the descriptor, with noise if
the user asks for a guarantee. Errors about the examples go to the user and not to the server.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hyperbloom.client.newcomer.guarantee import Guarantee, Promise, guarantee, privatise
from hyperbloom.client.newcomer.ledger import Ledger
from hyperbloom.client.newcomer.sources import Sources
from hyperbloom.client.work.encoding import loaded_encoder
from hyperbloom.client.work.scoring import evaluate, settle_norms
from hyperbloom.common import models
from hyperbloom.common.data import Examples
from hyperbloom.common.encoders import EncoderSpec, descriptor_layout, encode, encoder_layout
from hyperbloom.common.errors import ConfigError, DataError, HyperbloomError, ModelError, RefusedError, WireError
from hyperbloom.common.files.export import Card, write_model
from hyperbloom.common.layout import Weights
from hyperbloom.common.metrics import scale_of, title_of
from hyperbloom.common.models.pretrained import check_tokens, vocabulary
from hyperbloom.common.newcomers import model_of
from hyperbloom.common.reasons import Reason
from hyperbloom.common.tasks import make_task
from hyperbloom.common.wire.newcomers import Delivery, Description, Offer
from hyperbloom.common.wire.orders import Failed

log = logging.getLogger("hyperbloom.client")

DECLINED = Failed(Reason.FAILED, "it declined the offer, and told its user why")
"""All that the server learns if the offer or the examples do not fit."""

_UNLIKE = (
    "these data look unlike those of all %d clients that trained (noise on the descriptor counts); try the model on "
    "examples whose labels you know before you rely on it"
)


@dataclass
class Newcomer:
    """Answers one offer of `server` with one descriptor, within the `budget` for total epsilon if there is one.

    Attributes:
        unlike: whether the descriptor differs from those of all clients that trained.
        share: of its model that is written from its descriptor; if it is 0, zeros are sent instead.
        guarantee: the guarantee of the descriptor that was sent, if it has noise.
        spent: total epsilon and delta of the ledger; None if a descriptor had no noise.
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
    share: float = 1.0
    guarantee: Guarantee | None = None
    spent: tuple[float, float] | None = None
    _offer: Offer | None = None
    _sent: Description | None = None
    _inputs: Tensor = field(default_factory=lambda: torch.empty(0))

    def describe(self, offer: Offer) -> Description | Failed:
        """Answer an offer. The same offer, such as after a lost connection, gets the same answer.

        If the offer or the examples do not fit, the answer is `DECLINED`, and `failure` says why.
        """
        try:
            return self._describe(offer)
        except Exception as error:
            self.failure = error if isinstance(error, HyperbloomError) else HyperbloomError(f"cannot join: {error!r}")
            return DECLINED

    def _describe(self, offer: Offer) -> Description:
        if self._sent is not None:
            if offer.encoder_version != self._sent.encoder_version:
                raise RefusedError("the server has another encoder now; another descriptor is another join: join again")
            return self._sent
        if self.size not in offer.sizes:
            raise ConfigError(f"--size: expected one of {', '.join(offer.sizes)}, found {self.size}")
        if offer.model not in (*models.model_names(), models.BACKBONE):
            raise ModelError(f"the server offers the model {offer.model!r}, which this version does not know")
        if (offer.model == models.BACKBONE) != (self.sources.backbone is not None):
            wanted = "--backbone" if offer.model == models.BACKBONE else "no --backbone"
            raise ConfigError(f"expected {wanted}, as the models on offer have {'one' if offer.backbones else 'none'}")
        if offer.backbones and (found := models.backbone_digest(self._spec(offer))) not in offer.backbones:
            raise ModelError(f"--backbone: expected backbone {' or '.join(offer.backbones)}, found {found}")
        make_task(offer.task).asked([offer.metric])
        shape = models.backbone_shape(self._spec(offer)) if self.sources.backbone else offer.input_shape
        offer.weights.check(encoder_layout(EncoderSpec(offer.encoder, shape, offer.dim)), torch.float32)
        self.share = dict(zip(offer.sizes, offer.shares, strict=False)).get(self.size, 1.0)
        log.info("before anything is sent: %s", offer.expected)
        tokens = vocabulary(models.blank(self._spec(offer)))  # refuses a huge network, too
        inputs = self.sources.inputs(offer)
        check_tokens("--backbone", tokens, inputs)
        descriptor = self._encoded(offer, inputs) if self.share else torch.zeros(offer.dim)
        self._offer, self._inputs = offer, inputs
        self._sent = Description(self.size, offer.encoder_version, Weights(descriptor_layout(offer.dim), descriptor))
        for sentence in self.guarantee.sentences() if self.guarantee else ():
            log.info(sentence)
        return self._sent

    def _encoded(self, offer: Offer, inputs: Tensor) -> Tensor:
        """Return the descriptor `(k,)` as it is sent, once it is in the ledger."""
        seen = models.backbone_features(self._spec(offer), inputs) if self.sources.backbone else inputs
        encoder, _ = loaded_encoder(offer.encoder, seen, offer.dim, offer.weights, offer.encoder_version)
        with torch.no_grad():
            descriptor = encode(encoder, seen)
        if not bool(descriptor.isfinite().all()):
            raise DataError("the descriptor is not finite; are the inputs? Nothing was sent")
        if self.promise:
            self.guarantee = guarantee(encoder, len(inputs), self.promise)
            descriptor = privatise(descriptor, self.guarantee)
        self.spent = self.ledger.spend(self.guarantee, self.budget, self.server)
        return descriptor

    def receive(self, delivery: Delivery) -> None:
        """Keep the weights; WireError if they do not fit the model on offer."""
        if self._offer is None:
            raise WireError("weights came before an offer")
        delivery.weights.check(models.full_layout(self._spec(self._offer)), torch.float32)
        self.weights, self.unlike = delivery.weights.values, delivery.unlike and self.share > 0
        log.info("this machine has got %s", model_of(self.share))
        if self.unlike:
            log.warning(_UNLIKE, self._offer.clients)

    def write(self, folder: Path) -> list[str]:
        """Write the model folder and return the names of its files."""
        assert self._offer is not None and self.weights is not None
        offer, spec = self._offer, self._spec(self._offer)
        module = models.blank(spec)
        with torch.no_grad():
            for name, value in models.full_layout(spec).views(self.weights).items():
                module.get_parameter(name).copy_(value)
        settle_norms(module, Examples(self._inputs, torch.zeros(len(self._inputs), dtype=torch.int64)))
        names, scaling = self.sources.class_names(offer), self.sources.scaling(offer)
        card = self._card(offer, module)
        return write_model(folder, module, spec, names, scaling, card, offer.task, self.sources.schema)

    def _spec(self, offer: Offer) -> models.ModelSpec:
        about = (offer.input_shape, offer.num_classes, offer.adapt)
        return models.ModelSpec(offer.model, self.size, *about, self.sources.backbone)

    def _card(self, offer: Offer, module: torch.nn.Module) -> Card:
        assert self._sent is not None
        data, size = self.sources.data, self._sent.weights.values.numel()
        metric, scale = offer.metric, scale_of(offer.metric)
        task, here = make_task(offer.task), "not known here"
        if data and self.sources.scored(offer):
            score = evaluate(module, data.whole.under(task), task.asked([metric]))
            if (value := score.value(metric)) is not None:
                here = f"{scale.show(scale.factor * value)} on {score.total} labelled examples here"
        origin = {
            "made by": f"run {offer.run}, round {offer.round}, on {self.server}",
            "which model": model_of(self.share),
            "trained with": f"{offer.clients} clients; this machine was none of them",
            "described by": f"{len(self._inputs)} examples, without labels, and encoder {offer.encoder_version}",
            f"test {title_of(metric)}": here,
        }
        told = f"The descriptor, {size} numbers {'with' if self.guarantee else 'without'} noise"
        if not self.share:
            told, origin["described by"] = f"{size} zeros in place of a descriptor", "nothing: it is the same for all"
        sent = (
            f"{told}; the encoder's hash; the size of the model, {self.size}.",
            "No example, no label, no number of examples.",
        )
        privacy = self.guarantee.sentences() if self.guarantee else ()
        if self.guarantee and self.spent:
            total = f"epsilon {self.spent[0]:g}, delta {self.spent[1]:g}"
            privacy += (f"All descriptors of this state folder together, by basic composition: {total}.",)
        elif self.guarantee:
            privacy += ("An earlier descriptor of this state folder had no noise: together there is no guarantee.",)
        if not self.share:
            privacy = ("Nothing that was sent depends on the data, so no privacy was spent.",)
        remarks = [f"Which model, and what to expect: {offer.expected}."]
        numbers = tuple(map(str, range(offer.num_classes)))
        if not self.sources.names_all(offer) and self.sources.class_names(offer) == numbers:
            remarks.append("The outputs are numbered as by the clients that trained; these data do not name them all.")
        if self.sources.scaling(offer) == offer.scaling:
            remarks.append(offer.scaling_known_by)
        if self.unlike:
            said = _UNLIKE % offer.clients
            remarks.append(f"{said[0].upper()}{said[1:]}.")
        return Card("A model on demand", origin, sent, privacy, tuple(remarks))
