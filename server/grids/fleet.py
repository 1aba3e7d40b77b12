"""The server's address, its security settings, and its SuperLink."""

import logging
import shlex
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from hyperbloom.common.config import RunConfig, Section
from hyperbloom.common.errors import ConfigError, ConnectionFailed
from hyperbloom.common.program.plain import check_insecure, is_loopback, place_of
from hyperbloom.server.access import certificates as tls
from hyperbloom.server.access.certificates import Certificates
from hyperbloom.server.access.invitations import Invitations
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.broker.log import LogFile

if TYPE_CHECKING:
    from hyperbloom.server.grids.live import LiveGrid

INVITED_S = 3600.0

Say = Callable[..., None]
"""Prints a line literally; the optional second argument is a rich style."""
Tell = Callable[[str], None]
"""Receives a line for each caller that the SuperLink refuses, in another thread."""

USUAL_PORT = 9092


class Machines(Section):
    """Where a server listens, its security, and the engine of a run. The run folder stores these flags."""

    # A run folder may come from another version, and JSON has no paths.
    model_config = ConfigDict(strict=False, extra="ignore")

    insecure: int = 0
    engine: Literal["grpc", "inline"] = "grpc"
    host: str = Field("", validate_default=True)
    port: int = Field(USUAL_PORT, ge=0, le=65_535)
    certs: Path | None = None
    vectorise: bool | None = None
    device: str = "auto"
    workers: int = 1
    local_clients: int = 0
    superlink: str | None = None
    metrics_port: str | None = None
    web: str | None = None
    track: tuple[str, ...] = ()
    serve_backbone: bool = False
    stay: bool = False  # clients wait for the next run of a series

    @field_validator("host", mode="before")
    @classmethod
    def _usual(cls, host: object, about: ValidationInfo) -> object:
        """Return the host, by default loopback for plain text, and every address for clients with keys."""
        plain = about.data.get("insecure") or about.data.get("engine") == "inline"
        return str(host or "").strip("[]") or ("127.0.0.1" if plain else "0.0.0.0")

    @property
    def listening(self) -> str:
        """Return where the server listens, as gRPC reads it."""
        return self._at(self.host)

    @property
    def address(self) -> str:
        """Return the address for clients on other machines.

        It is a name that the certificate was made for, else an address that it has, one of this machine's if there is.
        """
        if self.host not in ("0.0.0.0", "::"):
            return self.listening
        server = Certificates(self.certs).server
        known = [] if self.insecure or not server.is_file() else tls.names(tls.read_certificate(server, "server.pem"))
        own, here = tls.own_addresses(), socket.gethostname()
        known = [each for each in known if each not in {*tls.ALWAYS, here} and "*" not in each]

        def order(each: str) -> int:
            is_number = ":" in each or each.replace(".", "").isdecimal()
            return is_number + (is_number and each not in own)

        return self._at(min(known, key=order, default=here))

    def _at(self, host: str) -> str:
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def first_start(self) -> bool:
        """Return whether a CA and a certificate in the default folder are still to be made."""
        return not (self.insecure or self.superlink or self.certs or Certificates().there)

    def make_certificates(self) -> list[str]:
        """Make a CA and a certificate at the first start in the default folder; return the lines that say so."""
        if not self.first_start:
            return []
        hosts = tls.own_addresses() if self.host in ("0.0.0.0", "::") else [self.host]
        made = tls.describe(tls.init(Certificates().folder, hosts).folder)
        return [f"made for this server, once (docs/security.md): {line}" for line in made]

    def prepare(self, say: Say) -> None:
        """Make certificates at the first start, and raise a HyperbloomError if an address or a file cannot be used."""
        for line in self.make_certificates():
            say(line)
        self.certificates()
        place_of(self.superlink, "--superlink") if self.superlink else check_port(self.host, self.port)

    def check_open(self, config: RunConfig) -> None:
        """Raise a ConfigError if any first client could decide the networks' sizes, or for flags of no use inline."""
        of_server = {"port": USUAL_PORT, "certs": None, "local_clients": 0, "serve_backbone": False}
        given = [name.replace("_", "-") for name, usual in of_server.items() if getattr(self, name) != usual]
        if given and self.engine != "grpc":
            raise ConfigError(f"--{given[0]}: expected with --engine grpc, found --engine {self.engine}")
        examples = {"input_shape": "[3,32,32]", "num_classes": "10"}
        missing = [key for key in examples if getattr(config, key) is None]
        if missing and self.engine == "grpc" and self.insecure and not is_loopback(self.host):
            such = f"{missing[0]} of the run, such as --set {missing[0]}={examples[missing[0]]}"
            why = "without it the first client to come would decide it for all"
            raise ConfigError(f"--host {self.host}: expected {such}; {why}")

    def invite(self, clients: int, newcomers: bool = False) -> tuple[list[str], str]:
        """Return the flags of `clients` clients, and a line about the token for those that are not registered yet.

        Newcomers are never those that are registered.
        """
        files = Certificates(self.certs)
        if self.insecure:
            return self.client_flags(self.address), ""
        missing = clients - (0 if newcomers else len(ClientRegistry(files.clients).keys()))
        if missing < 1:
            more = f"one whose key was added by hand also needs --root-certificates {files.ca} --key FILE"
            return ["--server", self.address], f"that is all for a client that has enrolled with a token; {more}"
        token = Invitations(files).invite(None, missing, INVITED_S)
        given = ("--port", self.port if self.port != USUAL_PORT else None), ("--certs", self.certs)
        more = "".join(f" {flag} {value}" for flag, value in given if value)
        told = f"the token lets {missing} enrol within an hour; flower-server clients invite NAME{more} prints another"
        return ["--server", self.address, "--token", str(token)], told

    @property
    def local_address(self) -> str:
        """Return the address for clients on this machine."""
        return f"127.0.0.1:{self.port}" if self.host in ("0.0.0.0", "127.0.0.1", "localhost") else self.address

    def with_port(self) -> Self:
        """Return a copy with a free port if none is given."""
        from hyperbloom.server.broker.superlink import free_port

        return self if self.port or self.engine != "grpc" else self.model_copy(update={"port": free_port()})

    def record(self) -> dict[str, Any]:
        """Return the flags for the run folder, with an absolute path, as a later process may start elsewhere."""
        certs = None if self.insecure or self.engine != "grpc" else str(Certificates(self.certs).folder.resolve())
        # A tracker's address may hold a password, and no folder may decide where a run is told.
        return self.model_dump(exclude={"track"}) | {"certs": certs}

    def certificates(self) -> Certificates | None:
        """Find and check the TLS files; return None for plain text. Of somebody else's SuperLink only the CA is needed.

        Raises:
            ConfigError: flags contradict each other, or a file is missing, expired or of another certificate.
        """
        if self.insecure:
            if self.certs:
                raise ConfigError("--insecure: expected alone or not at all, found with --certs")
            flag, address = ("--superlink", self.superlink) if self.superlink else ("--host", f"{self.host}:0")
            check_insecure(flag, address.rsplit(":", 1)[0], self.insecure)
            return None
        files = Certificates(self.certs)
        if self.superlink:
            if not files.ca.is_file():
                raise ConfigError(f"--superlink: expected the SuperLink's CA in {files.ca} (--certs), or --insecure")
            return files
        if not files.server.is_file():
            raise ConfigError(
                f"no certificates in {files.folder}: make them with `flower-server certs init --dir {files.folder} "
                "--host NAME_OR_IP`, or speak plain text on this machine with --insecure"
            )
        tls.check_files(files)
        return files

    def client_flags(self, address: str) -> list[str]:
        """Return the flags of a client that connects to `HOST:PORT`."""
        if self.insecure:
            return ["--server", address, *["--insecure"] * (1 if is_loopback(address.rsplit(":", 1)[0]) else 2)]
        return ["--server", address, "--root-certificates", str(Certificates(self.certs).ca)]


