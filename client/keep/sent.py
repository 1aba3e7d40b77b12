"""What a live client has sent, for its own page: `STATE/sent.json`, which decides nothing and never leaves.

It counts answers and their bytes by kind. It is written before an answer leaves, but at most once a second, and at
the end. `releases.json` bounds what leaves; this one only tells people, so a failure to write it is no error.
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hyperbloom.client.keep.releases import Releases
from hyperbloom.client.settings import ClientSettings
from hyperbloom.common.files.storage import write_json

SENT = "sent.json"

KINDS = {
    "query.greet": "at joining: name, secret, version, sizes and shapes of the data",
    "train": "weights or their changes, mean training losses",
    "train.fit": "weights or their changes, mean training losses",
    "train.masked": "changes under masks",
    "evaluate": "scores: figures and mean losses on validation and test examples",
    "evaluate.compare": "scores: figures and mean losses on validation and test examples",
    "train.describe": "descriptors of inputs, and gradients of their encoder",
    "train.backprop": "descriptors of inputs, and gradients of their encoder",
    "query.represent": "what the network makes of public inputs",
    "query.notice": "confirmations that a run is over",
    "failed": "reasons why an order could not be carried out",
}
"""What the answers to each type of order hold, as docs/privacy.md lists it."""

OTHER = "keys and shares of masks"
TRAINING = {KINDS["train"], KINDS["train.masked"]}
CHANGES = {*TRAINING, KINDS["train.describe"], KINDS["query.represent"]}


class Sent:
    """The ledger, which goes on where an earlier process ended. A damaged one begins anew, which its date shows."""

    def __init__(self, settings: ClientSettings, releases: Releases) -> None:
        self._path, self._written = settings.folder / SENT, 0.0
        known = {"since": time.time(), "kinds": {}, "score": None, "noisy": 0, "least": None}
        self._ledger: dict[str, Any] = known | read_sent(settings.folder)
        self._noise = settings.min_noise
        limits = {"noise": settings.min_noise, "masked": settings.min_masked, **releases.most}  # type: ignore[misc]
        self._ledger |= {"client": settings.client_id, "server": settings.server, "limits": limits, "pid": os.getpid()}

    def add(self, message_type: str, size: int, score: Mapping[str, Any] | None = None) -> None:
        """Count an answer of so many bytes to an order of a type; `score` is this client's own on its test examples."""
        kinds, now = self._ledger["kinds"], time.time()
        kind = KINDS.get(message_type, OTHER)
        count, total, _ = kinds.get(kind, (0, 0, 0))
        kinds[kind] = (count + 1, total + size, now)
        if self._noise is not None and kind in TRAINING:
            self._ledger["noisy"] += 1
            self._ledger["least"] = min(self._noise, self._ledger["least"] or self._noise)
        if score is not None:
            self._ledger["score"] = {**score, "at": now}
        if now - self._written > 1 or self._noise is not None:  # the page's epsilon counts what left before a kill
            self.write()

    def write(self) -> None:
        """Write the ledger, as at the begin and the end of a process."""
        self._written = time.time()
        with suppress(OSError):
            write_json(self._path, self._ledger, mode=0o600)


def read_sent(folder: Path) -> dict[str, Any]:
    """Return the ledger in a state folder; an empty one if there is none, or it is damaged."""
    try:
        ledger: dict[str, Any] = json.loads((folder / SENT).read_text(encoding="utf-8"))
        whole = {"limits", "least", "noisy"} <= ledger.keys() and isinstance(ledger["kinds"], dict)
        return ledger if whole else {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
