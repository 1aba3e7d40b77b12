r"""pFedHN's other splits, of sections 5.3 and 5.5 and of appendix C.5, and its fixed descriptor.

Shamsian, Navon, Fetaya, Chechik: Personalized Federated Learning using Hypernetworks, ICML 2021,
https://arxiv.org/abs/2103.04628. Importing this module registers two splits:

    section-5.3   client i draws p_i ~ Dir(a, ..., a) over the classes; p^_ij = p_ij / sum_i p_ij is its share of class
                  j. The last tenth of the clients has a = `data.alpha`, and all others have 0.1
    section-5.5   CIFAR-100: client i shares the images of superclass i mod 20 equally with the others of it

`split: dirichlet` is another split: there, all clients get equally many examples (Hsu et al. 2019).

    python -m figures.section_5_3 --engine inline --strategy pfedhn --data cifar10 --split section-5.3 \
        --set data.alpha=0.25 --clients 100 --set novel=10     # figures 2 and 4: flower-server with these splits
    python -m figures.reproduce pfedhn-c5 --column cifar10-50      # appendix C.5
"""

import sys
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from hyperbloom.common.data.draws import generator
from hyperbloom.common.data.partition import NOBODY, PARTITIONERS, REDRAWS, Deal, Partitioner, by_shares
from hyperbloom.common.data.pool import Pool
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.errors import DataError
from hyperbloom.server.cli import main
from hyperbloom.strategies.exchange import Client
from hyperbloom.strategies.pfedhn import PFedHN, PFedHNOptions

ALPHA = 0.1
SUPERCLASSES = "41e80677i33e9i7b397b6b5a76df3f0b1aceg9b55j88fdehiag4h420h4iha32ccgc19j2a01gc9dfdgj246j558ji12f60h8ed"
"""The superclass of each of CIFAR-100's classes in alphabetical order, as a digit to base 20."""


def deal_section_5_3(pool: Pool, spec: DataSpec) -> Deal:
    """Deal each class by the clients' draws from a Dirichlet distribution, normalised over clients.

    Draws in which a client gets no examples of one part are repeated.
    """
    alphas = np.full(spec.partitions, ALPHA)
    alphas[spec.partitions - spec.partitions // 10 :] = spec.alpha
    for attempt in range(REDRAWS):
        rng = generator(spec.seed, "section-5.3", attempt)
        drawn = np.stack([rng.dirichlet(np.full(pool.num_strata, alpha)) for alpha in alphas])
        deal = by_shares(pool, drawn, spec.seed, "section-5.3")
        if all(len(np.unique(owners[owners != NOBODY])) == spec.partitions for owners in deal.owners.values()):
            return deal
    raise DataError(
        f"split 'section-5.3': expected examples of {pool.name} for each of {spec.partitions} clients, found one "
        f"without in each of {REDRAWS} draws; lower partitions"
    )


def deal_section_5_5(pool: Pool, spec: DataSpec) -> Deal:
    """Deal the images of each superclass of CIFAR-100 to the clients of it, equally many to each."""
    if pool.num_strata != len(SUPERCLASSES) or spec.partitions % 20:
        found = f"{pool.num_strata} classes and {spec.partitions} clients"
        raise DataError(f"split 'section-5.5': expected CIFAR-100 and a multiple of 20 clients, found {found}")
    superclass = np.array([int(letter, 20) for letter in SUPERCLASSES])
    shares = (np.arange(spec.partitions)[:, None] % 20 == superclass).astype(float)
    return by_shares(pool, shares, spec.seed, "section-5.5")


class PFedHNFixedOptions(PFedHNOptions):
    """Options of pFedHN with the paper's fixed descriptor."""

    descriptor: Literal["class-shares"] = Field(  # type: ignore[assignment]
        "class-shares", description="made of the class shares that clients disclose"
    )
    scaled: bool = Field(
        False, description="multiply all by one factor: their root mean square is 1, as of learned ones at their start"
    )


class PFedHNFixed(PFedHN):
    """pFedHN whose descriptors are p^, the clients' shares of each class (appendix C.5).

    `descriptor: class-shares` of pFedHN itself has the shares of the classes in each client instead, and a factor.
    """

    options: PFedHNFixedOptions  # type: ignore[assignment]

    def join(self, client: Client, first: bool) -> None:
        """Normalise all descriptors over the clients that there are now."""
        super().join(client, first)
        abouts = [each.about for _, each in sorted(self.clients.items())]
        counts = torch.tensor([[about.train_examples * share for share in about.class_shares] for about in abouts])
        shares = counts / counts.sum(0).clamp_min(1.0)
        size = shares.square().mean().sqrt() if self.options.scaled else 1.0  # a learned one starts standard normal
        self.learner.table.weight.data.copy_(shares / size)


PARTITIONERS["section-5.3"] = Partitioner("Dirichlet, normalised over clients (pFedHN, section 5.3)", deal_section_5_3)
PARTITIONERS["section-5.5"] = Partitioner("a superclass of CIFAR-100 each (pFedHN, section 5.5)", deal_section_5_5)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
