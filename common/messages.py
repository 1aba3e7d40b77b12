"""The wire: every message between server and clients, and the one place that packs and unpacks them.

    server                                   client
      | -- Greeting (query.greet) ------------> |
      | <------------------- Introduction ------ |   who it is, how much data it has, what it can run
      | -- TrainOrder (train) ---------------->  |
      | <------------------- TrainResult ------- |
      | -- ReferenceOrder (query.reference) ->   |   FedHeNN: inputs that everybody may see, once
      | <----------------- ReferenceResult ----- |
      | -- RepresentOrder (query.represent) -->  |   FedHeNN: what does your network make of them?
      | <----------------- RepresentResult ----- |
      | -- EvaluateOrder (evaluate) ---------->  |
      | <------------------- EvaluateResult ---- |
      | -- Notice (query.notice) ------------->  |   refused, or the run is over

With an encoder (ODPFL-HN) also

      | -- DescribeOrder (train.describe) ---->  |   the encoder
      | <---------------- DescribeResult ------- |   what it makes of the client's examples
      | -- BackpropOrder (train.backprop) ---->  |   the gradient with respect to that
      | <---------------- BackpropResult ------- |   the gradient with respect to the encoder
      | -- FitOrder (train.fit) -------------->  |   train, and fit the encoder to a given descriptor
      | <--------------------- FitResult ------- |

With secure aggregation, instead of TrainOrder (common/secure_aggregation.py)

      | -- KeysOrder (train.keys) ----------->  |
      | <-------------------- KeysResult ------- |   keys for this round
      | -- SharesOrder (train.shares) ------->  |   everybody's keys
      | <------------------ SharesResult ------- |   sealed shares of its secrets, one for each of the others
      | -- MaskedOrder (train.masked) ------->  |   train; the shares that the others have sealed for this client
      | <------------------ MaskedResult ------- |   the change, masked
      | -- ConfirmOrder (train.confirm) ----->  |   who has sent one, and who has vanished
      | <----------------- ConfirmResult ------- |   a signature: this is what I was told
      | -- UnmaskOrder (train.unmask) ------->  |   everybody's signatures
      | <------------------ UnmaskResult ------- |   shares of what takes the masks off the sum

and for novel clients that get a model of somebody else's (PFL-sampled, -ensemble, -nearest)

      | -- TryOrder (evaluate.many) ---------->  |   many models
      | <---------------- EvaluateResult ------- |
      | -- MomentsOrder (evaluate.moments) --->  |   a network
      | <----------------- MomentsResult ------- |   mean and covariance of its features
      | -- ErrorsOrder (evaluate.errors) ----->  |   linear classifiers of the same features
      | <------------------ ErrorsResult ------- |   how often each is wrong

With a newcomer, whom no training has seen (`flower-server serve`, `flower-client join`), nothing but

      | -- Offer (query.offer) -------------->   |   the encoder
      | <------------------- Description ------- |   what it makes of the newcomer's examples
      | -- Delivery (query.deliver) --------->   |   weights
      | <------------------------ Notice ------- |   received
      | -- Notice (query.notice) ------------>   |

A message is one `ConfigRecord`, weights included, as one run of bytes: Flower sends each record, array and chunk as an
object with a request of its own, so three objects instead of six per message halve the time of a small round.
What arrives is checked field by field, and tensor by tensor, before anything is done with it.
"""

import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Layout

