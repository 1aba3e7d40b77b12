"""The server from the client's side: its address, and explanations of failed sessions."""

from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography.hazmat.primitives.asymmetric import ec

from hyperbloom.common.enclosed import TAKEN
from hyperbloom.common.errors import ConnectionFailed, HyperbloomError, RefusedError
from hyperbloom.common.program.plain import place_of
from hyperbloom.common.secrecy.keys import server_of, shown_certificates
from hyperbloom.common.secrecy.token import HAS_A_KEY, REFUSED, RETIRED

PROBE_S = 5.0

_NAME = "its certificate does not name this address; add it there (flower-server certs renew --host NAME_OR_IP)"

UNKNOWN_NODE = "Failed to activate SuperNode"

REASONS = {
    "certificate has expired": "its certificate has expired; whoever runs it can make a new one "
    "(flower-server certs renew)",
    "certificate is not yet valid": "its certificate does not hold yet; is this machine's clock right?",
    "Hostname Verification Check failed": _NAME,
    "mismatch, certificate is not valid": _NAME,
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not signed by the CA that this client trusts (of its token, of "
    "--root-certificates, or of this system); ask whoever runs it for a token, or for ca.pem where you give --key",
    "WRONG_VERSION_NUMBER": "it does not speak TLS; is it the Fleet port, and was the server started with --insecure?",
    "Invalid signature": "it refuses signatures that name the CA of --root-certificates; get the ca.pem of this server "
    "from whoever runs it, or say --stock-superlink if they tell you that it is Flower's own SuperLink",
    UNKNOWN_NODE: "it does not know this client's key (flwr supernode register), or still waits for "
    "the last session of this client, for a minute",
    "Invalid SuperNode authentication": "it refuses this client's signature; is this machine's clock right?",
    "Trying to connect an http1.x server": "it speaks HTTP, not gRPC; is it a SuperLink that needs --http?",
    "missing selected ALPN": "it speaks TLS, but not gRPC; is it the Fleet port, or a SuperLink that needs --http?",
}
"""Explanations of permanent errors by a part of their text; the first match counts."""

_UNKNOWN = (
    "is it the server's Fleet port, and do TLS, certificates and protocol match on both sides (--insecure, or "
    "--root-certificates and --key; --http)?"
)

FOR_NOW = ("Invalid timestamp", TAKEN)
"""Parts of the server's texts for refusals that end: a clock is set, or another process with this key leaves."""
_REFUSALS = (REFUSED, "is unknown or revoked", "key is damaged", "another client's")
"""Parts of the door's refusals. Flower refuses calls of a run that is over with the same status."""


@dataclass(frozen=True)
class Link:
    """How to reach the server: `HOST:PORT` of its Fleet API, the CA of its certificate, and this client's own key.

    Without `root_certificates` the system's CAs apply. Without a key Flower makes one for each session. Signatures name
    the server, unless it is a `stock` SuperLink: a lying server could show those to other servers that do not ask more.
    With `http` the calls are HTTP requests, not gRPC.
    `token` is shown in the first call, for a key that the server may not know yet.
    """

    address: str
    insecure: bool = False
    root_certificates: Path | None = None
    key: ec.EllipticCurvePrivateKey | None = None
    stock: bool = False
    http: bool = False
    token: str = ""

    @property
    def name(self) -> str:
        """Return the server's name for signatures, "" if they name none."""
        return "" if self.stock else server_of(self.root_certificates)


def speaks_tls(address: str) -> bool:
    """Return whether a TLS handshake works at `HOST:PORT`. It checks no certificate and sends no request."""
    return bool(shown_certificates(*place_of(address), PROBE_S))


def refusal(error: Exception) -> RefusedError | None:
    """Return a RefusedError if the server does not accept, or no longer accepts, this client's key; else None."""
    if not isinstance(error, grpc.RpcError) or error.code() != grpc.StatusCode.PERMISSION_DENIED:
        return None
    if not any(sign in (error.details() or "") for sign in _REFUSALS):
        return None
    if REFUSED in error.details():
        told = HAS_A_KEY in error.details() or RETIRED in error.details()
        again = "" if told else ". Ask for a token (flower-server clients invite NAME)"
        return RefusedError(f"the server refused this client: it {error.details()}{again}")
    return RefusedError(
        f"the server refused this client: {error.details()}. Ask whoever runs the server for a token (flower-server "
        "clients invite NAME), or to add this client's public key (flower-server clients add NAME --public-key FILE)"
    )


def explanation(link: Link, error: Exception) -> HyperbloomError:
    """Return the error that says why no session can be opened and what to do."""
    if refused := refusal(error):
        return refused
    reason = next((reason for sign, reason in REASONS.items() if sign in str(error)), None)
    if reason is None and link.insecure and speaks_tls(link.address):
        reason = "it speaks TLS; use --token, or --root-certificates and --key, instead of --insecure"
    return ConnectionFailed(f"cannot open a session with {link.address}: {reason or _UNKNOWN}")
