"""Events beside the orders: clients join, leave, are refused."""

from enum import StrEnum


class Kind(StrEnum):
    """What an event is about, for code that counts or filters. A plain string has no kind."""

    JOINED = "joined"
    REFUSED = "refused"


class Event(str):
    """A line for people, with its kind. It is a string because most receivers only show or write it."""

    kind: Kind

    def __new__(cls, text: str, kind: Kind) -> "Event":
        """Make an event."""
        event = super().__new__(cls, text)
        event.kind = kind
        return event
