"""Draws that favour nobody, and exchanges that are played inside of others."""

import itertools
from collections import Counter
from typing import Any

import pytest

from hyperbloom.common.errors import ConfigError
from hyperbloom.strategies.exchange import Ask, Client, Exchanges, Train, ask, draw, resume, through, train

from .conftest import introduction


def clients(names: str) -> list[Client]:
    return [Client(name, row, introduction(name)) for row, name in enumerate(names)]


def test_a_draw_is_decided_by_seed_and_round_and_comes_in_order_of_rows() -> None:
    there = clients("abcdefghij")
    for number in range(30):
        drawn = draw(0, number, 4, there)
        assert len({client.row for client in drawn}) == 4
        assert [client.row for client in drawn] == sorted(client.row for client in drawn)
        assert drawn == draw(0, number, 4, iter(there))
    assert len({tuple(c.row for c in draw(0, number, 4, there)) for number in range(30)}) > 20
    assert sum(draw(0, number, 4, there) == draw(1, number, 4, there) for number in range(30)) < 5


def test_a_draw_is_uniform() -> None:
    count, size, rounds = 10, 3, 3000
    there = clients("abcdefghij")
    drawn = [tuple(client.row for client in draw(0, number, size, there)) for number in range(rounds)]
    single = Counter(itertools.chain.from_iterable(drawn))
    pairs = Counter(pair for rows in drawn for pair in itertools.combinations(rows, 2))
    # Counts of draws without replacement are negatively correlated: scaled so, the sum is chi-squared, n - 1 degrees.
    share = size / count
    statistic = sum((single[row] - rounds * share) ** 2 for row in range(count))
    statistic *= (count - 1) / count / (rounds * share * (1 - share))
    assert statistic < 27.88  # the 0.999 quantile for 9 degrees
    expected = rounds * size * (size - 1) / (count * (count - 1))
    assert len(pairs) == 45
    assert all(abs(found - expected) < 4.5 * expected**0.5 for found in pairs.values())


def test_a_draw_asks_for_no_more_than_there_are_and_depends_on_nobody_else() -> None:
    some = clients("abcdef")[4:]
    assert {c.client_id for number in range(20) for c in draw(0, number, 1, some)} == {"e", "f"}
    assert [c.client_id for c in draw(0, 0, 5, some)] == ["e", "f"]
    assert draw(0, 0, 3, []) == []
    alone = clients("bdf")  # of other rows, but as many
    for number in range(20):
        names = [
            client.client_id for client in draw(0, number, 2, [c for c in clients("abcdef") if c.client_id in "bdf"])
        ]
        assert names == [client.client_id for client in draw(0, number, 2, alone)]


@pytest.mark.parametrize("found", [None, 3, [1]])
def test_what_is_no_exchange_is_told_to_the_strategys_author(found: object) -> None:
    def careless() -> Exchanges[None]:
        yield found  # type: ignore[misc]

    for wrong in (found, careless(), through(careless(), train), through(found, train)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"expected a strategy's exchanges, such as `updates = yield from train"):
            resume(wrong, None)


def test_exchanges_that_train_are_played_by_another_and_the_others_pass() -> None:
    """What noise, codecs and masks need: to stand between an algorithm and its clients."""
    first: Ask[str] = Ask(clients("a"), lambda some: [])
    second = Train(clients("b"), lambda some: [])

    def algorithm() -> Exchanges[str]:
        described = yield from ask(first)
        updates: Any = yield from train(second)
        return f"{described} {updates}"

    def protected(wanted: Train) -> Exchanges[Any]:
        before: Any = yield first
        found: Any = yield wanted
        return [before, found, "noise"]

    played = through(algorithm(), protected)
    assert next(played) is first
    assert played.send(["described"]) is first
    assert played.send(["keys"]) is second
    with pytest.raises(StopIteration) as over:
        played.send(["trained"])
    assert over.value.value == "['described'] [['keys'], ['trained'], 'noise']"
