"""Quarantine: clients whose replies are refused for their content are counted, and left out for some rounds.

Only the content of a reply counts: wrong names, shapes or numbers, values that are not finite, excessive norms or
sizes. A client that is late, away, out of memory or reports that its training diverged has failed; it is asked again.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

PATIENCE = 3
"""Number of refused replies that lead to a quarantine."""

FIRST_TERM = 10
"""Rounds of the first quarantine. Each further quarantine of a client is twice as long."""


@dataclass
class _Record:
    lies: int = 0  # refused replies since the last quarantine
    terms: int = 0  # quarantines so far
    until: int = 0  # last round of the latest quarantine

    def holds_in(self, round_number: int) -> bool:
        """Return whether the client is in quarantine in this round. Round 0 exists."""
        return self.terms > 0 and round_number <= self.until


class Conduct:
    """Counts refused replies by client, and knows who is in quarantine."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def lied(self, name: str, round_number: int) -> int | None:
        """Count a refused reply; return the last round of the quarantine that it causes, or None."""
        record = self._records.setdefault(name, _Record())
        record.lies += 1
        if record.lies < PATIENCE:
            return None
        term = FIRST_TERM * 2**record.terms
        record.lies, record.terms, record.until = 0, record.terms + 1, round_number + term
        return record.until

    def in_quarantine(self, name: str, round_number: int) -> bool:
        """Return whether a client gets no orders in this round."""
        record = self._records.get(name)
        return record is not None and record.holds_in(round_number)

    def count_in_quarantine(self, round_number: int) -> int:
        """Return how many clients get no orders in this round."""
        return sum(record.holds_in(round_number) for record in list(self._records.values()))

    def to_json(self) -> dict[str, Any]:
        """Return all records as the roster stores them."""
        return {name: asdict(record) for name, record in self._records.items()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Conduct":
        """Read what `to_json` returned."""
        conduct = cls()
        conduct._records = {name: _Record(**record) for name, record in stored.items()}
        return conduct
