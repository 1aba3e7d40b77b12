"""Where a server listens, who may speak to it, and its SuperLink."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from pydantic import ConfigDict

from hyperbloom import __version__
from hyperbloom.common.config import Section
from hyperbloom.common.errors import ConfigError, ConnectionFailed
from hyperbloom.common.plain import check_insecure, is_loopback
from hyperbloom.server.certificates import Certificates, check_files, default_folder

if TYPE_CHECKING:
    from hyperbloom.server.superlink import LiveGrid

__all__ = ["Listening", "Machines", "Say", "Security", "check_port", "open_for_newcomers", "open_superlink"]


class Say(Protocol):
    """Prints a line as it is, in a style of rich's."""

    def __call__(self, text: str, style: str = "") -> None:
        """Print it."""


@dataclass(frozen=True)
class Security:
    """TLS files and the registry of clients, or none of them for plain text."""

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    clients: Path | None = None

    def client_flags(self, address: str, key: str = "") -> list[str]:
        """Return the flags of a client that connects to `HOST:PORT`, with its `key` where there are keys."""
        if self.ca:
            return ["--root-certificates", str(self.ca), *(["--key", key] if key else [])]
        return ["--insecure"] * (1 if is_loopback(address.rsplit(":", 1)[0]) else 2)


class Listening(Section):
    """Where a server listens, and who may speak to it: the flags `flags.LISTENING`."""

    # What a run folder says may be of another version, and JSON has no paths.
    model_config = ConfigDict(strict=False, extra="ignore")

    host: str = "127.0.0.1"
    port: int = 9092
    insecure: int = 0
    certs: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None

    @property
    def address(self) -> str:
        """What clients on other machines connect to."""
        return f"{socket.gethostname() if self.host in ('0.0.0.0', '::') else self.host}:{self.port}"

    @property
    def local_address(self) -> str:
        """What clients on this machine connect to."""
        return f"127.0.0.1:{self.port}" if self.host in ("0.0.0.0", "127.0.0.1", "localhost") else self.address

    def with_port(self) -> Self:
        """Return the same at a port that is free, if none is named."""
        from hyperbloom.server.superlink import free_port

        return self if self.port else self.model_copy(update={"port": free_port()})

    def security(self) -> Security:
        """Find and check the TLS files.

        Raises:
            ConfigError: flags do not go together, or a file is missing, expired or of another certificate.
        """
        files = {"--tls-certificate": self.tls_certificate, "--tls-key": self.tls_key, "--tls-ca": self.tls_ca}
        given = [flag for flag, path in files.items() if path]
        if self.insecure:
            if given or self.certs:
                raise ConfigError(f"--insecure: expected alone or not at all, found with {(given or ['--certs'])[0]}")
            check_insecure("--host", self.host, self.insecure)
            return Security()
        if given and len(given) < len(files):
            missing = ", ".join(flag for flag in files if flag not in given)
            raise ConfigError(f"expected all three TLS files or none; missing: {missing}")
        folder = Certificates(self.certs or default_folder())
        if not given:
            if not folder.server.is_file():
                raise ConfigError(
                    f"no certificates in {folder.folder}: make them with `flower-server certs init --host NAME_OR_IP`, "
                    "or speak plain text on this machine with --insecure"
                )
            files = {"server.pem": folder.server, "server.key": folder.server_key, "ca.pem": folder.ca}
        certificate, key, ca = files.values()
        assert certificate and key and ca
        check_files(certificate, key, ca, list(files))
        return Security(certificate, key, ca, folder.clients)


SECURITY = ("insecure", "certs", "tls_certificate", "tls_key", "tls_ca")
"""The fields that belong together: who says one of them anew says all of them."""


class Machines(Listening):
    """Where a run runs: flags that the run folder keeps for `--resume`."""

    engine: Literal["grpc", "inline", "ray"] = "grpc"
    vectorise: bool | None = None
    local_clients: int = 0
    metrics_port: str | None = None
    tensorboard: bool = False

    def record(self) -> dict[str, Any]:
        """Return them for the run folder; a later process may be started in another directory."""
        paths = {name: value for name, value in self if isinstance(value, Path)}
        if self.engine == "grpc" and not self.insecure:
            paths["certs"] = self.certs or default_folder()
        return self.model_dump() | {name: str(path.resolve()) for name, path in paths.items()}


def check_port(host: str, port: int) -> None:
    """Find out whether this machine can listen at an address.

    Raises:
        ConfigError: the port is no port.
        ConnectionFailed: it cannot.
    """
    if not 0 < port < 65536:
        raise ConfigError(f"--port: expected 0 (a free one) to 65535, found {port}")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ConnectionFailed(f"--host {host} --port {port}: cannot listen there: {error.strerror or error}") from None


@contextmanager
def open_superlink(
    listening: Listening,
    security: Security,
    folder: Path,
    say: Say,
    tell: Callable[[str], None],
    keys: Path | None = None,
) -> Iterator["LiveGrid"]:
    """Run a SuperLink for the registered clients and those of `keys`, and yield its grid.

    Args:
        listening: host and port.
        security: as `listening.security()` found it.
        folder: where its log goes.
        say: prints a warning.
        tell: gets a line when somebody is refused.
        keys: another registry of clients.
    """
    from hyperbloom.server.superlink import Tls, superlink

    if listening.insecure and not is_loopback(listening.host):
        say("--insecure: everyone on the network can read and forge what is sent", "yellow")
    tls = None
    if security.certificate and security.key and security.ca and security.clients:
        if not keys and not security.clients.exists():
            say("no client may join yet: flower-server clients add NAME --public-key FILE", "yellow")
        registries = (security.clients, keys) if keys else (security.clients,)
        tls = Tls(security.certificate, security.key, security.ca, registries)
    with superlink(f"{listening.host}:{listening.port}", folder, __version__, tls, tell) as grid:
        yield grid


@contextmanager
def open_for_newcomers(
    listening: Listening, folder: Path, say: Say, tell: Callable[[str], None]
) -> Iterator["LiveGrid"]:
    """Check where to listen, run a SuperLink with its logs in `folder`, and say how newcomers reach it."""
    from hyperbloom.server.run_log import log_to

    security = listening.security()
    if listening.port:
        check_port(listening.host, listening.port)
    listening = listening.with_port()
    folder.mkdir(parents=True, exist_ok=True)
    with log_to(folder / "server.log"), open_superlink(listening, security, folder, say, tell) as grid:
        flags = " ".join(security.client_flags(listening.address, "NAME.pem"))
        say("ready; a newcomer runs:")
        say(f"  flower-client join --server {listening.address} {flags} --data WHAT --out model")
        yield grid
