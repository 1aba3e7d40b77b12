"""Who a client is to other clients: the key with which it signs, and those that its user knows."""

from functools import lru_cache

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from hyperbloom.client.settings import ClientSettings
from hyperbloom.common.secrecy.keys import read_fingerprints, read_private_key

__all__ = ["identity_of"]


@lru_cache(256)
def identity_of(settings: ClientSettings) -> tuple[EllipticCurvePrivateKey | None, frozenset[str] | None]:
    """Return the key with which a client signs, and the fingerprints of the clients that it knows.

    Raises:
        ConfigError: a file cannot be read, or holds something else.
    """
    key = read_private_key(settings.key, "--key") if settings.key else None
    return key, read_fingerprints(settings.peers, "--peers") if settings.peers else None
