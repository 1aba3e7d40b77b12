"""The partitioners, proven on the labels of small pools."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperbloom.common.data import PARTITIONERS, DataSpec, load_client_data, partition
from hyperbloom.common.data.draws import IntArray, generator, hold_out, three_parts
from hyperbloom.common.data.partition import Deal
from hyperbloom.common.data.pool import Pool, Portion
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.errors import DataError

PARTS = ("train", "val", "test")


def portion(per_class: int, classes: int) -> Portion:
    """Return `per_class` examples of each class, in mixed order."""
    labels = np.tile(np.arange(classes), per_class)
    block = np.arange(len(labels), dtype=np.float32)[:, None]
    return Portion.of(block, labels)


def pool(classes: int = 10, sizes: tuple[int, int, int] = (400, 100, 100)) -> Pool:
    """Return a pool with `sizes` examples of each class in its three portions."""
    train, val, test = (portion(size, classes) for size in sizes)
    names = tuple(str(label) for label in range(classes))
    return Pool("pool", train, val, test, names, Scaling(1.0))


def deal(data: Pool, split: str, clients: int, **values: float) -> Deal:
    """Deal `data` among `clients`."""
    spec = DataSpec(split=split, partition=0, partitions=clients, **values)  # type: ignore[arg-type]
    return PARTITIONERS[split].deal(data, spec)


def counts(data: Pool, dealt: Deal, clients: int, part: str) -> IntArray:
    """Count the examples of every client and class, `(clients, classes)`."""
    labels, classes = data.portions[part].labels, len(data.class_names)
    return np.array([np.bincount(labels[dealt.indices(i)[part]], minlength=classes) for i in range(clients)])


def test_shares_use_every_class_equally_often_and_lose_nothing() -> None:
    data, clients = pool(), 50
    dealt = deal(data, "shares", clients)
    owned = counts(data, dealt, clients, "train") > 0
    assert owned.sum(axis=1).tolist() == [2] * clients
    assert owned.sum(axis=0).tolist() == [10] * 10
    assert all((dealt.owners[part] >= 0).all() for part in PARTS)


def test_shares_of_a_class_lie_within_the_bounds_of_the_draw() -> None:
    data, clients, sharing = pool(), 50, 10
    found = counts(data, deal(data, "shares", clients), clients, "train")
    low, high = 0.4 / (0.4 + (sharing - 1) * 0.6), 0.6 / (0.6 + (sharing - 1) * 0.4)
    shares = found[found > 0] / 400
    assert shares.min() >= low - 1 / 400
    assert shares.max() <= high + 1 / 400
    assert shares.std() > 0.005  # equal shares would be another experiment


@pytest.mark.parametrize("split", ["shares", "shards", "dirichlet"])
def test_shares_are_the_same_in_train_val_and_test(split: str) -> None:
    data, clients = pool(sizes=(4000, 1000, 1000)), 20
    dealt = deal(data, split, clients, alpha=0.5)
    train = counts(data, dealt, clients, "train") / 4000
    for part in ("val", "test"):
        assert np.abs(counts(data, dealt, clients, part) / 1000 - train).max() <= 1 / 1000 + 1 / 4000


@pytest.mark.parametrize(("clients", "each", "classes"), [(7, 3, 10), (1, 2, 10), (3, 10, 10), (13, 4, 5), (9, 1, 2)])
def test_shares_stay_balanced_where_nothing_divides(clients: int, each: int, classes: int) -> None:
    data = pool(classes)
    owned = counts(data, deal(data, "shares", clients, classes_per_client=each), clients, "test") > 0
    uses = owned.sum(axis=0)
    assert owned.sum(axis=1).tolist() == [each] * clients
    assert uses.max() - uses.min() <= 1


def test_shares_refuse_more_classes_than_there_are() -> None:
    with pytest.raises(
        DataError, match="classes_per_client: expected at most 4 classes of pool, found 5; lower it, or"
    ):
        deal(pool(4), "shares", 2, classes_per_client=5)


def test_shards_hold_few_classes_and_equal_numbers() -> None:
    data, clients = pool(), 50
    found = counts(data, deal(data, "shards", clients, classes_per_client=2), clients, "train")
    assert ((found > 0).sum(axis=1) <= 2).all()
    assert found.sum(axis=1).tolist() == [80] * clients


def test_shards_that_cross_a_class_bring_one_class_more_each() -> None:
    data, clients = pool(), 12
    found = counts(data, deal(data, "shards", clients, classes_per_client=1), clients, "train")
    assert ((found > 0).sum(axis=1) <= 2).all()
    assert found.sum(axis=1).max() - found.sum(axis=1).min() <= 1


def total_variation(alpha: float) -> float:
    """Return the mean distance of the clients' class shares from the uniform ones under `dirichlet`."""
    data = pool(sizes=(400, 400, 400))
    found = counts(data, deal(data, "dirichlet", 10, alpha=alpha), 10, "train")
    return float(np.abs(found / found.sum(axis=1, keepdims=True) - 0.1).sum(axis=1).mean() / 2)


