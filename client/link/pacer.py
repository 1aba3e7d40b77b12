"""The intervals at which a client asks the server for work."""

import random

FASTEST_S = 0.005  # the first wait after a message
ACTIVE_S, SLOW_S, ACTIVE_FOR_S = 0.05, 0.5, 30.0  # the longest waits for so long after a message
IDLE_S = 3.0  # the longest wait after that, if the server answers at once
ACTIVE_PATIENCE, PATIENCE, LONGEST_S = 3, 20, 60.0


class Pacer:
    """Chooses the wait between two polls: short after a message, and seconds when nothing happens.

    A server that answers an empty poll slowly has too many clients that poll. An idle client then waits `PATIENCE`
    times as long as the answer took, up to `LONGEST_S` seconds, so that ten thousand clients can share a server. One
    in a run waits `ACTIVE_PATIENCE` times as long, up to `SLOW_S`, so that polls do not slow down what they wait for.
    """

    def __init__(self) -> None:
        self._delay = FASTEST_S
        self._last_message = -float("inf")

    def message(self, now: float) -> None:
        """Note that a message arrived at time `now`, in seconds."""
        self._last_message, self._delay = now, FASTEST_S

    def delay(self, now: float, latency: float = 0.0) -> float:
        """Return the next wait in seconds, with jitter; `latency`: seconds that the last poll took."""
        if now - self._last_message < ACTIVE_FOR_S:
            self._delay = min(self._delay * 1.5, ACTIVE_S)
            wait = max(self._delay, min(ACTIVE_PATIENCE * latency, SLOW_S))
        else:
            wanted = max(min(self._delay * 1.5, IDLE_S), min(PATIENCE * latency, LONGEST_S))
            # Return to faster polls in steps. Otherwise all slowed clients would come back at once, again and again.
            wait = self._delay = max(wanted, 0.8 * self._delay)
        return wait * random.uniform(0.75, 1.25)