__all__ = [
    "ASKS",
    "LARGEST_NORM",
    "PRIVATE",
    "REFINED",
    "REPLIES",
    "UNREADABLE",
    "BackpropOrder",
    "BackpropResult",
    "ConfirmOrder",
    "ConfirmResult",
    "Delivery",
    "DescribeOrder",
    "DescribeResult",
    "Description",
    "ErrorsOrder",
    "ErrorsResult",
    "EvaluateOrder",
    "EvaluateResult",
    "FitOrder",
    "FitResult",
    "Greeting",
    "Introduction",
    "KeysOrder",
    "KeysResult",
    "MaskedOrder",
    "MaskedResult",
    "MomentsOrder",
    "MomentsResult",
    "Notice",
    "Offer",
    "ReferenceOrder",
    "ReferenceResult",
    "RepresentOrder",
    "RepresentResult",
    "SharesOrder",
    "SharesResult",
    "SplitScore",
    "TrainOrder",
    "TrainResult",
    "TryOrder",
    "UnmaskOrder",
    "UnmaskResult",
    "Weights",
    "weigh",
]

ASKS = ("own", "types", "graph")
"""What a strategy asks clients about their own models: nothing but to use them, their layer types, their graphs."""

PRIVATE = ("none", "head", "body", "all", "copy")
"""What of the target network stays on the client: nothing, the personal classifier, all else, or everything. With
'copy' all weights travel, and beside them the client has a model of the same shapes that never does; orders to train
need a method that says how."""

REFINED = ("head", "all")
"""What is trained on the client's own examples before an evaluation, and forgotten after it."""

REPLIES = ("delta", "weights", "nothing")
"""What a client sends back from training: trained - sent, trained, or only its metrics."""

LARGEST_NORM = 1e6
"""Norm beyond which what a client returns is refused: sound ones are of order 1 to 1,000, and the squares of larger
ones would overflow in the product with the Jacobian and reach everybody as NaN."""

LARGEST_LOSS = 1e30
"""Loss beyond which sums over clients might overflow."""

LONGEST_LAYOUT = 2**22
"""Characters of names and shapes as JSON; ResNet-152 has some 30,000."""

LONGEST_TENSOR_NAME, MOST_DIMENSIONS, LONGEST_SIDE = 1000, 16, 2**40

UNREADABLE = 1001
"""Error code, beside Flower's own, of a reply that is too large to be looked at, no message, or in another's name."""

_KEY = "hyperbloom"
_DTYPES = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Weights:
    """Named tensors as one flat vector: `values` is `(layout.numel,)`."""

    layout: Layout
    values: Tensor

    def part(self, wanted: Layout) -> Tensor:
        """Return the values of the parameters of `wanted`, which all are among these."""
        return self.values if wanted == self.layout else wanted.flatten(self.layout.views(self.values))

    def check(self, expected: Layout, dtype: torch.dtype) -> None:
        """Compare names, shapes, dtype and finiteness with what was expected.

        Raises:
            WireError: names the first tensor that differs.
        """
        here, there = dict(self.layout.shapes), dict(expected.shapes)
        for name in there:
            if name not in here:
                raise WireError(f"tensor {name}: expected with shape {there[name]}, but it is missing")
            if here[name] != there[name]:
                raise WireError(f"tensor {name}: expected shape {there[name]}, found {here[name]}")
        extra = [name for name in here if name not in there]
        if extra:
            raise WireError(f"tensor {extra[0]}: not expected; expected {', '.join(there)}")
        if self.layout != expected:
            raise WireError(f"tensors: expected in the order {', '.join(there)}, found {', '.join(here)}")
        if self.values.dtype != dtype:
            raise WireError(f"tensor {next(iter(there), '')}: expected {dtype}, found {self.values.dtype}")
        # A sum is finite only if all terms are; it is the cheap test, and overflow is settled by the exact one.
        if not math.isfinite(self.values.sum().item()):
            bad = torch.nonzero(~torch.isfinite(self.values))
            if len(bad):
                index = int(bad[0])
                raise WireError(f"tensor {expected.name_at(index)}: {len(bad)} values are not finite")


