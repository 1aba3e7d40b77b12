"""The attacks: what is beyond a bound is told, and a lie is what a client's user would not have it carry out."""

from dataclasses import replace

from hyperbloom.common.wire.orders import TrainOrder
from hyperbloom.common.wire.pack import unpack
from siege.attacks import bounds, excess
from siege.lying_server import HARMLESS, LIES, TRUSTING


def test_what_costs_more_than_its_bound_is_named() -> None:
    most = bounds("stranger", 600)
    assert most.lost_s == 63 and most.kept == 50, "a tenth of the rounds, and three seconds"
    assert excess(most, most) == []
    assert excess(replace(most, kept=51.0, recovery_s=11.5), most) == ["kept 51.0, of 50.0", "recovery_s 11.5, of 10.0"]


def test_lies_are_orders_that_can_be_read() -> None:
    noise = {}
    for what in ("a change without noise", "a change with noise", "a private part"):
        kind, content = LIES[what]()
        assert kind == TrainOrder.message_type
        noise[what] = unpack(TrainOrder, content).noise
    assert [noise[what] is not None for what in noise] == [False, True, False]
    assert not HARMLESS & TRUSTING and set(LIES) > HARMLESS | TRUSTING
