"""How a server hands out the folder of its backbone: a list of files, then each file piece by piece.

A client asks by the call with which it pulls an object of an order (`PullObject`), for a name that no object has:
`LIST` for the files, as JSON `{name: [bytes, sha256]}`, and `LIST` with `NAME/OFFSET` for a piece.
"""

from fnmatch import fnmatch

LIST = "hyperbloom-backbone:"

PIECE = 2**22
"""Bytes of a piece; the last one of a file is shorter."""
PATTERNS = ("*.json", "*.safetensors", "vocab.txt", "merges.txt", "*.model")
"""Files that travel: weights as safetensors, descriptions and tokenizers. No code, no pickles."""


def travels(name: str) -> bool:
    """Return whether a file of this name may be handed out: a plain name, and one of `PATTERNS`."""
    plain = name.isprintable() and not name.startswith(".") and not set(name) & set("/\\:")
    return plain and len(name) < 200 and any(fnmatch(name, pattern) for pattern in PATTERNS)
