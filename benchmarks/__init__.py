"""Programs that compare Hyperbloom with the obvious alternative, both sides measured in the same run."""

import os

# Before Flower is imported anywhere: it reads both when it is.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")
