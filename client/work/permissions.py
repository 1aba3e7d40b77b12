"""What the client's user allows to leave: --min-noise and --min-masked, whatever the server orders."""

from hyperbloom.client.settings import ClientSettings
from hyperbloom.common.errors import HyperbloomError
from hyperbloom.common.reasons import Reason

__all__ = ["check_release", "check_sum"]


def check_release(settings: ClientSettings, noise: float | None = None, masked: int = 0) -> None:
    """Let nothing made of training examples leave but as the user wants: in a sum, and with noise.

    Args:
        settings: the client's.
        noise: with which it leaves, in units of its norm.
        masked: clients in the sum in which it leaves; 0 if the server sees it by itself.

    Raises:
        HyperbloomError: the user does not allow it.
    """
    check_sum(settings, masked)
    least = settings.min_noise
    if least is not None and (noise or 0.0) < least:
        raise HyperbloomError(
            f"the client sends nothing with noise below {least:g} times its norm (--min-noise), found {noise or 0:g}",
            reason=Reason.FORBIDDEN,
        )


def check_sum(settings: ClientSettings, clients: int) -> None:
    """Let no change be in a sum of fewer clients than the user wants; 0 is no sum.

    Raises:
        HyperbloomError: the user does not allow it.
    """
    fewest = settings.min_masked
    if fewest is not None and clients < fewest:
        found = f"one of {clients}" if clients else "a change by itself"
        raise HyperbloomError(
            f"the client sends changes in sums of at least {fewest} clients alone (--min-masked), found {found}",
            reason=Reason.FORBIDDEN,
        )
