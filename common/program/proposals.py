"""Names for shell completion. They repeat the registries, because these import torch, which is slow for a TAB."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hyperbloom.common.program.plugins import Kind


STRATEGIES = """fedavg fedavg-ft fedhenn fedhenn-homogeneous fedma fedper fedprox fedrep ghn
ghn-server hafl-distillation lg-fedavg local odpfl per-fedavg pfedhn pfedhn-heads pfedhn-pc
pfedme pfl-ensemble pfl-nearest pfl-sampled""".split()  # noqa: SIM905
MODELS = """lenet mlp omniglot unet hafl-0 hafl-1 hafl-2 hafl-3 plain-4 plain-7 plain-10 plain-13 cnn-1 cnn-2 cnn-3
cnn-4 cnn-5 lstm-1 lstm-2""".split()  # noqa: SIM905
DATASETS = """digits diabetes heart-disease mnist fashion-mnist cifar10 cifar100 omniglot chest-xray-1000
chest-xray-14 airline-tweets""".split()  # noqa: SIM905
SPLITS = """auto shares shards dirichlet iid alphabet owner concepts flwr-iid flwr-dirichlet flwr-pathological
flwr-shard flwr-linear flwr-square flwr-exponential""".split()  # noqa: SIM905


def proposed(known: Sequence[str], kind: "Kind | None" = None) -> Callable[..., list[str]]:
    """Return a click completion function for known names and the names of plug-ins of a kind."""

    def propose(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        from hyperbloom.common.program.plugins import plugins

        return [name for name in (*known, *(plugins(kind) if kind else ())) if name.startswith(incomplete)]

    return propose
