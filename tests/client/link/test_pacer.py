"""How often a client polls: fast while a run is active, seldom when nothing happens."""

import heapq
import random

import pytest

from hyperbloom.client.link.pacer import Pacer


@pytest.fixture
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `random.uniform` return the middle."""
    monkeypatch.setattr(random, "uniform", lambda low, high: (low + high) / 2)


@pytest.mark.usefixtures("no_jitter")
def test_after_a_message_waits_grow_from_milliseconds_to_the_active_bound() -> None:
    pacer = Pacer()
    pacer.message(100.0)
    waits = [pacer.delay(100.0 + number / 100) for number in range(8)]
    assert waits == pytest.approx([0.0075, 0.01125, 0.016875, 0.0253125, 0.03796875, 0.05, 0.05, 0.05])
    pacer.message(101.0)
    assert pacer.delay(101.0) == pytest.approx(0.0075)


@pytest.mark.usefixtures("no_jitter")
def test_without_messages_waits_grow_to_seconds() -> None:
    pacer = Pacer()
    pacer.message(0.0)
    assert max(pacer.delay(29.9) for _ in range(50)) == pytest.approx(0.05)
    waits = [pacer.delay(30.0) for _ in range(20)]
    assert waits[0] == pytest.approx(0.075)
    assert waits[-1] == pytest.approx(3.0)
    assert waits == sorted(waits)
    pacer.message(31.0)
    assert pacer.delay(31.0) == pytest.approx(0.0075)


@pytest.mark.usefixtures("no_jitter")
def test_a_client_that_has_heard_nothing_yet_is_idle() -> None:
    pacer = Pacer()
    assert [pacer.delay(float(number)) for number in range(30)][-1] == pytest.approx(3.0)


def test_jitter_is_a_quarter_either_way() -> None:
    pacer = Pacer()
    waits = [pacer.delay(0.0) / 3.0 for _ in range(2030)][30:]  # the first ones grow
    assert 0.75 <= min(waits) < 0.76
    assert 1.24 < max(waits) <= 1.25
    assert sum(waits) / 2000 == pytest.approx(1.0, abs=0.02)


def test_jitter_does_not_add_up() -> None:
    pacer = Pacer()
    assert all(pacer.delay(0.0) <= 3.75 for _ in range(1000))


@pytest.mark.usefixtures("no_jitter")
def test_a_client_in_a_run_waits_longer_for_a_server_that_answers_slowly() -> None:
    pacer = Pacer()
    pacer.message(0.0)
    assert pacer.delay(0.01, latency=0.001) == pytest.approx(0.0075)
    assert pacer.delay(0.02, latency=0.04) == pytest.approx(0.12)
    assert pacer.delay(0.03, latency=0.001) == pytest.approx(0.016875)  # as if nothing had been slow
    assert pacer.delay(0.04, latency=20.0) == pytest.approx(0.5)


@pytest.mark.usefixtures("no_jitter")
def test_an_idle_client_waits_longer_for_a_server_that_answers_slowly() -> None:
    pacer = Pacer()
    assert [pacer.delay(float(number), latency=0.005) for number in range(30)][-1] == pytest.approx(3.0)
    assert pacer.delay(40.0, latency=1.0) == pytest.approx(20.0)
    assert pacer.delay(50.0, latency=600.0) == pytest.approx(60.0)  # it was away, which says nothing of its load
    assert pacer.delay(60.0, latency=0.005) == pytest.approx(48.0)
    assert [pacer.delay(60.0 + number, latency=0.005) for number in range(20)][-1] == pytest.approx(3.0)
    pacer.message(90.0)
    assert pacer.delay(91.0, latency=1.0) == pytest.approx(0.5)  # but a run does not wait for seconds


@pytest.mark.parametrize("clients", [100, 10_000])
def test_idle_clients_leave_the_server_time_to_breathe(clients: int) -> None:
    """A server of 250 answers a second and its queue: the clients find out by themselves how often they may ask."""
    service, now, free_at = 1 / 250, 0.0, 0.0
    pacers = [Pacer() for _ in range(clients)]
    random.seed(0)
    due = [(random.uniform(0.0, 3.0), index) for index in range(clients)]
    heapq.heapify(due)
    latencies = []
    while now < 1200.0:
        now, index = heapq.heappop(due)
        free_at = max(free_at, now) + service
        latencies.append(free_at - now)
        heapq.heappush(due, (free_at + pacers[index].delay(free_at, free_at - now), index))
    # At a poll every three seconds each, an answer would take 36 s, for ever.
    assert sum(latencies[-20_000:]) / 20_000 < 4.0
