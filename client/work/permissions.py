"""The user's limits on what may leave the client and how often, whatever the server orders."""

from torch import nn

from hyperbloom.client.work.client import Client
from hyperbloom.client.work.scoring import has_running_norms
from hyperbloom.common.errors import HyperbloomError
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import EvaluateOrder


def check_release(client: Client, noise: float | None = None, masked: bool = False) -> None:
    """Check and count a release that depends on training examples (--min-noise, --min-masked, --max-changes).

    `noise` is in units of its norm, and `masked` says that the server sees it only in a sum.

    Raises:
        HyperbloomError: the user does not allow it.
    """
    if not masked:
        check_sum(client, "a change by itself", 0)
    least = client.settings.min_noise
    if least is not None and (noise or 0.0) < least:
        raise HyperbloomError(
            f"the client sends nothing with noise below {least:g} times its norm (--min-noise), found {noise or 0:g}",
            reason=Reason.FORBIDDEN,
        )
    client.releases.spend("changes")


def check_sum(client: Client, found: str, clients: int) -> None:
    """Check that a sum has as many clients as the user requires; `found` describes it in errors, and 0 means no sum.

    Raises:
        HyperbloomError: the user does not allow it.
    """
    fewest = client.settings.min_masked
    if fewest is not None and clients < fewest:
        raise HyperbloomError(
            f"the client sends changes in sums of at least {fewest} clients alone (--min-masked), found {found}",
            reason=Reason.FORBIDDEN,
        )


def count_score(client: Client, order: EvaluateOrder, module: nn.Module) -> None:
    """Count a score that depends on training examples: the loss of a refined model can reveal their labels.

    Raises:
        HyperbloomError: the user allows no more scores.
    """
    if order.target.private != "none" or order.refinement is not None or has_running_norms(module):
        client.releases.spend("scores")