SECURITY = {"insecure", "certs"}
"""Fields that belong together: giving one of them anew replaces both."""


def check_port(host: str, port: int, asked: str = "") -> None:
    """Check that this machine can listen at an address; `asked` is the flag that names it, if not --host and --port.

    Raises:
        ConnectionFailed: the address or port cannot be used.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        where = asked or f"--host {host} --port {port}"
        raise ConnectionFailed(f"{where}: cannot listen there: {error.strerror or error}") from None


def open_superlink(
    machines: Machines, folder: Path, say: Say, tell: Tell, keys: Path | None = None, backbone: str | None = None
) -> AbstractContextManager["LiveGrid"]:
    """Return a context with the grid of a SuperLink for registered clients and those of `keys`; its log is in `folder`.

    With `machines.serve_backbone`, clients may fetch the folder `backbone`.

    With `machines.superlink`, the grid is that of a run on the SuperLink there.
    """
    from hyperbloom.server.broker.superlink import superlink

    files = machines.certificates()
    if machines.superlink:
        from hyperbloom.server.grids.attached import attached

        say(f"the clients are the nodes of the SuperLink at {machines.superlink}")
        return attached(machines.superlink, files.ca.read_bytes() if files else None)
    if not files and not is_loopback(machines.host):
        say("--insecure: everyone on the network can read and forge what is sent", "yellow")
    say(f"listening at {machines.listening}")
    if machines.serve_backbone and not backbone:
        raise ConfigError("--serve-backbone: expected the run's backbone: --set backbone=FOLDER")
    served = Path(backbone) if backbone and machines.serve_backbone else None
    return superlink(machines.listening, folder, files, tell, keys, served)


@contextmanager
def open_for_newcomers(machines: Machines, folder: Path, brings: str, say: Say, tell: Tell) -> Iterator["LiveGrid"]:
    """Check the address, run a SuperLink with its logs in `folder`, and print what newcomers run, with their flags."""
    machines.certificates()
    check_port(machines.host, machines.port)
    machines = machines.with_port()
    folder.mkdir(parents=True, exist_ok=True)
    with log_to(folder / "server.log"), open_superlink(machines, folder, say, tell) as grid:
        flags, told = machines.invite(1, newcomers=True)
        say("ready; a newcomer runs:")
        say(f"  flower-client join {shlex.join(flags)} {brings} --out model")
        if told:
            say(told)
        yield grid


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Write our log and Flower's to a file."""
    handler = LogFile(path)
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("hyperbloom", "flwr")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()
