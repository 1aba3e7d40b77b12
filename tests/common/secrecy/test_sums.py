"""What masks are bound to: everything that clients are told alike, and nothing else."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hyperbloom.common.compression import Codec
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.methods import FedProx
from hyperbloom.common.secrecy.sums import part_digests, signed_keys, signed_set, told
from hyperbloom.common.wire.masks import MaskedOrder, Masking
from hyperbloom.common.wire.orders import SGD, Noise, Scope, Target
from hyperbloom.common.wire.pack import pack, unpack

WEIGHTS = Weights(Layout((("w", (2,)),)), torch.ones(2))
ORDER = MaskedOrder(
    scope=Scope("run", 1, 2**62 + 1),
    target=Target("mlp", 10, "none"),
    sgd=SGD(5, 8, 0.1, 0.9, 0.0, 50.0),
    reply="weights",
    weights=WEIGHTS,
    masking=Masking(there=(0, 1, 2), sealed=(b"a",), digests=(b"b",), parts=(b"p",), lengths=(2,), owners=(b"\7",)),
)


def test_what_differs_between_clients_by_its_nature_is_not_bound() -> None:
    """Weights are bound by the digests of the parts."""
    masking = replace(ORDER.masking, sealed=(b"others",), digests=(b"others",))
    assert told(b"d", replace(ORDER, weights=None, masking=masking)) == told(b"d", ORDER)


def test_the_wire_changes_nothing_of_it() -> None:
    """A whole number where a fraction belongs arrives as a fraction."""
    sent = replace(ORDER, sgd=SGD(5, 8, 1, 0, 0, 50))
    assert told(b"d", unpack(MaskedOrder, pack(sent))) == told(b"d", sent) != told(b"d", ORDER)


CHANGES: dict[str, Callable[[MaskedOrder], MaskedOrder]] = {
    "scope": lambda order: replace(order, scope=replace(order.scope, seed=2**62)),  # the same as a double
    "target": lambda order: replace(order, target=replace(order.target, private="head")),
    "sgd": lambda order: replace(order, sgd=replace(order.sgd, learning_rate=0.2)),
    "method": lambda order: replace(order, method=FedProx(mu=0.5)),
    "codec": lambda order: replace(order, codec=Codec.parse("int8")),
    "noise": lambda order: replace(order, noise=Noise(1.0, 2.0)),
    "quiet": lambda order: replace(order, quiet=True),
    "there": lambda order: replace(order, masking=replace(order.masking, there=(0, 1, 3))),
    "parts": lambda order: replace(order, masking=replace(order.masking, parts=(b"q",))),
    "lengths": lambda order: replace(order, masking=replace(order.masking, lengths=(3,))),
    "owners": lambda order: replace(order, masking=replace(order.masking, owners=(b"\6",))),
}


@pytest.mark.parametrize("what", CHANGES)
def test_all_else_is_bound(what: str) -> None:
    assert told(b"d", CHANGES[what](ORDER)) != told(b"d", ORDER)
    assert told(b"other clients", ORDER) != told(b"d", ORDER)


def test_a_part_is_a_tensor_of_one_name_shape_and_value_in_one_round() -> None:
    """Clients that were sent another one share no part, so it is in no sum of theirs."""

    def digest(name: str = "w", shape: tuple[int, ...] = (2, 3), value: float = 1.0, of: bytes = b"d") -> bytes:
        weights = Weights(Layout(((name, shape),)), torch.full((6,), value))
        ((found, known),) = part_digests(weights, of).items()
        assert known == name
        return found

    several = [digest(), digest("v"), digest(shape=(3, 2)), digest(shape=(6,)), digest(value=1.5), digest(of=b"e")]
    assert len(set(several)) == len(several) and digest() == several[0]


def test_a_tensor_without_values_is_no_part() -> None:
    weights = Weights(Layout((("none", (0, 3)), ("w", (2,)))), torch.ones(2))
    assert list(part_digests(weights, b"d").values()) == ["w"]


def test_a_signature_is_of_one_run_round_and_pair_of_keys_and_of_one_set() -> None:
    keys = [("run", 1, b"a", b"b"), ("rum", 1, b"a", b"b"), ("run", 2, b"a", b"b"), ("run", 1, b"c", b"b")]
    sets = [(b"d", (0, 1), (2,)), (b"e", (0, 1), (2,)), (b"d", (0,), (2,)), (b"d", (0, 1), (3,)), (b"d", (0, 1, 2), ())]
    told = [signed_keys(*each) for each in (*keys, ("run", 1, b"a", b"c"))] + [signed_set(*each) for each in sets]
    assert len(set(told)) == len(told) == 10
