"""The user's limits on what may leave a client and depends on its training examples, whatever the server orders.

`STATE/releases.json` counts it:

    changes    changes of weights, also with noise or masks, and what some strategies send in addition: descriptors and
               gradients of an encoder, representations
    scores     losses and numbers of correct answers of models that training examples have shaped on this machine

The client counts over all runs and servers and never counts down, also after a restart or a server's rewind. It writes
a release to the disk before it sends it, so after a crash the count is at most one too high.
"""

import json
from pathlib import Path
from typing import Literal

from hyperbloom.client.settings import ClientSettings
from hyperbloom.common.errors import ConfigError, HyperbloomError
from hyperbloom.common.files.storage import locked, write_json
from hyperbloom.common.reasons import Reason

Kind = Literal["changes", "scores"]
RELEASES = "releases.json"
MOST_CHANGES = 1000
"""Default for the most changes of a client whose user requires noise or masks."""
_FLAGS = {"changes": "--max-changes", "scores": "--max-scores"}


class Releases:
    """The ledger in a client's state folder, with the bounds of its user."""

    def __init__(self, settings: ClientSettings) -> None:
        self.path = settings.folder / RELEASES
        self._settings = settings
        insists = settings.min_noise is not None or settings.min_masked is not None
        self.most: dict[Kind, int | None] = {
            "changes": MOST_CHANGES if settings.max_changes is None and insists else settings.max_changes,
            "scores": 0 if settings.max_scores is None and insists else settings.max_scores,
        }

    @property
    def bounded(self) -> bool:
        """Whether there is any bound. If so, the client does not send losses, which are not counted."""
        return any(most is not None for most in self.most.values())

    def check_change(self, noise: float | None = None, masked: bool = False) -> None:
        """Check and count a release of kind `changes` (--min-noise, --min-masked, --max-changes).

        `noise` is in units of its norm, and `masked` says that the server sees it only in a sum.

        Raises:
            HyperbloomError: the user does not allow it.
        """
        if not masked:
            self.check_sum("a change by itself", 0)
        least = self._settings.min_noise
        if least is not None and (noise or 0.0) < least:
            raise HyperbloomError(
                f"the client sends nothing with noise below {least:g} times its norm (--min-noise), "
                f"found {noise or 0:g}",
                reason=Reason.FORBIDDEN,
            )
        self.spend("changes")

    def check_sum(self, found: str, clients: int) -> None:
        """Check that a sum has as many clients as the user requires; `found` describes it, and 0 means no sum.

        Raises:
            HyperbloomError: the user does not allow it.
        """
        fewest = self._settings.min_masked
        if fewest is not None and clients < fewest:
            raise HyperbloomError(
                f"the client sends changes in sums of at least {fewest} clients alone (--min-masked), found {found}",
                reason=Reason.FORBIDDEN,
            )

    def spend(self, kind: Kind, count: int = 1) -> None:
        """Count so many releases before they are sent.

        Raises:
            HyperbloomError: the bound is reached, or the ledger is damaged.
            ConfigError: the ledger cannot be written.
        """
        most = self.most[kind]
        if most is None:
            return
        if most == 0:
            raise HyperbloomError(
                f"the client tells no {kind} that are made of its training examples ({_FLAGS[kind]})",
                reason=Reason.FORBIDDEN,
            )
        try:
            with locked(self.path):
                counts = read_releases(self.path.parent)
                if counts[kind] + count > most:
                    raise HyperbloomError(
                        f"the client has sent {counts[kind]} {kind} that are made of its training examples; its user "
                        f"allows {most} ({_FLAGS[kind]})",
                        reason=Reason.FORBIDDEN,
                    )
                counts[kind] += count
                write_json(self.path, counts, mode=0o600)
        except OSError as error:
            raise ConfigError(f"--state-dir: cannot count what leaves: {error.strerror or error}") from None


def read_releases(folder: Path) -> dict[Kind, int]:
    """Return the counts in a state folder; HyperbloomError if the ledger is damaged."""
    path = folder / RELEASES
    if not path.exists():
        return {"changes": 0, "scores": 0}
    try:
        counts: dict[Kind, int] = json.loads(path.read_text(encoding="utf-8"))
        if set(counts) == set(_FLAGS) and all(type(count) is int and count >= 0 for count in counts.values()):
            return counts
    except (ValueError, TypeError, AttributeError):
        pass
    # A fresh start would forget what servers have seen. The text omits the path, because the server reads it.
    raise HyperbloomError(f"{RELEASES} in the client's state folder is damaged; restore it from a backup")
