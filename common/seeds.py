"""Seeds for the independent random draws of a run, all derived from the run's seed."""

import hashlib


def derive(seed: int, *labels: str | int) -> int:
    """Return a 63-bit seed for the draw `labels`: the same on every machine, and independent between labels."""
    text = "\x1f".join([str(seed), *(str(label) for label in labels)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
