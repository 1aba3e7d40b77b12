"""Programs that compare Hyperbloom with the obvious alternative, both sides measured in the same run."""

import os
import shutil

# Before Flower is imported anywhere: it reads both when it is.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")

LEASH = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
"""What stands before a command whose process is to end with ours, even if that is killed (Linux with util-linux)."""