def test_dirichlet_is_the_more_skewed_the_smaller_alpha() -> None:
    distances = [total_variation(alpha) for alpha in (0.1, 1.0, 100.0)]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0.5
    assert distances[2] < 0.1


def test_dirichlet_gives_clients_equal_numbers_by_distributions_of_their_own() -> None:
    data, clients = pool(), 4
    found = counts(data, deal(data, "dirichlet", clients, alpha=5.0), clients, "train")
    assert found.sum(axis=1).tolist() == [1000] * clients
    wanted = generator(0, "dirichlet", 0).dirichlet(np.full(10, 5.0), size=clients)
    assert np.abs(found / 1000 - wanted).max() < 0.08  # as far as a thousand draws and what is left allow
    assert np.abs(found / 1000 - np.roll(wanted, 1, axis=0)).max() > 0.1


@pytest.mark.parametrize("alpha", [1e-7, 0.05, 1e6])
def test_dirichlet_deals_every_training_example_whatever_is_wanted(alpha: float) -> None:
    data = pool(sizes=(40, 40, 40))
    found = counts(data, deal(data, "dirichlet", 7, alpha=alpha), 7, "train")
    assert found.sum(axis=0).tolist() == [40] * 10
    assert found.sum(axis=1).max() - found.sum(axis=1).min() <= 1


def test_dirichlet_draws_again_until_nobody_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    data, clients = pool(sizes=(10, 2, 2)), 10
    with monkeypatch.context() as patch:
        patch.setattr(partition, "REDRAWS", 1)
        with pytest.raises(DataError, match="found one without in each of 1 draws"):
            deal(data, "dirichlet", clients, alpha=0.05)
    dealt = deal(data, "dirichlet", clients, alpha=0.05)
    assert all((counts(data, dealt, clients, part).sum(axis=1) > 0).all() for part in PARTS)


def test_dirichlet_gives_up_and_says_what_to_change() -> None:
    message = "every one of 40 clients .* in each of 100 draws with alpha 0.01; raise alpha or lower partitions"
    with pytest.raises(DataError, match=message):
        deal(pool(2, (5, 5, 5)), "dirichlet", 40, alpha=0.01)


def test_iid_deals_everything_evenly() -> None:
    data = pool()
    found = counts(data, deal(data, "iid", 7), 7, "train")
    assert found.sum() == 4000
    assert found.sum(axis=1).max() - found.sum(axis=1).min() == 1
    assert np.abs(found / found.sum(axis=1, keepdims=True) - 0.1).max() < 0.06


