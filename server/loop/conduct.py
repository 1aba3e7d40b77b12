"""Clients whose replies cannot be what they were asked for: counted, and left alone for a while if they go on.

Only a reply's content counts: wrong names, shapes or numbers, values that are not finite, norms and sizes beyond all
reason. Whoever is late, away, out of memory or says that its training diverged has failed, and is asked again.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["FIRST_TERM", "PATIENCE", "Conduct"]

PATIENCE = 3
"""Refused replies that lead to quarantine, the second time as the first."""

FIRST_TERM = 10
"""Rounds of the first quarantine; each further one is twice as long."""


@dataclass
class _Record:
    lies: int = 0  # since the last quarantine
    terms: int = 0  # quarantines so far
    until: int = 0  # last round of the last one

    def holds_in(self, round_number: int) -> bool:
        """Return whether there is a quarantine in this round, which may be number 0."""
        return self.terms > 0 and round_number <= self.until


class Conduct:
    """Who has lied how often, and who is in quarantine."""

    def __init__(self) -> None:
        """Know nothing bad of anybody."""
        self._records: dict[str, _Record] = {}

    def lied(self, name: str, round_number: int) -> int | None:
        """Count a refused reply; returns the last round of the quarantine that it leads to, if it does."""
        record = self._records.setdefault(name, _Record())
        record.lies += 1
        if record.lies < PATIENCE:
            return None
        term = FIRST_TERM * 2**record.terms
        record.lies, record.terms, record.until = 0, record.terms + 1, round_number + term
        return record.until

    def in_quarantine(self, name: str, round_number: int) -> bool:
        """Return whether a client is asked nothing in this round."""
        record = self._records.get(name)
        return record is not None and record.holds_in(round_number)

    def count_in_quarantine(self, round_number: int) -> int:
        """Return how many clients are asked nothing in this round."""
        return sum(record.holds_in(round_number) for record in list(self._records.values()))

    def to_json(self) -> dict[str, Any]:
        """Return what is known, as the roster stores it."""
        return {name: asdict(record) for name, record in self._records.items()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Conduct":
        """Read what `to_json` returned."""
        conduct = cls()
        conduct._records = {name: _Record(**record) for name, record in stored.items()}
        return conduct
