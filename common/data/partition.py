"""Partition of a data set among clients.

Every client computes the whole partition from the labels and the seed, and takes its own part. Nobody has to send
indices, and no two clients get the same example. If a partitioner deals classes, a client's share of each class is the
same in the training, validation and test sets.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyperbloom.common.data.draws import IntArray, generator
from hyperbloom.common.data.flwr_datasets import FLWR_SPLITS, flwr_owners
from hyperbloom.common.data.pool import Pool
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.errors import DataError

Shares = NDArray[np.float64]
NOBODY = -1
REDRAWS = 100
TINY = 1e-300


@dataclass(frozen=True)
class Deal:
    """The owner of each example.

    Args:
        owners: For `train`, `val` and `test`, `(N,)`: the client of each example, or -1 for none.
        relabel: `(clients, num_classes)`: each client's label for each class, or None for the usual labels.
    """

    owners: Mapping[str, IntArray]
    relabel: IntArray | None = None

    def indices(self, client: int) -> dict[str, IntArray]:
        """Return the ascending indices of one client's examples in `train`, `val` and `test`."""
        return {name: np.flatnonzero(owners == client) for name, owners in self.owners.items()}


class Partitioner(NamedTuple):
    """A way to partition data: one line for a list, and a function, which raises DataError if the data forbid it."""

    description: str
    deal: Callable[[Pool, DataSpec], Deal]


def find_partitioner(name: str) -> Partitioner:
    """Return the partitioner with this name; DataError if there is none."""
    if name not in PARTITIONERS:
        raise DataError(f"split: expected one of {', '.join(PARTITIONERS)}, found {name!r}")
    return PARTITIONERS[name]


def deal_to_clients(pool: Pool, spec: DataSpec) -> Deal:
    """Deal a pool by the split of `spec`. Examples of one group, such as a patient, get the same client.

    Raises:
        DataError: There is no such split, or the data do not allow it.
    """
    deal = find_partitioner(spec.split).deal
    grouped = {name: part.groups for name, part in pool.portions.items() if part.groups is not None}
    if not grouped:
        return deal(pool, spec)
    # Deal one example for each group, and let the rest of the group follow it.
    firsts, followers = {}, {}
    for name, groups in grouped.items():
        _, firsts[name], followers[name] = np.unique(groups, return_index=True, return_inverse=True)
    leaders = replace(pool, **{name: getattr(pool, name).choose(first) for name, first in firsts.items()})
    dealt = deal(leaders, spec)
    return replace(dealt, owners={**dealt.owners, **{name: dealt.owners[name][of] for name, of in followers.items()}})


def deal_shares(pool: Pool, spec: DataSpec) -> Deal:
    """Deal `classes_per_client` classes to each client, unequally.

    For client `i` and each of its classes `c`, `a_ic ~ U(0.4, 0.6)`; the client gets `a_ic / sum_j a_jc` of the
    examples of `c`. Shamsian et al., "Personalized Federated Learning using Hypernetworks", ICML 2021, section 5.1,
    https://arxiv.org/abs/2103.04628
    """
    present = np.unique(pool.strata["train"])
    if spec.classes_per_client > len(present):
        found = f"{spec.classes_per_client}; lower it, or choose another split, such as iid"
        raise DataError(f"classes_per_client: expected at most {len(present)} classes of {pool.name}, found {found}")
    owned = _assign(spec.partitions, len(present), spec.classes_per_client, generator(spec.seed, "shares", "classes"))
    weights = np.zeros((spec.partitions, pool.num_strata))
    weights[:, present] = owned * generator(spec.seed, "shares", "weights").uniform(0.4, 0.6, owned.shape)
    return by_shares(pool, weights, spec.seed, "shares")


