"""How tensors of several clients lie in one sum, and which of them must not be in it."""

import numpy as np
import pytest
import torch

from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.secrecy.masks import Scale
from hyperbloom.server.loop.masks import MaskedSum

BODY, HEAD = ("body", (2, 3)), ("head", (4,))
FOUR = dict.fromkeys(range(4), ("body", "head"))


def sent(of: dict[int, tuple[str, ...]], **values: float) -> dict[int, Weights]:
    """Return what clients, by row, are sent: the tensors named, full of a number, by default 1."""
    found = {}
    for row, names in of.items():
        layout = Layout(tuple(item for item in (BODY, HEAD) if item[0] in names))
        filled = {name: torch.full(shape, values.get(f"{name}_{row}", 1.0)) for name, shape in layout.shapes}
        found[row] = Weights(layout, layout.flatten(filled))
    return found


def lengths(total: MaskedSum) -> list[int]:
    return list(total.lengths.values())


def sum_of(weights: dict[int, Weights], digest: bytes, threshold: int, **trained: Layout) -> MaskedSum:
    """Return the sum of clients that train all that they are sent, or else the layout `trained`."""
    layouts = {row: trained.get("trained", each.layout) for row, each in weights.items()}
    return MaskedSum(weights, layouts, digest, threshold)


def test_what_all_have_is_in_the_sum_once() -> None:
    total = sum_of(sent(FOUR), b"digest", 3)
    assert lengths(total) == [6, 4] and total.total == 10
    assert [total.owners[part] for part in total.slices] == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(("threshold", "summed"), [(3, [6, 0]), (4, [6, 4])])
def test_of_those_who_have_a_tensor_three_are_left_whoever_vanishes(
    threshold: int, summed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Of four clients one may vanish if three are enough: a head that three have would be a sum of two."""
    total = sum_of(sent(FOUR | {2: ("body",)}), b"digest", threshold)
    assert lengths(total) == summed
    assert ("4 weights are not summed: fewer than 4 clients of the round have them" in caplog.text) == (threshold == 3)


def test_who_was_sent_other_values_has_no_tensor_in_common() -> None:
    """Else a sum would tell what one client alone can have learned."""
    total = sum_of(sent(FOUR, head_1=2.0), b"digest", 3)
    assert lengths(total) == [6, 0, 0]
    assert list(total.owners.values()) == [[0, 1, 2, 3], [0, 2, 3], [1]], "all are told who was sent what"
    assert sum_of(sent(FOUR, **{f"head_{row}": float(row) for row in range(4)}), b"d", 3).total == 6


def test_the_digest_of_a_round_is_in_every_part() -> None:
    one, other = (set(sum_of(sent(FOUR), digest, 3).slices) for digest in (b"one", b"other"))
    assert len(one) == len(other) == 2 and not one & other


def test_a_mean_is_over_those_who_have_the_part_and_are_in_the_sum() -> None:
    """Clients 0 to 4 have the body, 1 to 4 the head; 4 has vanished, and 3 counts three times."""
    total = sum_of(sent({0: ("body",), **dict.fromkeys(range(1, 5), ("body", "head"))}), b"digest", 4)
    scale = Scale(5, 8.0, 30)
    weights = {row: scale.weight(examples) for row, examples in enumerate((10, 10, 10, 30))}
    words = np.zeros(10, np.uint32)
    for row, weight in weights.items():
        words += scale.encode(np.array([1.0 + row] * 6 + [10.0 * row if row else 0.0] * 4) / 100, weight)
    mean = total.mean(words, scale, weights)
    body, head = (1 + 2 + 3 + 3 * 4) / 6 / 100, (10 + 20 + 3 * 30) / 5 / 100
    np.testing.assert_allclose(mean, [body] * 6 + [head] * 4, atol=scale.bound / scale.limit)
    np.testing.assert_array_equal(total.gather(mean, 0), mean[:6])
    np.testing.assert_array_equal(total.gather(mean, 4), mean)


def test_what_is_sent_and_not_trained_is_in_no_sum() -> None:
    total = sum_of(sent(FOUR), b"digest", 4, trained=Layout((HEAD,)))
    assert lengths(total) == [0, 4] and total.total == 4
    assert total.gather(np.arange(4.0), 2).tolist() == [0, 1, 2, 3]


def test_what_is_not_in_the_sum_has_not_changed() -> None:
    total = sum_of(sent(FOUR | {2: ("body",)}), b"digest", 3)
    assert total.gather(np.ones(6), 0).tolist() == [1.0] * 6 + [0.0] * 4
    assert total.gather(np.ones(6), 2).tolist() == [1.0] * 6


def test_a_sum_that_no_clients_can_have_sent_is_refused() -> None:
    total, scale = sum_of(sent(FOUR), b"digest", 3), Scale(4, 8.0, 10)
    with pytest.raises(WireError, match="beyond what clients can have sent"):
        total.mean(np.full(10, 2**31 - 1, np.uint32), scale, dict.fromkeys(range(4), scale.weight(1)))
