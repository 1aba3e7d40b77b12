"""Programs that try to break Hyperbloom: faults of real processes, damaged input, thousands of rounds."""

import benchmarks  # noqa: F401 - it settles Flower's environment, before Flower is imported
