"""Local methods: objectives and schedules of local training other than plain SGD on the loss.

Each class holds the hyperparameters of one method. `client/work/methods.py` finds its function by `kind`. A training
order carries at most one method as JSON (`TrainOrder.method`). None means plain SGD.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from hyperbloom.common.config import NonNegative, Positive, Rate, Section
from hyperbloom.common.errors import WireError

Fraction = Annotated[float, Field(gt=0, lt=1)]


class Method(Section):
    """Base of all local methods.

    Each subclass is listed in `METHODS`. Its field `kind` has one possible value: the method's name on the wire.
    """

    private: ClassVar[tuple[str, ...]] = ("none",)
    """Values of `Target.private` that an order with this method may have."""

    kind: str

    @property
    def fewest_steps(self) -> int:
        """Smallest number of local steps that the method needs."""
        return 1

    @staticmethod
    def from_json(text: str) -> "Method":
        """Read what `model_dump_json` wrote from the wire; WireError if the text is no JSON of a method."""
        kind = _Kind.from_wire(text, "order: method").kind
        if kind not in METHODS:
            raise WireError(f"order: expected a method of kind {', '.join(METHODS)}, found {kind[:40]!r}")
        return METHODS[kind].from_wire(text, "order: method")


class _Kind(Section):
    model_config = ConfigDict(extra="ignore")
    kind: str


class FedProx(Method):
    """SGD on the loss plus `mu/2 |w - w_sent|^2`."""

    private: ClassVar[tuple[str, ...]] = ("none", "head", "body")
    kind: Literal["fedprox"] = "fedprox"
    mu: NonNegative


class Ditto(Method):
    """SGD on the loss, and on the loss plus `lamda/2 |v - w_sent|^2` for the personal model v."""

    private: ClassVar[tuple[str, ...]] = ("copy",)
    kind: Literal["ditto"] = "ditto"
    lamda: NonNegative


class FedRep(Method):
    """SGD on the head with a frozen body for `head_share` of the steps, then on the body for the other steps."""

    private: ClassVar[tuple[str, ...]] = ("head",)
    kind: Literal["fedrep"] = "fedrep"
    head_share: Fraction

    @property
    def fewest_steps(self) -> int:
        """Two: one for the head and one for the body."""
        return 2


class HyperFL(FedRep):
    """As FedRep, but the embedding trains with the body, and the head at `head_rate` times the rate."""

    kind: Literal["hyperfl"] = "hyperfl"  # type: ignore[assignment]
    head_rate: Rate


class Aligned(Method):
    """SGD on the loss plus `eta (1 - CKA)` of representations and a target, or those by the weights as sent."""

    private: ClassVar[tuple[str, ...]] = ("none", "copy", "all")
    kind: Literal["aligned"] = "aligned"
    eta: NonNegative
    reference: str  # digest of the reference set
    rows: Positive  # number of its inputs in this round
    draw: int  # seed that selects them


_ALL: tuple[type[Method], ...] = (Ditto, FedProx, FedRep, HyperFL, Aligned)
METHODS: dict[str, type[Method]] = {each.model_fields["kind"].default: each for each in _ALL}
