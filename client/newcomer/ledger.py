"""The privacy budget that all descriptors of the same examples have spent."""

import json
import math
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hyperbloom.client.newcomer.guarantee import Guarantee, Promise
from hyperbloom.common.errors import ConfigError, HyperbloomError, RefusedError
from hyperbloom.common.files.storage import locked, write_json


class Ledger:
    """The entries of all descriptors that left a client: `STATE/privacy.json`.

    Guarantees add up (basic composition): descriptors with epsilon 0.3 and 0.5 together have epsilon 0.8. The same
    holds for delta. The client writes an entry before it sends a descriptor, so a crash leaves at most one entry too
    many.
    """

    def __init__(self, state: Path) -> None:
        self.path = state / "privacy.json"

    def spend(self, promised: Guarantee | None, budget: float | None, to: str) -> tuple[float, float] | None:
        """Enter a descriptor for a server before it is sent; return total epsilon and delta, None if one had no noise.

        Raises:
            RefusedError: the descriptor would exceed the budget. Nothing is entered.
            HyperbloomError: the ledger is damaged.
            ConfigError: the ledger cannot be written.
        """
        try:
            with locked(self.path):
                spent = self.afford(promised, budget)
                entry: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "server": to}
                entry |= asdict(promised) if promised else {"epsilon": None}
                write_json(self.path, {"spent": [*spent, entry]}, mode=0o600)
                return _total([*spent, entry])
        except OSError as error:
            raise ConfigError(f"--state-dir: cannot use {self.path.parent}: {error.strerror or error}") from None

    def read(self) -> list[dict[str, Any]]:
        """Return the entries so far; HyperbloomError if the file is damaged."""
        if not self.path.exists():
            return []
        try:
            entries = json.loads(self.path.read_text(encoding="utf-8"))["spent"]
            _total(entries)
            return list(entries)
        except (ValueError, KeyError, TypeError) as error:
            raise HyperbloomError(
                f"{self.path} is damaged ({error!r}), so it is not known what has been spent on privacy. Restore it "
                "from a backup; starting anew would forget what the server has seen"
            ) from None

    def afford(self, promised: Promise | None, budget: float | None) -> list[dict[str, Any]]:
        """Return the entries so far, if the budget allows a descriptor with this promise; errors as in `spend`."""
        spent = self.read()
        if promised is None or budget is None:
            return spent
        before, epsilon, delta = _total(spent), promised.epsilon, promised.delta
        if before is None:
            raise RefusedError(f"--budget: no budget holds: a descriptor without noise has left (see {self.path})")
        if before[0] + epsilon > budget * (1 + 1e-9):  # tolerance for sums of decimal fractions
            raise RefusedError(
                f"--budget: epsilon {before[0]:g} of {budget:g} has been spent (see {self.path}); another {epsilon:g} "
                "would be beyond it. Nothing was sent"
            )
        if before[1] + delta >= 1:
            raise RefusedError(
                f"--budget: delta {before[1]:g} has been spent (see {self.path}); with another {delta:g} nothing would "
                "be promised at all. Nothing was sent"
            )
        return spent


def _total(entries: list[dict[str, Any]]) -> tuple[float, float] | None:
    """Return the sums of epsilon and delta, or None if a descriptor had no noise."""
    if any(entry["epsilon"] is None for entry in entries):
        return None
    return math.fsum(float(e["epsilon"]) for e in entries), math.fsum(float(e["delta"]) for e in entries)
