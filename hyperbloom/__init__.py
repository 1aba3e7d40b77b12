"""Personalised federated learning with hypernetworks on Flower."""

from pathlib import Path

# The four packages stand at the top of the repository, next to this folder; extending the path lets
# `hyperbloom.server` and its siblings import from a checkout as well as from a wheel.
__path__.append(str(Path(__file__).resolve().parent.parent))

__version__ = "0.1.0"
