"""pFedHN's splits of sections 5.3 and 5.5, and the descriptor of appendix C.5, from their definitions."""

import numpy as np
import pytest
import torch

from figures.section_5_3 import SUPERCLASSES
from hyperbloom.common.errors import DataError
from tests.common.test_data_partition import PARTS, counts, deal, pool
from tests.strategies.conftest import digits_config, introduction, joined


def test_a_class_is_dealt_by_draws_normalised_over_clients() -> None:
    """At alpha 1e6 a novel client has p_j = 0.1: n_ij / n_novel,j = p_ij / 0.1, so a client's row sums to 10."""
    data, clients = pool(sizes=(4000, 1000, 1000)), 20
    dealt = deal(data, "section-5.3", clients, alpha=1e6)
    assert all((dealt.owners[part] >= 0).all() for part in PARTS)  # the shares of a class add up to 1
    found = counts(data, dealt, clients, "train").astype(float)
    novel = found[18:]
    np.testing.assert_allclose(novel[0], novel[1], rtol=0.03, atol=2)
    drawn = 0.1 * found[:18] / novel.mean(axis=0)
    np.testing.assert_allclose(drawn.sum(axis=1), 1, atol=0.03)
    # Dir(0.1) over ten classes: E sum_j p_j^2 = 1.1 / 2, with a deviation of 0.2 of one client.
    assert 0.4 < np.square(drawn).sum(axis=1).mean() < 0.7


def test_without_enough_examples_the_split_is_refused() -> None:
    with pytest.raises(DataError, match="expected examples of pool for each of 60 clients"):
        deal(pool(sizes=(10, 1, 1)), "section-5.3", 60)


def test_a_client_shares_a_superclass_with_every_twentieth() -> None:
    data = pool(classes=100, sizes=(50, 10, 10))
    found = counts(data, deal(data, "section-5.5", 40), 40, "train")
    assert sorted(SUPERCLASSES) == sorted(5 * "0123456789abcdefghij")
    for client, row in enumerate(found):
        assert {SUPERCLASSES[label] for label in np.flatnonzero(row)} == {"0123456789abcdefghij"[client % 20]}
        assert row[row > 0].tolist() == [25] * 5
    with pytest.raises(DataError, match="multiple of 20 clients, found 100 classes and 30 clients"):
        deal(data, "section-5.5", 30)


@pytest.mark.parametrize("scaled", [False, True])
def test_fixed_descriptors_are_a_clients_share_of_each_class_times_a_factor(scaled: bool) -> None:
    options = {"descriptor": "class-shares", "scaled": scaled}
    config = digits_config(strategy="figures.section_5_3:PFedHNFixed", clients=2, options=options)
    shares = {"a": (10, (0.8, 0.2, 0.0)), "b": (40, (0.3, 0.0, 0.7))}
    abouts = [introduction(name, train_examples=n, class_shares=part) for name, (n, part) in shares.items()]
    table = joined(config, *abouts).learner.table.weight
    factor = (6 / (0.4**2 + 0.6**2 + 1 + 1)) ** 0.5 if scaled else 1.0
    torch.testing.assert_close(table.detach(), factor * torch.tensor([[8 / 20, 1.0, 0.0], [12 / 20, 0.0, 1.0]]))
    assert not table.requires_grad
