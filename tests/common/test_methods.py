"""Methods on the wire: what goes in comes out, and nonsense is told in one line."""

import pytest

from figures.fedhenn_rbf import AlignedRBF
from figures.fedma import Frozen
from figures.per_fedavg import Adapted
from figures.pfedme import Moreau
from hyperbloom.common.errors import WireError
from hyperbloom.common.methods import (
    METHODS,
    Aligned,
    Ditto,
    FedProx,
    FedRep,
    HyperFL,
    Method,
)
from hyperbloom.common.wire.orders import PRIVATE

EXAMPLES: list[Method] = [
    FedProx(mu=0.1),
    Ditto(lamda=0.1),
    FedRep(head_share=0.9),
    HyperFL(head_share=0.2, head_rate=5.0),
    Adapted(alpha=0.01, variant="hessian-free", delta=1e-3),
    Moreau(lamda=15.0, inner_steps=5, inner_rate=0.05),
    Frozen(names=("fc1.weight", "fc1.bias")),
    Aligned(eta=0.1, reference="d1ce", rows=500, draw=3),
    AlignedRBF(eta=0.1, reference="d1ce", rows=500, draw=3),
]


@pytest.mark.parametrize("method", EXAMPLES, ids=lambda method: method.kind)
def test_a_method_survives_the_wire(method: Method) -> None:
    again = Method.from_json(method.model_dump_json())
    assert type(again) is type(method)
    assert again == method


def test_every_kind_has_an_example_and_a_function() -> None:
    from hyperbloom.client.work.methods import LOCAL_METHODS

    assert {method.kind for method in EXAMPLES} == METHODS.keys() == LOCAL_METHODS.keys()
    assert all(set(kind.private) <= set(PRIVATE) for kind in METHODS.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "order: method: Invalid JSON"),
        ("[]", "order: method: Input should be an object"),
        ("{}", "order: method.kind: Field required"),
        ('{"kind": "sorcery"}', "order: expected a method of kind ditto, .*, found 'sorcery'"),
        ('{"kind": "fedprox"}', "order: method.mu: Field required"),
        ('{"kind": "fedprox", "mu": -1}', "order: method.mu: Input should be greater than or equal to 0"),
        ('{"kind": "fedprox", "mu": NaN}', "order: method.mu: "),
        ('{"kind": "fedprox", "mu": "1"}', "order: method.mu: Input should be a valid number"),
        ('{"kind": "fedprox", "mu": 1, "nu": 2}', "order: method.nu: Extra inputs are not permitted"),
        ('{"kind": "fedrep", "head_share": 1.0}', "order: method.head_share: Input should be less than 1"),
        ('{"kind": "frozen", "names": "fc1"}', "order: method.names: "),
    ],
)
def test_nonsense_is_told_in_one_line(text: str, message: str) -> None:
    with pytest.raises(WireError, match=message) as caught:
        Method.from_json(text)
    assert "\n" not in str(caught.value)
