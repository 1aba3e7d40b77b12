"""Studies behind the figures in `docs/`: programs, and the lines (`.jsonl`) that they have written."""

import benchmarks  # noqa: F401 - it settles Flower's environment, before Flower is imported