def test_concepts_permute_the_labels_alike_for_all_clients_of_a_concept() -> None:
    dealt = deal(pool(), "concepts", 7, classes_per_client=3)
    assert dealt.relabel is not None
    assert dealt.relabel[0].tolist() == list(range(10))
    assert len({tuple(labels) for labels in dealt.relabel}) == 3
    for client, labels in enumerate(dealt.relabel):
        assert sorted(labels) == list(range(10))
        assert labels.tolist() == dealt.relabel[client % 3].tolist()
    other = deal(pool(), "concepts", 7, classes_per_client=3, seed=1)
    assert other.relabel is not None
    assert other.relabel[1].tolist() != dealt.relabel[1].tolist()


def test_concepts_change_the_labels_and_nothing_else() -> None:
    spec = {"partition": 4, "partitions": 6, "classes_per_client": 3}
    plain = load_client_data(DataSpec(split="iid", **spec))  # type: ignore[arg-type]
    moved = load_client_data(DataSpec(split="concepts", **spec))  # type: ignore[arg-type]
    for part in PARTS:
        before, after = getattr(plain, part), getattr(moved, part)
        assert torch.equal(before.inputs, after.inputs)
        shown = [moved.class_names[label] for label in after.labels]
        assert shown == [plain.class_names[label] for label in before.labels]
    assert not torch.equal(plain.train.labels, moved.train.labels)


def test_concepts_refuse_more_than_there_are_permutations() -> None:
    assert deal(pool(2), "concepts", 2, classes_per_client=2).relabel is not None
    with pytest.raises(DataError, match="at most 2 concepts for 2 classes, found 3"):
        deal(pool(2), "concepts", 3, classes_per_client=3)


def test_a_client_without_examples_is_named() -> None:
    message = r"client \d+ of 900: expected examples in val, found none of the 359 .* lower partitions"
    with pytest.raises(DataError, match=message):
        for client in range(850, 900):
            load_client_data(DataSpec(split="iid", partition=client, partitions=900))


@settings(max_examples=40, deadline=None)
@given(
    split=st.sampled_from(["shares", "shards", "dirichlet", "iid", "concepts"]),
    clients=st.integers(1, 12),
    classes=st.integers(2, 6),
    each=st.integers(1, 2),
    seed=st.integers(0, 2**40),
)
def test_clients_never_share_an_example(split: str, clients: int, classes: int, each: int, seed: int) -> None:
    data = pool(classes, (60, 30, 30))
    dealt = deal(data, split, clients, classes_per_client=each, alpha=5.0, seed=seed)
    for part in PARTS:
        taken = np.concatenate([dealt.indices(client)[part] for client in range(clients)])
        assert len(set(taken)) == len(taken)
        # only `shares` may leave classes to nobody, when there are fewer slots than classes
        dealt_classes = min(classes, clients * each) if split == "shares" else classes
        assert len(taken) == dealt_classes * len(data.portions[part]) // classes


@settings(max_examples=60, deadline=None)
@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=80), percent=st.integers(0, 100))
def test_holding_out_is_exact_and_proportional(labels: list[int], percent: int) -> None:
    strata = np.array(labels)
    count = len(labels) * percent // 100
    kept, held = hold_out(strata, count, generator(0, "test"))
    assert sorted([*kept, *held]) == list(range(len(labels)))
    assert len(held) == count
    expected = np.bincount(strata) * count / len(labels)
    assert np.abs(np.bincount(strata[held], minlength=len(expected)) - expected).max(initial=0) <= 1


def test_three_parts_have_the_sizes_asked_for() -> None:
    labels = np.repeat(np.arange(5), 20)
    train, val, test = three_parts(labels, 0.15, generator(0, "test"))
    assert [np.bincount(labels[part]).tolist() for part in (train, val, test)] == [[14] * 5, [3] * 5, [3] * 5]


def test_draws_for_two_purposes_are_independent() -> None:
    draws = {generator(0, *purpose).integers(2**62) for purpose in (("a", 1), ("a", 2), ("b", 1), ("a",))}
    assert len(draws) == 4
    assert generator(7, "a").integers(2**62) == generator(7, "a").integers(2**62)