class Packable:
    """A frozen dataclass of scalars, lists and `Weights`, as one `ConfigRecord` of a `RecordDict`."""

    def pack(self) -> RecordDict:
        """Return the content of a Flower message."""
        record: dict[str, Any] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Weights):
                record |= {_prefix(field.name) + key: part for key, part in _pack_weights(value).items()}
            elif value is not None:
                record[field.name] = list(value) if isinstance(value, tuple) else value
        return RecordDict({_KEY: ConfigRecord(record, keep_input=False)})

    @classmethod
    def unpack(cls, content: RecordDict) -> Self:
        """Read the content of a Flower message.

        Raises:
            WireError: a field is missing, unknown, of the wrong type or not finite.
        """
        record = content.get(_KEY)
        if not isinstance(record, ConfigRecord):
            raise WireError(f"expected a record {_KEY!r} with a {cls.__name__}, found {sorted(content)}")
        left = dict(record)
        values = {
            name: _take(left, name, kind, cls.__name__)
            for name, kind in get_type_hints(cls).items()
            if get_origin(kind) is not ClassVar
        }
        if left:
            raise WireError(f"{cls.__name__}: unknown field {sorted(left)[0]!r}")
        return cls(**values)


def _prefix(name: str) -> str:
    """Return what tells the parts of a `Weights` from those of another; the usual ones need nothing."""
    return "" if name == "weights" else f"{name}."


def weigh(content: RecordDict) -> int:
    """Return the bytes of what a message carries: texts and bytes as they are, eight for a number.

    Flower's framing comes on top, some 2 kB for an order and its answer (`benchmarks/wire_bytes.py`).
    """
    values = (value for record in content.config_records.values() for value in record.values())
    return sum(_weight(value) for value in values)


def _weight(value: object) -> int:
    if isinstance(value, list):
        return sum(_weight(item) for item in value)
    return len(value) if isinstance(value, str | bytes) else 8


def _pack_weights(weights: Weights) -> dict[str, Any]:
    values = weights.values.detach().cpu().contiguous()
    dtype = str(values.dtype).removeprefix("torch.")
    if dtype not in _DTYPES or sys.byteorder != "little":
        raise WireError(f"cannot send {values.dtype} from a {sys.byteorder}-endian machine; send float32")
    return {
        "tensors": json.dumps(weights.layout.shapes, separators=(",", ":")),
        "dtype": dtype,
        "values": values.numpy().tobytes(),
    }


def _take(left: dict[str, Any], name: str, kind: Any, owner: str) -> Any:
    """Remove field `name` from `left` and return it as `kind`."""
    optional = type(None) in get_args(kind)
    if Weights in (kind, *get_args(kind)):
        prefix = _prefix(name)
        if optional and f"{prefix}values" not in left:
            return None
        parts = {key: left.pop(prefix + key, None) for key in ("tensors", "dtype", "values")}
        return _unpack_weights(parts, owner if not prefix else f"{owner}.{name}")
    if name not in left:
        if optional:
            return None
        raise WireError(f"{owner}: field {name!r} is missing")
    if optional:
        kind = get_args(kind)[0]
    return _typed(left.pop(name), kind, f"{owner}.{name}")