def _assign(clients: int, classes: int, each: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Give every client `each` distinct classes, so that the uses of any two classes differ by at most one."""
    owned = np.zeros((clients, classes), dtype=np.bool_)
    for client in range(clients):
        owned[client, np.lexsort((rng.random(classes), owned.sum(axis=0)))[:each]] = True  # the least used
    return owned


def deal_shards(pool: Pool, spec: DataSpec) -> Deal:
    """Sort the training examples by label, cut them into shards, and deal each client `classes_per_client` of them.

    A client's shares of the validation and test examples of each class are those of its shards. McMahan et al.,
    "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
    https://arxiv.org/abs/1602.05629
    """
    rng, size = generator(spec.seed, "shards"), len(pool.train)
    shards = spec.partitions * spec.classes_per_client
    dealt = rng.permutation(np.repeat(np.arange(spec.partitions), spec.classes_per_client))
    order = np.lexsort((rng.random(size), pool.strata["train"]))
    train = np.empty(size, dtype=np.int64)
    train[order] = dealt[np.arange(size) * shards // size]
    return _following(pool, train, spec)


def _following(pool: Pool, train: IntArray, spec: DataSpec) -> Deal:
    """Return the deal with these owners of the training examples; the others follow each client's class shares."""
    dealt, counts = train != NOBODY, np.zeros((spec.partitions, pool.num_strata))
    np.add.at(counts, (train[dealt], pool.strata["train"][dealt]), 1.0)
    return Deal({**by_shares(pool, counts, spec.seed, spec.split).owners, "train": train})


def deal_as_flower(pool: Pool, spec: DataSpec) -> Deal:
    """Deal the training examples by a partitioner of flwr-datasets, and the others by each client's class shares."""
    return _following(pool, flwr_owners(pool.strata["train"], spec), spec)


def deal_dirichlet(pool: Pool, spec: DataSpec) -> Deal:
    """Draw each client's distribution over the classes, `q_i ~ Dir(alpha)`, and deal equally many examples to each.

    The clients take turns in random order. In its turn a client draws one training example without replacement, from a
    class by `q_i`. Exhausted classes are not drawn any more. A client's shares of the validation and test examples of
    each class are those of its training examples. Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data
    Distribution for Federated Visual Classification", 2019, section 4, https://arxiv.org/abs/1909.06335
    """
    stock = np.bincount(pool.strata["train"], minlength=pool.num_strata)
    for attempt in range(REDRAWS):
        rng = generator(spec.seed, "dirichlet", attempt)
        wanted = rng.dirichlet(np.full(len(stock), spec.alpha), size=spec.partitions)
        deal = by_shares(pool, _drawn(wanted, stock, rng), spec.seed, "dirichlet")
        if all(len(np.unique(owners[owners != NOBODY])) == spec.partitions for owners in deal.owners.values()):
            return deal
    raise DataError(
        f"split 'dirichlet': expected every one of {spec.partitions} clients to get training, validation and test "
        f"examples of {pool.name}, found one without in each of {REDRAWS} draws with alpha {spec.alpha}; "
        "raise alpha or lower partitions"
    )


def _drawn(wanted: Shares, stock: IntArray, rng: np.random.Generator) -> IntArray:
    """Return how many of the `stock` `(classes,)` each client draws by its distribution, both `(clients, classes)`."""
    left, total = stock.copy(), int(stock.sum())
    counts = np.zeros(wanted.shape, dtype=np.int64)
    turns = rng.permutation(np.arange(total, dtype=np.int64) % len(wanted))
    edges = _edges(wanted, left)
    for client, draw in zip(turns.tolist(), rng.random(total).tolist(), strict=True):
        label = bisect_right(edges[client], draw)
        counts[client, label] += 1
        left[label] -= 1
        if not left[label]:
            edges = _edges(wanted, left)
    return counts


def _edges(wanted: Shares, left: IntArray) -> list[list[float]]:
    """Return each client's cumulative distribution over the classes with examples left."""
    able = wanted * (left > 0)
    # A client whose classes are all exhausted draws from what is left.
    able[able.sum(axis=1) < TINY] = left
    edges = able.cumsum(axis=1) / np.maximum(able.sum(axis=1, keepdims=True), TINY)
    # Set the edge of the last class with examples to 1, so that rounding cannot select an exhausted class after it.
    edges[:, int(np.max(np.flatnonzero(left), initial=0)) :] = 1.0
    return edges.tolist()


def deal_iid(pool: Pool, spec: DataSpec) -> Deal:
    """Deal the examples at random, equally many to each client up to one."""
    turns = {name: np.arange(len(part), dtype=np.int64) % spec.partitions for name, part in pool.portions.items()}
    return Deal({name: generator(spec.seed, "iid", name).permutation(each) for name, each in turns.items()})


def deal_concepts(pool: Pool, spec: DataSpec) -> Deal:
    """Deal as `iid`, but let clients of different concepts have different labels for the same class.

    Client `i` has concept `i % classes_per_client`. Concept 0 keeps the labels, and each other concept permutes them in
    its own way, so that their clients' objectives conflict. Sattler, Mueller, Samek, "Clustered Federated
    Learning", 2020, https://arxiv.org/abs/1910.01991; Ghosh et al., "An Efficient Framework for Clustered Federated
    Learning", NeurIPS 2020, https://arxiv.org/abs/2006.04088

    Raises:
        DataError: There are fewer permutations of the labels than concepts, or the labels are no classes.
    """
    if pool.kind != "classification":
        raise DataError(f"split 'concepts': expected classes, found {pool.name} with labels for {pool.kind}")
    classes, concepts = len(pool.class_names), spec.classes_per_client
    seen: dict[tuple[int, ...], None] = {tuple(range(classes)): None}
    most = int(np.prod(np.arange(1, min(classes, 12) + 1)))
    if concepts > most:
        raise DataError(f"classes_per_client: expected at most {most} concepts for {classes} classes, found {concepts}")
    rng = generator(spec.seed, "concepts")
    while len(seen) < concepts:
        seen[tuple(int(label) for label in rng.permutation(classes))] = None
    maps = np.array(list(seen), dtype=np.int64)
    return Deal(deal_iid(pool, spec).owners, maps[np.arange(spec.partitions) % concepts])


def deal_owners(pool: Pool, spec: DataSpec) -> Deal:
    """Make each owner, such as a hospital, a client, in the order of their names.

    With fewer clients than owners, whole owners are dealt at random, equally many to each client up to one.
    """
    count = len(pool.owner_names)
    if not count:
        advice = "; name a table's column of owners in its schema or as data.owner" if pool.schema else ""
        raise DataError(f"split 'owner': expected data that name their owners, found {pool.name} without{advice}")
    if spec.partitions > count:
        raise DataError(f"partitions: expected at most {count}, one owner each, found {spec.partitions}")
    client_of = np.arange(count, dtype=np.int64) % spec.partitions
    if spec.partitions < count:
        client_of = generator(spec.seed, spec.split).permutation(client_of)
    return Deal({name: client_of[part.owners] for name, part in pool.portions.items()})


def by_shares(pool: Pool, weights: NDArray[Any], seed: int, purpose: str) -> Deal:
    """Cut every class of every portion in proportion to the same `weights`, `(clients, num_classes)`."""
    shares = weights / np.maximum(weights.sum(axis=0), TINY)
    return Deal({name: _cut(strata, shares, generator(seed, purpose, name)) for name, strata in pool.strata.items()})


def _cut(labels: IntArray, shares: Shares, rng: np.random.Generator) -> IntArray:
    owners = np.full(len(labels), NOBODY, dtype=np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        # Round edges and not sizes, so that no example is lost and each size is off by at most one.
        edges = np.floor(np.cumsum(shares[:, label]) * len(members) + 1e-6)
        owner = np.searchsorted(edges, np.arange(len(members)), side="right")
        owners[members] = np.where(owner < len(shares), owner, NOBODY)
    return owners


PARTITIONERS: dict[str, Partitioner] = {
    "auto": Partitioner(
        "shares if the labels are classes, else iid",
        lambda pool, spec: (deal_shares if pool.kind == "classification" else deal_iid)(pool, spec),
    ),
    "shares": Partitioner("a few classes for each client, in unequal shares (pFedHN, section 5.1)", deal_shares),
    "shards": Partitioner("shards of the examples sorted by label (McMahan et al. 2017)", deal_shards),
    "dirichlet": Partitioner("class shares by a Dirichlet draw; alpha: how even (Hsu et al. 2019)", deal_dirichlet),
    "iid": Partitioner("examples at random, equally many for each client", deal_iid),
    "owner": Partitioner("each owner, such as a hospital, is a client, or several together", deal_owners),
    "concepts": Partitioner("iid images, but labels that conflict between groups of clients", deal_concepts),
    **{name: Partitioner(f"{name.removeprefix('flwr-')} of flwr-datasets", deal_as_flower) for name in FLWR_SPLITS},
}
