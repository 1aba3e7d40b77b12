"""Events beside the orders: clients join, leave, are refused, are waited for."""

from enum import StrEnum


class Kind(StrEnum):
    """What an event is about, for code that counts or filters. A plain string has no kind."""

    JOINED = "joined"
    REFUSED = "refused"
    WAITING = "waiting"


class Event(str):
    """A line for people, with its kind. It is a string because most receivers only show or write it.

    Attributes:
        kind: what it is about.
        reason: the text without names and times, so that equal events of different clients can be grouped.
    """

    kind: Kind
    reason: str

    def __new__(cls, text: str, kind: Kind, reason: str = "") -> "Event":
        """Make an event; `reason` defaults to the text."""
        event = super().__new__(cls, text)
        event.kind, event.reason = kind, reason or text
        return event
