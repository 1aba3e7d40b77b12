"""The intervals at which a client asks the server for work."""

import random


class Pacer:
    """Chooses the wait between two polls: short after a message, and seconds when nothing happens.

    Args:
        fastest: first wait after a message, in seconds.
        active: longest wait while the last message is younger than `active_for`, in seconds.
        idle: longest wait after that if the server answers at once, in seconds.
        active_for: seconds for which a client counts as active after a message.

    A server that answers an empty poll slowly has too many clients that poll. An idle client then waits `PATIENCE`
    times as long as the answer took, up to `LONGEST` seconds, so that ten thousand clients can share a server.
    """

    PATIENCE = 20
    LONGEST = 60.0

    def __init__(
        self, fastest: float = 0.005, active: float = 0.05, idle: float = 3.0, active_for: float = 30.0
    ) -> None:
        self.fastest, self.active, self.idle, self.active_for = fastest, active, idle, active_for
        self._delay = fastest
        self._last_message = -float("inf")

    def message(self, now: float) -> None:
        """Note that a message arrived at time `now`, in seconds."""
        self._last_message, self._delay = now, self.fastest

    def delay(self, now: float, latency: float = 0.0) -> float:
        """Return the next wait in seconds, with jitter; `latency`: seconds that the last poll took."""
        if now - self._last_message < self.active_for:
            self._delay = min(self._delay * 1.5, self.active)
        else:
            wanted = max(min(self._delay * 1.5, self.idle), min(self.PATIENCE * latency, self.LONGEST))
            # Return to faster polls in steps. Otherwise all slowed clients would come back at once, again and again.
            self._delay = max(wanted, 0.8 * self._delay)
        return self._delay * random.uniform(0.75, 1.25)
