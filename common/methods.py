"""Local methods: what a client minimises in place of the loss alone, as a training order describes it.

One class for each, with its hyperparameters and a `kind` by which `client/work/methods.py` finds its function.
An order holds one (`TrainOrder.method`), which travels as JSON; none at all stands for plain SGD.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationError

from hyperbloom.common.cka import Kernel
from hyperbloom.common.config import Positive, Rate, Section, Share
from hyperbloom.common.errors import WireError

__all__ = ["METHODS", "Aligned", "FedProx", "FedRep", "Frozen", "Method", "PFedMe", "PerFedAvg", "Variant"]

Variant = Literal["first-order", "hessian-free"]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class Method(Section):
    """Base of all local methods; `kind` is the name on the wire.

    A class of its own for each method, listed in `METHODS`, gives `kind` as a field with one possible value.
    """

    private: ClassVar[tuple[str, ...]] = ("none",)
    """What may be private in an order with this method, of `PRIVATE` of the wire."""

    kind: str

    @property
    def fewest_steps(self) -> int:
        """Local steps below which it cannot do its work."""
        return 1

    def to_json(self) -> str:
        """Return what `from_json` reads."""
        return self.model_dump_json()

    @staticmethod
    def from_json(text: str) -> "Method":
        """Read a method from the wire.

        Raises:
            WireError: it is no JSON, of no known kind, or has wrong hyperparameters.
        """
        try:
            kind = _Kind.model_validate_json(text).kind
            if kind not in METHODS:
                raise WireError(f"order: expected a method of kind {', '.join(METHODS)}, found {kind[:40]!r}")
            return METHODS[kind].model_validate_json(text)
        except ValidationError as error:
            details = error.errors()[0]
            key = ".".join(["method", *map(str, details["loc"])])
            raise WireError(f"order: {key[:60]}: {details['msg']}") from None


class _Kind(Section):
    model_config = ConfigDict(extra="ignore")
    kind: str


class FedProx(Method):
    """SGD on the loss plus `mu/2 |w - w_sent|^2`."""

    private: ClassVar[tuple[str, ...]] = ("none", "head", "body")
    kind: Literal["fedprox"] = "fedprox"
    mu: Share


class FedRep(Method):
    """`head_share` of the steps for the personal head with a frozen body, then the others for the body."""

    private: ClassVar[tuple[str, ...]] = ("head",)
    kind: Literal["fedrep"] = "fedrep"
    head_share: Fraction

    @property
    def fewest_steps(self) -> int:
        """One for the head, one for the body."""
        return 2


class PerFedAvg(Method):
    """SGD on the loss after one step of rate `alpha`."""

    kind: Literal["per-fedavg"] = "per-fedavg"
    alpha: Share
    variant: Variant
    delta: Rate  # hessian-free: length of the finite difference, in units of the gradient

    @property
    def fewest_steps(self) -> int:
        """Gradients of one update."""
        return 4 if self.variant == "hessian-free" else 2


class PFedMe(Method):
    """SGD on the loss's Moreau envelope of parameter `lamda`; the minimiser is the client's personal model."""

    private: ClassVar[tuple[str, ...]] = ("copy",)
    kind: Literal["pfedme"] = "pfedme"
    lamda: Rate
    inner_steps: Positive
    inner_rate: Rate


class Frozen(Method):
    """SGD on all parameters but those named."""

    kind: Literal["frozen"] = "frozen"
    names: tuple[str, ...]


class Aligned(Method):
    """SGD on the loss plus `eta (1 - CKA)` of representations with a target, or with those of the weights sent."""

    private: ClassVar[tuple[str, ...]] = ("none", "copy", "all")
    kind: Literal["aligned"] = "aligned"
    eta: Share
    kernel: Kernel
    bandwidth: Rate
    reference: str  # digest of the set of inputs
    rows: Positive  # how many of them are in this round
    draw: int  # seed that says which


_ALL: tuple[type[Method], ...] = (FedProx, FedRep, PerFedAvg, PFedMe, Frozen, Aligned)
METHODS: dict[str, type[Method]] = {each.model_fields["kind"].default: each for each in _ALL}
