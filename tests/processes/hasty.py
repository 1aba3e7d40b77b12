"""A server that gives a reply seconds to come, where the real one gives it half a minute."""

import runpy

from hyperbloom.server.grids import live

if __name__ == "__main__":
    live.STALL_S, live.UPLOAD_DEADLINE_S = 1.0, 6.0
    runpy.run_module("hyperbloom.server", run_name="__main__", alter_sys=True)
