"""Why a client contributed nothing to a round. Texts for people and counters are made from these values."""

from enum import StrEnum


class Reason(StrEnum):
    """The kinds of reasons. A text with details travels beside each."""

    # Found by the server.
    NO_REPLY = "timeout"
    """The reply did not arrive in time, or the node is gone."""
    UNREACHABLE = "unreachable"
    """The server could not deliver the order."""
    LEFT = "left"
    """The client left before the server sent the order."""
    BUSY = "busy"
    """The client still works on an earlier round."""
    DROPPED = "dropped"
    """The round was dropped as a whole."""
    STALE = "stale"
    """The reply answers an order that is too old."""
    CONTENT = "content"
    """The reply cannot be a correct answer to the order. It counts as a lie; missed deadlines count by themselves."""

    # Reported by the client.
    FAILED = "failed"
    """The client could not do the work. The text says why."""
    DIVERGED = "diverged"
    """The training diverged."""
    MEMORY = "memory"
    """The client ran out of memory."""
    FORBIDDEN = "forbidden"
    """The client's user does not allow what the order asks for."""
    UNFIT = "unfit"
    """The order does not fit this client."""
    LACKS_REFERENCE = "lacks-reference"
    """The client does not have the reference set of the order."""

    @classmethod
    def _missing_(cls, value: object) -> "Reason":
        return cls.FAILED  # from a client of a newer version

    @property
    def is_lie(self) -> bool:
        """Return whether the reason counts towards the client's quarantine."""
        return self is Reason.CONTENT
