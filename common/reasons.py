"""Why a client brought nothing to a round: one value each, from which people's texts and counters are made."""

from enum import StrEnum

__all__ = ["Reason"]


class Reason(StrEnum):
    """The kinds of reasons; a text that says more travels beside them."""

    # The server found out.
    NO_REPLY = "timeout"
    """Its reply did not come in time, or its node is gone."""
    UNREACHABLE = "unreachable"
    """Its order could not be delivered."""
    LEFT = "left"
    """It left before it was asked."""
    BUSY = "busy"
    """It still works on an earlier round."""
    DROPPED = "dropped"
    """The round as a whole could not learn from anybody."""
    STALE = "stale"
    """Its reply answers an order that is too old."""
    CONTENT = "content"
    """Its reply cannot be what it was asked for. Only this reason is held against a client."""

    # The client said so.
    FAILED = "failed"
    """It could not do the work; the text says why."""
    DIVERGED = "diverged"
    """Its training diverged."""
    MEMORY = "memory"
    """Its memory was not enough."""
    FORBIDDEN = "forbidden"
    """Its user does not allow what the order asks for."""
    UNFIT = "unfit"
    """The order does not fit this client."""
    LACKS_REFERENCE = "lacks-reference"
    """It does not have the reference set of the order."""

    @property
    def is_lie(self) -> bool:
        """Return whether it is held against the client: it counts towards quarantine."""
        return self is Reason.CONTENT
