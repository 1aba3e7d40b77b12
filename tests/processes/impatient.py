"""A server whose patience with clients is over as soon as one has joined, however long that takes."""

import runpy
import time
from types import SimpleNamespace
from typing import Any

from hyperbloom.server.loop import federation
from hyperbloom.server.loop.roster import Roster

if __name__ == "__main__":
    admit, ahead = Roster.admit, [0.0]

    def admit_and_jump(*args: Any) -> Any:
        """Admit a client, and let the federation's clock jump."""
        ahead[0] = 1e6
        return admit(*args)

    clock = {**vars(time), "monotonic": lambda: time.monotonic() + ahead[0]}
    Roster.admit, federation.time = admit_and_jump, SimpleNamespace(**clock)  # type: ignore[assignment, method-assign]
    runpy.run_module("hyperbloom.server", run_name="__main__", alter_sys=True)