def _typed(value: Any, kind: Any, where: str) -> Any:
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        if not isinstance(value, list):
            raise WireError(f"{where}: expected a list, found {type(value).__name__}")
        return tuple(_typed(element, item, where) for element in value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise WireError(f"{where}: expected {kind.__name__}, found {type(value).__name__}")
    if kind is float and not math.isfinite(value):
        raise WireError(f"{where}: expected a finite number, found {value}")
    return value


def _unpack_weights(left: dict[str, Any], owner: str) -> Weights:
    tensors = _typed(left["tensors"], str, f"{owner}.tensors")
    if len(tensors) > LONGEST_LAYOUT:
        raise WireError(f"{owner}.tensors: expected at most {LONGEST_LAYOUT} characters, found {len(tensors)}")
    dtype = _DTYPES.get(_typed(left["dtype"], str, f"{owner}.dtype"))
    raw = _typed(left["values"], bytes, f"{owner}.values")
    if dtype is None:
        raise WireError(f"{owner}.dtype: expected one of {', '.join(_DTYPES)}")
    try:
        shapes = tuple((name, tuple(shape)) for name, shape in json.loads(tensors))
    except (ValueError, TypeError, RecursionError):
        raise WireError(f"{owner}.tensors: expected names and shapes as JSON, found {tensors[:60]!r}") from None
    if not all(_is_tensor(name, shape) for name, shape in shapes):
        raise WireError(f"{owner}.tensors: expected names and whole lengths from 0, found {tensors[:60]!r}")
    layout = Layout(shapes)
    expected = layout.numel * dtype.itemsize
    if len(raw) != expected:
        raise WireError(f"{owner}.values: expected {expected} bytes for {len(shapes)} tensors, found {len(raw)}")
    values = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return Weights(layout, values)


def _is_tensor(name: object, shape: tuple[object, ...]) -> bool:
    """Tell whether a name can be printed and sent on, and lengths multiplied: beyond all memory that takes minutes."""
    sound = type(name) is str and len(name) <= LONGEST_TENSOR_NAME and name.isprintable()
    return sound and len(shape) <= MOST_DIMENSIONS and all(type(n) is int and 0 <= n < LONGEST_SIDE for n in shape)


@dataclass(frozen=True)
class Greeting(Packable):
    """The server meets a node: who are you?"""

    type: ClassVar[str] = "query.greet"
    version: str
    asks: str | None = None  # what the strategy must know of clients' own models, one of ASKS; None: it chooses itself
    norms: str | None = None  # how the graph of an own model treats the affine parameters of its norms
    reference: str | None = None  # digest of the reference set that clients will need: is it here already?


@dataclass(frozen=True)
class Introduction(Packable):
    """What a client says of itself. Nothing in it comes from single examples."""

    client_id: str
    token: str  # secret of the client's own making: who shows it again is the same client
    version: str
    size: str  # of the target network it can run: S, M or L
    input_shape: tuple[int, ...]
    num_classes: int
    train_examples: int
    val_examples: int
    test_examples: int
    class_shares: tuple[float, ...]  # empty unless the client chose to disclose them
    types: tuple[str, ...] | None = (
        None  # layer types of its own model, in no telling order, or ("all",); () tells that there is one
    )
    graph: str | None = None  # the whole graph of its own model; if asked, and if the client chose to disclose it
    has_reference: bool | None = None  # whether the reference set of the greeting is here; None if none was named
    divisor: float = 1.0  # what it does to stored numbers: divides them, and normalises the channels
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


@dataclass(frozen=True)
class Notice(Packable):
    """The server's last word to a node: `kind` is 'refused' or 'finished'. The client answers with the same."""

    type: ClassVar[str] = "query.notice"
    kind: str
    reason: str
    complete: str | None = None  # id of a run that will not be resumed: nothing needs to be kept for that any more


@dataclass(frozen=True)
class TrainOrder(Packable):
    """Train: load the weights, take `steps` steps of SGD, send back what `reply` says.

    `weights` are what is not private. With 'body' they may be the whole network: then what is private starts from that,
    if the client has none yet. What it sends back is without the private part in either case.
    """

    type: ClassVar[str] = "train"
    run_id: str
    round: int
    model: str
    num_classes: int
    private: str  # one of PRIVATE
    reply: str  # one of REPLIES
    seed: int  # of the run; client and round are mixed in on the client
    steps: int
    batch_size: int
    learning_rate: float
    momentum: float
    weight_decay: float
    clip: float
    weights: Weights | None
    compression: str | None = None  # name of the codec for the change that is sent back; None: as `reply` says
    norms: str | None = None  # with the client's own model: as in the greeting
    hypernetwork: str | None = None  # settings of the graph hypernetwork whose parameters `weights` are, as JSON
    method: str | None = None  # of common/methods.py, as JSON; None: plain SGD
    target: Weights | None = None  # FedHeNN: factor of the kernel matrix that the representations are to resemble
    reference: Weights | None = None  # FedHeNN: the round's inputs; does not travel, the client adds what it keeps
    resume_points: tuple[int, ...] | None = None  # rounds to which a server that crashes may go back
    rewound: tuple[int, ...] | None = None  # rounds to which it has gone back, in order of time
    dp_clip: float | None = None  # norm to which the change is clipped before noise is added; None: neither
    dp_noise: float | None = None  # standard deviation of that noise, in units of dp_clip
    quiet: bool | None = None  # whether the loss, which is of training examples, stays on the client


@dataclass(frozen=True)
class TrainResult(Packable):
    """What a client sends back from training."""

    loss: float  # mean training loss over the local steps; 0 where the client keeps it to itself
    seconds: float  # wall time of the local training
    weights: Weights | None
    encoded: bytes | None = None  # instead of weights: the change, trained - sent, in the codec of the order

    def check(self) -> None:
        """Refuse an impossible loss with a WireError."""
        if not 0 <= self.loss <= LARGEST_LOSS:
            raise WireError(f"loss: expected 0 to {LARGEST_LOSS:.0e}, found {self.loss}")


@dataclass(frozen=True)
class EvaluateOrder(Packable):
    """Evaluate the weights, with the private part that the client holds, on its validation and test examples."""

    type: ClassVar[str] = "evaluate"
    run_id: str
    round: int
    model: str
    num_classes: int
    private: str
    seed: int
    weights: Weights | None
    norms: str | None = None
    hypernetwork: str | None = None
    refine_epochs: int | None = None  # passes of plain SGD over the training examples before the evaluation
    refine_rate: float | None = None  # learning rate of these
    refine_batch: int | None = None  # where the client has fewer examples: all of them
    refine_part: str | None = None  # what they train, one of REFINED; None: the head
    distil_temperature: float | None = None  # they train the own model instead, with the weights' model as teacher
    resume_points: tuple[int, ...] | None = None  # as in the order to train
    rewound: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ReferenceOrder(Packable):
    """Keep the reference set, whose digest is `reference`; `weights` are its inputs `(n, *shape)`."""

    type: ClassVar[str] = "query.reference"
    reference: str
    weights: Weights | None


@dataclass(frozen=True)
class ReferenceResult(Packable):
    """The reference set is on the client's disk."""

    reference: str


@dataclass(frozen=True)
class RepresentOrder(Packable):
    """Send what the network makes of this round's rows of the reference set, as it is before the training."""

    type: ClassVar[str] = "query.represent"
    run_id: str
    round: int
    model: str
    num_classes: int
    private: str
    seed: int
    weights: Weights | None
    reference: str  # digest of the set
    rows: int  # how many of its inputs
    draw: int  # seed that says which
    norms: str | None = None
    hypernetwork: str | None = None
    resume_points: tuple[int, ...] | None = None  # as in the order to train
    rewound: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RepresentResult(Packable):
    """A factor of the representations' kernel matrix: see common/alignment.py."""

    factor: Weights | None


@dataclass(frozen=True)
class SplitScore:
    """Score of one model on one set of examples."""

    correct: int
    total: int
    loss: float

    @property
    def accuracy(self) -> float:
        """Share of correct answers, between 0 and 1."""
        return self.correct / self.total


@dataclass(frozen=True)
class EvaluateResult(Packable):
    """Counts and mean losses on a client's validation and test examples."""

    val_correct: int
    val_total: int
    val_loss: float
    test_correct: int
    test_total: int
    test_loss: float

    def score(self, split: str) -> SplitScore:
        """Return the score on 'val' or 'test'."""
        parts = (getattr(self, f"{split}_{part}") for part in ("correct", "total", "loss"))
        return SplitScore(*parts)

    def check(self) -> None:
        """Refuse impossible counts and losses with a WireError."""
        for split in ("val", "test"):
            score = self.score(split)
            if not 0 <= score.correct <= score.total or score.total == 0:
                raise WireError(f"{split}: expected 0 <= correct <= total and examples, found {score}")
            if not 0 <= score.loss <= LARGEST_LOSS:
                raise WireError(f"{split}: expected a loss of 0 to {LARGEST_LOSS:.0e}, found {score.loss}")


@dataclass(frozen=True)
class DescribeOrder(Packable):
    """Encode the training examples, without their labels."""

    type: ClassVar[str] = "train.describe"
    run_id: str
    round: int
    encoder: str  # its name
    dim: int  # of a descriptor
    version: str  # hash of its parameters
    keep: bool  # for a `BackpropOrder` that follows
    weights: Weights  # its parameters


@dataclass(frozen=True)
class DescribeResult(Packable):
    """The descriptor of a client's examples, and the version of the encoder that made it."""

    version: str
    weights: Weights


@dataclass(frozen=True)
class BackpropOrder(Packable):
    """Take a gradient back through the encoder that was kept: `weights` is the one with respect to the descriptor."""

    type: ClassVar[str] = "train.backprop"
    run_id: str
    encoder: str
    dim: int
    version: str
    weights: Weights


@dataclass(frozen=True)
class BackpropResult(Packable):
    """The gradient with respect to the encoder of `version`."""

    version: str
    weights: Weights


@dataclass(frozen=True)
class FitOrder(TrainOrder):
    """Train as ordered, and beside it fit the encoder to the descriptor that the server has learned."""

    type: ClassVar[str] = "train.fit"
    encoder: str = ""
    version: str = ""
    gamma: Weights | None = None  # the encoder's parameters
    descriptor: Weights | None = None
    fit_steps: int = 0
    fit_rate: float = 0.0


@dataclass(frozen=True)
class FitResult(TrainResult):
    """Also the change of the encoder of `version`, and how far its descriptor was from the given one before."""

    version: str = ""
    distance: float = 0.0  # mean of the squared differences
    gamma: Weights | None = None


@dataclass(frozen=True)
class KeysOrder(Packable):
    """Make keys and a secret for a round of secure aggregation; what is left of an earlier round is forgotten."""

    type: ClassVar[str] = "train.keys"
    run_id: str
    round: int


@dataclass(frozen=True)
class KeysResult(Packable):
    """Public keys of one round, signed by the client."""

    cipher_key: bytes  # for what other clients seal for this one
    mask_key: bytes  # for the masks that it shares with them
    identity: bytes  # the public key of the signature, DER
    signature: bytes


@dataclass(frozen=True)
class SharesOrder(Packable):
    """Deal shares of the round's secrets. Clients are known to each other by their places in the lists of keys only."""

    type: ClassVar[str] = "train.shares"
    run_id: str
    round: int
    place: int  # of the client itself
    threshold: int  # clients whose shares put a secret together
    bound: float  # largest change of a coordinate
    examples: int  # beyond which a client counts for no more
    cipher_keys: tuple[bytes, ...]
    mask_keys: tuple[bytes, ...]
    identities: tuple[bytes, ...]
    signatures: tuple[bytes, ...]  # of the keys, as each client has sent them


@dataclass(frozen=True)
class SharesResult(Packable):
    """For each place the sealed shares, none for the client's own, and by what its secret and each share are known."""

    sealed: tuple[bytes, ...]
    secret: bytes  # digest of the secret of which its own mask is made
    secret_shares: tuple[bytes, ...]  # digests of the shares of that
    key_shares: tuple[bytes, ...]  # digests of the shares of the private key of its masks


@dataclass(frozen=True)
class MaskedOrder(TrainOrder):
    """Train as ordered, and send the change masked.

    The sum has one part for each tensor, one after the other. `parts`, `lengths` and `owners` describe it, the same to
    all clients. What a client trains and finds no part for stays there.
    """

    type: ClassVar[str] = "train.masked"
    there: tuple[int, ...] = ()  # places of the clients that have dealt shares
    sealed: tuple[bytes, ...] = ()  # the shares that each of these has sealed for this client
    digests: tuple[bytes, ...] = ()  # for each the digests of its two shares, one behind the other
    parts: tuple[bytes, ...] = ()  # digest of each tensor's name, shape and values
    lengths: tuple[int, ...] = ()  # numbers in each
    owners: tuple[bytes, ...] = ()  # for each the places of the clients that train it, a bit for a place


@dataclass(frozen=True)
class MaskedResult(Packable):
    """The weighted change as words of four bytes, the weighted loss behind it, under masks."""

    seconds: float
    masked: bytes


@dataclass(frozen=True)
class ConfirmOrder(Packable):
    """Sign whose masked changes are in the sum: those of `alive`. They and `dead` are those that dealt shares."""

    type: ClassVar[str] = "train.confirm"
    run_id: str
    round: int
    alive: tuple[int, ...]
    dead: tuple[int, ...]


@dataclass(frozen=True)
class ConfirmResult(Packable):
    """A signature of that, and of all else that the client was told in this round."""

    signature: bytes


@dataclass(frozen=True)
class UnmaskOrder(Packable):
    """Reveal shares of the secrets of those who are alive, and of the keys of the dead."""

    type: ClassVar[str] = "train.unmask"
    run_id: str
    round: int
    signatures: tuple[bytes, ...]  # of those who are alive, in order of places; empty for who has not signed


@dataclass(frozen=True)
class UnmaskResult(Packable):
    """The shares, in order of places; empty where the one that was dealt cannot be read."""

    shares: tuple[bytes, ...]


@dataclass(frozen=True)
class TryOrder(EvaluateOrder):
    """Evaluate many models, whose weights are the rows of one tensor `models`: each, or all together."""

    type: ClassVar[str] = "evaluate.many"
    together: bool = False


@dataclass(frozen=True)
class MomentsOrder(EvaluateOrder):
    """Describe the training examples, without their labels, by what the head of the network sees of them."""

    type: ClassVar[str] = "evaluate.moments"


@dataclass(frozen=True)
class MomentsResult(Packable):
    """Mean of the features, above their covariance: one tensor `moments` `(1 + F, F)`."""

    weights: Weights


@dataclass(frozen=True)
class ErrorsOrder(EvaluateOrder):
    """Say how often each of linear classifiers `(M, F + 1)` takes a validation example for somebody else's."""

    type: ClassVar[str] = "evaluate.errors"
    sign: int = 0  # of the values that classifiers should have here, 1 or -1
    classifiers: Weights | None = None


@dataclass(frozen=True)
class ErrorsResult(Packable):
    """For each classifier the share of examples that it takes for somebody else's."""

    errors: tuple[float, ...]


@dataclass(frozen=True)
class Offer(Packable):
    """A server meets a node that may want a model: the encoder, and what a model will be."""

    type: ClassVar[str] = "query.offer"
    version: str
    run: str  # name of the run folder
    round: int  # that was selected
    clients: int  # that took part
    accuracy: float | None  # percent, mean over the run's own novel clients, if it had any
    model: str
    sizes: tuple[str, ...]
    input_shape: tuple[int, ...]
    num_classes: int
    divisor: float  # what training did to stored numbers
    mean: tuple[float, ...]
    std: tuple[float, ...]
    encoder: str
    dim: int
    encoder_version: str
    weights: Weights  # the encoder's parameters
    scaling_known_by: str = ""  # how the server knows what training did to stored numbers, in a sentence


@dataclass(frozen=True)
class Description(Packable):
    """All that a newcomer sends: which size of model, and the descriptor of its examples, with noise or without."""

    size: str
    encoder_version: str
    weights: Weights


@dataclass(frozen=True)
class Delivery(Packable):
    """The newcomer's model, and whether its descriptor is unlike those of all clients that trained."""

    type: ClassVar[str] = "query.deliver"
    weights: Weights
    unlike: bool = False
