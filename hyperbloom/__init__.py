"""Personalised federated learning with hypernetworks on Flower."""

import os
from pathlib import Path
from typing import Any

__all__ = [
    *("Client", "Ditto", "FedAvg", "FedAvgFT", "FedHeNN", "FedHeNNHomogeneous", "FedPer", "FedProx", "FedRep", "GHN"),
    *(
        "GHNServer",
        "HyperFL",
        "Local",
        "ODPFL",
        "PFedHN",
        "PFedHNPC",
        "Report",
        "Run",
        "run",
    ),
]

# The four packages stand at the top of the repository, next to this folder; extending the path lets
# `hyperbloom.server` and its siblings import from a checkout as well as from a wheel.
__path__.append(str(Path(__file__).resolve().parent.parent))

__version__ = "0.1.0"

# ONNX Runtime tells Microsoft when it is used, unless this is set before it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` when it is first used: torch and Flower take seconds."""
    if name in ("Client", "Report", "Run", "run"):
        from hyperbloom.server import library

        return getattr(library, name)
    if name in __all__:
        from hyperbloom.server.flower_strategy import NAMED

        return NAMED[name]
    raise AttributeError(f"module 'hyperbloom' has no attribute {name!r}")
