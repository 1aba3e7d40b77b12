"""What happens to clients outside of their orders: they come, go, are refused, are waited for."""

from enum import StrEnum

__all__ = ["Event", "Kind"]


class Kind(StrEnum):
    """What an event is about, for those who count or filter; a string that is no `Event` is none of these."""

    JOINED = "joined"
    REFUSED = "refused"
    WAITING = "waiting"


class Event(str):
    """A line for people, with its kind beside it. It is a string, as most who hear of it only show or write it.

    Attributes:
        kind: what it is about.
        reason: the same for all clients to whom the same thing happens: no names, no times.
    """

    kind: Kind
    reason: str

    def __new__(cls, text: str, kind: Kind, reason: str = "") -> "Event":
        """Make one."""
        event = super().__new__(cls, text)
        event.kind, event.reason = kind, reason or text
        return event
