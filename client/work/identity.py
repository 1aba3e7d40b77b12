"""A client's identity for other clients: its signing key, and the keys that its user knows."""

from functools import lru_cache

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from hyperbloom.client.settings import ClientSettings
from hyperbloom.common.secrecy.keys import read_fingerprints, read_private_key


@lru_cache(256)
def identity_of(settings: ClientSettings) -> tuple[EllipticCurvePrivateKey | None, frozenset[str] | None]:
    """Return a client's signing key, and the fingerprints of the clients that its user knows; None for either.

    Raises:
        ConfigError: a file cannot be read, or has the wrong content.
    """
    key = read_private_key(settings.key, "--key") if settings.key else None
    return key, read_fingerprints(settings.peers, "--peers") if settings.peers else None
