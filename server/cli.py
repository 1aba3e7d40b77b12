"""`flower-server`: describe a run, wait for the clients, train, leave a run folder."""

import argparse
import errno
import json
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hyperbloom import __version__
from hyperbloom.common.commands import list_commands, run_command
from hyperbloom.common.config import DataConfig, RunConfig, load_run_config, parse_assignment
from hyperbloom.common.errors import ConfigError, ConnectionFailed, DiskError, HyperbloomError
from hyperbloom.common.plain import check_insecure, is_loopback
from hyperbloom.common.signals import terminate_as_interrupt

if TYPE_CHECKING:
    from flwr.serverapp import Grid

    from hyperbloom.server.live_grid import LiveGrid
    from hyperbloom.server.loop.listener import Checkpoint, Listener, Selection
    from hyperbloom.server.loop.session import Session
    from hyperbloom.server.run_folder import RunFolder
    from hyperbloom.server.view import TerminalView

__all__ = ["add_machines", "build_parser", "check_port", "fleet_for_newcomers", "log_to", "main"]

LARGEST_FOR_REPORT = 100_000_000
"""Bytes of lines up to which a run writes its report at its end: five seconds."""

_COMMANDS = "hyperbloom.server.commands"

_EPILOG = """\
examples:
  everything on this machine: a server and six client processes, on scikit-learn's digits
    flower-server --strategy pfedhn --insecure --local-clients 6
  a federation: certificates, each client's key, and the server, which prints the line to run on the other machines
    flower-server certs init --host gpu-box
    flower-server clients add ward-7 --public-key ward-7.pub
    flower-server --strategy pfedhn --host 0.0.0.0 --clients 4 --data cifar10
  a run described by a file, one value changed, with two baselines for comparison
    flower-server --config run.yaml --set local.steps=20 --baselines local,fedavg
  no network at all: virtual clients in this process
    flower-server --strategy pfedhn --engine inline --clients 10
  a run whose server was killed: at most checkpoint_every rounds are done again, clients that wait for it pick up
    flower-server --resume runs/20260102-030405-pfedhn
  the same command at each start, for systemd, Docker, Kubernetes: it begins the run, or goes on with it
    flower-server --config run.yaml --run-dir /srv/run-1 --go-on --host 0.0.0.0

--set KEY=VALUE reaches every key of the run (local.learning_rate, data.split, ...) and, for a key that is no key of
the run, the strategy's own options; `flower-server --explain pfedhn` lists both with their defaults.

exit codes: 0 the run is complete, 1 a defect, 2 wrong settings, 4 too few clients came or answered, 5 the SuperLink
failed or its port is taken, 6 the disk is full, 130 Ctrl-C
"""

# Flags for the keys that people change most; all others go through --set.
_FLAGS = {
    "strategy": str,
    "rounds": int,
    "clients": int,
    "cohort": int,
    "seed": int,
    "eval_every": int,
    "model": str,
    "init_from": str,
    "join_timeout_s": float,
    "round_timeout_s": float,
}
_DATA_FLAGS = {"data": "data.name", "root": "data.root", "split": "data.split", "max_train": "data.max_train"}


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = argparse.ArgumentParser(
        prog="flower-server",
        description="Personalised federated learning: one hypernetwork here, a different model for every client.",
        epilog=list_commands("flower-server", _COMMANDS) + "\n" + _EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hyperbloom {__version__}")
    parser.add_argument("--list", action="store_true", help="list strategies, models, data sets and splits")
    parser.add_argument("--explain", metavar="STRATEGY", help="list every key of a run with its default and meaning")
    run = parser.add_argument_group("the run")
    run.add_argument("--config", type=Path, metavar="FILE", help="YAML file that describes the run; flags win over it")
    for key, kind in _FLAGS.items():
        field = RunConfig.model_fields[key]
        text = f"{field.description} (default: {field.default})"
        run.add_argument(_flag(key), type=kind, help=text, metavar=key.upper().removesuffix("_S"))
    for key, path in _DATA_FLAGS.items():
        field = DataConfig.model_fields[path.removeprefix("data.")]
        text = f"{field.description} [{path}] (default: {field.default})"
        run.add_argument(_flag(key), metavar=key.upper(), help=text, type=int if key == "max_train" else str)
    run.add_argument(
        "--dp-clients",
        action="store_true",
        help="sets privacy.where=client: each client clips its change and adds noise before anything leaves it",
    )
    run.add_argument(
        "--secure-aggregation",
        action="store_true",
        help="sets secure_aggregation=true: clients mask their changes, and the server learns the sum alone",
    )
    run.add_argument("--baselines", metavar="A,B", help="strategies to run afterwards with the same clients")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set any key; may be repeated")
    run.add_argument("--run-dir", type=Path, metavar="DIR", help="run folder (default: runs/DATE-STRATEGY)")
    run.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on from the last checkpoint in this run folder, as it began"
    )
    run.add_argument(
        "--go-on",
        action="store_true",
        help="with --run-dir: begin the run, go on with it if it is there, end with code 0 if it is complete",
    )
    machines = parser.add_argument_group("machines")
    machines.add_argument(
        "--engine",
        choices=["grpc", "inline", "ray"],
        default="grpc",
        help="real clients, or virtual ones in this process or in Flower's simulation (default: %(default)s)",
    )
    machines.add_argument(
        "--vectorise",
        action=argparse.BooleanOptionalAction,
        help="with --engine inline: train the clients of a cohort at once (default: on a CUDA device)",
    )
    machines.add_argument("--local-clients", type=int, default=0, metavar="N", help="start N clients beside the server")
    add_machines(parser, machines)
    watching = parser.add_argument_group("watching (the folder of any run: flower-server watch, flower-server report)")
    watching.add_argument(
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="serve Prometheus metrics over HTTP there, without a host on loopback; 0 takes a free port",
    )
    watching.add_argument(
        "--tensorboard", action="store_true", help="write event files for TensorBoard to RUN/tensorboard"
    )
    return parser


def add_machines(parser: argparse.ArgumentParser, machines: "argparse._ArgumentGroup | None" = None) -> None:
    """Add the flags that say where a server listens, and who may speak to it: those of `_fleet`."""
    machines = machines or parser.add_argument_group("machines")
    machines.add_argument("--host", default="127.0.0.1", help="address that clients connect to (default: %(default)s)")
    machines.add_argument(
        "--port", type=int, default=9092, help="Fleet port; 0 takes a free one (default: %(default)s)"
    )
    machines.add_argument(
        "--insecure",
        action="count",
        default=0,
        help="plain text, and clients without keys: on loopback; given twice, on any address",
    )
    tls = parser.add_argument_group("TLS and clients' keys (instead of --insecure)")
    tls.add_argument(
        "--certs",
        type=Path,
        metavar="DIR",
        help="folder of `certs init` and `clients add` (default: $HYPERBLOOM_CERTS, else certs)",
    )
    tls.add_argument("--tls-certificate", type=Path, metavar="FILE", help="another certificate of the server, PEM")
    tls.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key, PEM")
    tls.add_argument("--tls-ca", type=Path, metavar="FILE", help="the CA that signed it, PEM; clients need it too")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if (code := run_command("flower-server", _COMMANDS, arguments)) is not None:
        return code
    args = build_parser().parse_args(arguments)
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")
    console = Console()
    try:
        if args.list:
            from hyperbloom.server.catalogue import print_catalogue

            print_catalogue(console)
        elif args.explain:
            from hyperbloom.server.catalogue import print_keys

            print_keys(console, args.explain)
        elif args.go_on and _complete(args):
            _say(console, f"the run in {args.run_dir} is complete; name a new --run-dir for the next one")
        else:
            with terminate_as_interrupt():
                _run(_as_it_began(args, arguments) if args.resume and not args.go_on else args, console)
    except HyperbloomError as error:
        print(f"flower-server: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("flower-server: stopped; the run folder holds what was done; --resume goes on with it", file=sys.stderr)
        return 130
    return 0


def _flag(key: str) -> str:
    return "--" + key.removesuffix("_s").replace("_", "-")


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_FILES = ("certs", "tls_certificate", "tls_key", "tls_ca")
_SECURITY = ("insecure", *_FILES)
_MACHINES = ("engine", "vectorise", "host", "port", "local_clients", "metrics_port", "tensorboard", *_SECURITY)


def _machines(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that say where a run runs, as the run folder keeps them for `--resume`."""
    flags = {name: getattr(args, name) for name in _MACHINES}
    return {name: str(value.resolve()) if isinstance(value, Path) else value for name, value in flags.items()}


def _as_it_began(args: argparse.Namespace, arguments: list[str] | None) -> argparse.Namespace:
    """Return the flags of a run that is resumed: those that it began with where none are given.

    Raises:
        ConfigError: a flag would change the run, or the folder is not one of a run.
    """
    changes = [*_FLAGS, *_DATA_FLAGS, "dp_clients", "secure_aggregation", "baselines", "set", "config", "run_dir"]
    for name in changes:
        if getattr(args, name.removesuffix("_s")) not in (None, [], False):
            raise ConfigError(f"--resume: {_flag(name)} would change the run; leave it out, or start a new run")
    path = args.resume / "environment.json"
    try:
        began = json.loads(path.read_text()).get("machines", {})
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"--resume: expected the folder of a run, found no readable {path} ({error})") from None
    parser = build_parser()
    given = [name for name in _MACHINES if getattr(args, name) != parser.get_default(name)]
    if "vectorise" in given and args.vectorise != began.get("vectorise"):
        raise ConfigError("--resume: --vectorise would change the run (in the last bits); leave it out")
    if set(given) & set(_SECURITY):
        began = {name: value for name, value in began.items() if name not in _SECURITY}
    paths = {name: Path(value) for name, value in began.items() if name in _FILES and value}
    parser.set_defaults(**(began | paths))
    return parser.parse_args(arguments)


def _complete(args: argparse.Namespace) -> bool:
    """Return whether the run of `--go-on` is over; one that has begun, but is not over, becomes one to resume.

    Raises:
        ConfigError: there is no --run-dir or no port, or the run in the folder is another than the flags describe.
    """
    if args.resume or not args.run_dir:
        raise ConfigError("--go-on: expected --run-dir DIR and no --resume")
    if not args.port:
        raise ConfigError("--go-on: expected a --port, at which clients find the server again; found 0")
    from hyperbloom.server.checkpoint import has_begun, is_over

    if not has_begun(args.run_dir):
        return False
    config = load_run_config(args.run_dir / "config.yaml", {})
    if config != _config(args):
        raise ConfigError(f"--go-on: {args.run_dir} holds another run than these flags describe; name a new --run-dir")
    if is_over(args.run_dir, config):
        return True
    args.resume = args.run_dir
    return False


def _config(args: argparse.Namespace) -> RunConfig:
    if args.resume:
        return load_run_config(args.resume / "config.yaml", {})
    overrides: dict[str, Any] = {key: getattr(args, key.removesuffix("_s")) for key in _FLAGS}
    overrides |= {path: getattr(args, key) for key, path in _DATA_FLAGS.items()}
    if args.baselines is not None:
        overrides["baselines"] = [name.strip() for name in args.baselines.split(",") if name.strip()]
    if args.dp_clients:
        overrides["privacy.where"] = "client"
    if args.secure_aggregation:
        overrides["secure_aggregation"] = True
    overrides = {key: value for key, value in overrides.items() if value is not None}
    overrides |= dict(parse_assignment(text) for text in args.set)
    if args.local_clients and "clients" not in overrides and args.config is None:
        overrides["clients"] = args.local_clients
    return load_run_config(args.config, overrides)


@dataclass(frozen=True)
class _Security:
    """TLS files and the registry of clients, or none of them for plain text."""

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    clients: Path | None = None

    def client_flags(self, address: str) -> list[str]:
        """Return the flags, but for its key, of a client on this machine that connects to `HOST:PORT`."""
        if self.ca:
            return ["--root-certificates", str(self.ca)]
        return ["--insecure"] * (1 if is_loopback(address.rsplit(":", 1)[0]) else 2)


def _security(args: argparse.Namespace) -> _Security:
    files = {"--tls-certificate": args.tls_certificate, "--tls-key": args.tls_key, "--tls-ca": args.tls_ca}
    given = [flag for flag, path in files.items() if path]
    if args.insecure and (given or args.certs):
        raise ConfigError(f"--insecure: expected alone or not at all, found with {(given or ['--certs'])[0]}")
    if args.insecure:
        check_insecure("--host", args.host, args.insecure)
        return _Security()
    if given and len(given) < len(files):
        missing = ", ".join(flag for flag in files if flag not in given)
        raise ConfigError(f"expected all three TLS files or none; missing: {missing}")
    from hyperbloom.server.certificates import Certificates, check_files, default_folder

    folder = Certificates(args.certs or default_folder())
    args.certs = folder.folder  # for --resume, which may be called elsewhere
    if not given:
        if not folder.server.is_file():
            raise ConfigError(
                f"no certificates in {folder.folder}: make them with `flower-server certs init --host NAME_OR_IP`, "
                "or speak plain text on this machine with --insecure"
            )
        files = {"server.pem": folder.server, "server.key": folder.server_key, "ca.pem": folder.ca}
    certificate, key, ca = files.values()
    check_files(certificate, key, ca, list(files))
    return _Security(certificate, key, ca, folder.clients)


def _check(args: argparse.Namespace, config: RunConfig) -> None:
    """Refuse, before the run has a folder, what cannot be run; the cheap checks come first."""
    if args.vectorise is not None and args.engine != "inline":
        raise ConfigError(f"--vectorise: expected with --engine inline, found --engine {args.engine}")
    if config.secure_aggregation and args.engine == "ray":
        raise ConfigError(
            "--engine ray: expected grpc or inline with secure_aggregation: clients keep a round's secrets in the "
            "memory of one process"
        )
    if not 0 <= args.local_clients <= config.clients:
        raise ConfigError(f"--local-clients: expected 0 to clients = {config.clients}, found {args.local_clients}")
    # Torch, Flower and the strategies take seconds to import, which a wrong flag should not cost.
    from hyperbloom.server.loop.session import check_run

    if not args.resume:
        check_run(config, uses_data_section=bool(args.local_clients) or args.engine != "grpc")
    if args.engine == "ray":
        from hyperbloom.server.simulation import check_ray

        check_ray()
    if args.tensorboard:
        from hyperbloom.server.tensorboard import check_tensorboard

        check_tensorboard()
    if args.engine == "grpc" and args.port:
        check_port(args.host, args.port)


def _run(args: argparse.Namespace, console: Console) -> None:
    config = _config(args)
    security = _security(args) if args.engine == "grpc" else _Security()
    _check(args, config)
    from hyperbloom.server.checkpoint import locked
    from hyperbloom.server.loop.session import Session
    from hyperbloom.server.run_folder import RunFolder, new_run_folder
    from hyperbloom.server.view import TerminalView

    folder = args.resume or new_run_folder(args.run_dir, config.strategy, anew=args.go_on)
    view = TerminalView(console)
    _say(console, f"run folder: {folder}")

    try:
        with ExitStack() as stack:
            stack.enter_context(locked(folder))
            resume = None
            if args.resume:
                recorder, resume = RunFolder.resume(folder, config, view.event)
                run_id = resume.checkpoint.run_id
                for listener in (recorder, view):
                    listener.event(f"going on after {_where(config, resume.checkpoint)}")
            else:
                run_id = f"{folder.name}-{secrets.token_hex(4)}"
                if args.engine == "grpc" and not args.port:
                    from hyperbloom.server.superlink import free_port

                    args.port = free_port()
                recorder = RunFolder(folder, config, run_id, _machines(args))
            stack.enter_context(log_to(folder / "server.log"))
            listeners = [recorder, view, *_listeners(args, folder, stack, console)]
            grid, watch = stack.enter_context(_grid(args, config, security, folder, view))
            session = Session(config, grid, run_id, listeners, watch, resume)
            try:
                results = session.run()
            except (HyperbloomError, KeyboardInterrupt) as error:
                recorder.event(f"the run stopped: {str(error) or 'Ctrl-C'}")
                raise
    except OSError as error:
        if error.errno not in _DISK:
            raise
        raise DiskError(
            f"cannot write to {folder}: {error.strerror}. Nothing is half-written; make room, and go on with "
            f"flower-server --resume {folder}"
        ) from None
    finally:
        view.close()
    _tell_results(session, results, recorder, console)


def _tell_results(
    session: "Session", results: "Mapping[str, Selection]", recorder: "RunFolder", console: Console
) -> None:
    """Print what has come out of a run that is complete, and write its report."""
    from hyperbloom.server.view import results_table
    from hyperbloom.strategies.algorithm import is_novel

    examples = {client.client_id: client.about.train_examples for client in session.roster}
    _say(console, "test accuracy in percent, at the round that validation selected")
    novel = {client.client_id for client in session.roster if is_novel(client, session.config)}
    console.print(results_table(results, examples, novel))
    for line in recorder.privacy_report():
        _say(console, line)
    _write_report(recorder.path, console)
    _say(console, f"everything is in {recorder.path}")


def _listeners(args: argparse.Namespace, folder: Path, stack: ExitStack, console: Console) -> "Iterator[Listener]":
    """Yield who else wants to hear of the run; what they hold is let go of with `stack`."""
    if args.metrics_port:
        from hyperbloom.server.metrics import RunMetrics, served

        metrics = RunMetrics()
        _say(console, f"metrics: {stack.enter_context(served(metrics, args.metrics_port))}")
        yield metrics
    if args.tensorboard:
        from hyperbloom.server.tensorboard import TensorBoard

        board = TensorBoard(folder)
        stack.callback(board.close)
        yield board


def _write_report(folder: Path, console: Console) -> None:
    """Write the report, if that is quickly done; a run that is complete must not fail for it."""
    from hyperbloom.server.report import write_report

    if sum(path.stat().st_size for path in folder.rglob("*.jsonl")) > LARGEST_FOR_REPORT:
        _say(console, f"its report would take long; flower-server report {folder} writes it")
        return
    with log_to(folder / "server.log"):
        try:
            _say(console, f"report: {write_report(folder, mix=False)}")
        except Exception as error:
            logging.getLogger(__name__).exception("the report could not be written")
            hint = f"the report could not be written ({error}); flower-server report {folder} tries again"
            _say(console, hint, "yellow")


def _where(config: RunConfig, checkpoint: "Checkpoint") -> str:
    name = [config.strategy, *config.baselines][checkpoint.phase]
    return f"round {max(0, checkpoint.progress.round)} of {name}"


@contextmanager
def _grid(
    args: argparse.Namespace, config: RunConfig, security: _Security, folder: Path, view: "TerminalView"
) -> "Iterator[tuple[Grid, Callable[[], None]]]":
    """Yield the grid of the chosen engine, and what to call while waiting: it raises if a local client failed."""
    from hyperbloom.server.run_folder import adopt_identities

    if not args.resume:
        adopt_identities(config, folder)
    if args.engine == "inline":
        from hyperbloom.server.engine import inline_grid

        yield inline_grid(config, folder, args.vectorise), lambda: None
        return
    if args.engine == "ray":
        from hyperbloom.server.engine import virtual_clients
        from hyperbloom.server.simulation import simulation_grid

        with simulation_grid(virtual_clients(config, folder), config.clients) as simulated:
            yield simulated
        return
    from hyperbloom.server.local_clients import local_clients, make_keys, printed_line

    keys = make_keys(args.local_clients, config, folder / "clients") if args.local_clients and security.ca else None
    console = view.console
    with _fleet(args, security, folder, console, view.event, keys) as grid:
        address = _address(args.host, args.port)
        local_address = f"127.0.0.1:{args.port}" if args.host in ("0.0.0.0", "127.0.0.1", "localhost") else address
        if args.local_clients < config.clients:
            first, last = config.part(args.local_clients)[0], config.part(config.clients - 1)[0]
            numbers = f"from {first} to {last}" if first < last else f"= {first}"
            _say(console, f"run this on each machine, NAME its own and I {numbers}:")
            flags = [*security.client_flags(address), *(["--key", "NAME.pem"] if security.ca else [])]
            _say(console, f"  {printed_line(address, flags, config)}")
        flags = security.client_flags(local_address)
        with local_clients(args.local_clients, local_address, flags, config, folder / "clients") as watch:
            yield grid, watch


@contextmanager
def _fleet(
    args: argparse.Namespace,
    security: _Security,
    folder: Path,
    console: Console,
    tell: Callable[[str], None],
    keys: Path | None = None,
) -> "Iterator[LiveGrid]":
    """Run a SuperLink at `--host` and `--port` for the registered clients and those of `keys`, and yield its grid."""
    from hyperbloom.server.superlink import Tls, superlink

    if args.insecure and not is_loopback(args.host):
        _say(console, "--insecure: everyone on the network can read and forge what is sent", "yellow")
    tls = None
    if security.certificate and security.key and security.ca and security.clients:
        if not keys and not security.clients.exists():
            _say(console, "no client may join yet: flower-server clients add NAME --public-key FILE", "yellow")
        registries = (security.clients, keys) if keys else (security.clients,)
        tls = Tls(security.certificate, security.key, security.ca, registries)
    with superlink(f"{args.host}:{args.port}", folder, __version__, tls, tell) as grid:
        yield grid


@contextmanager
def fleet_for_newcomers(
    args: argparse.Namespace, folder: Path, console: Console, tell: Callable[[str], None]
) -> "Iterator[LiveGrid]":
    """Check the flags of a server, run its SuperLink with the log in `folder`, and say how newcomers come to it."""
    security = _security(args)
    from hyperbloom.server.superlink import free_port

    if args.port:
        check_port(args.host, args.port)
    args.port = args.port or free_port()
    folder.mkdir(parents=True, exist_ok=True)
    with log_to(folder / "server.log"), _fleet(args, security, folder, console, tell) as grid:
        address = _address(args.host, args.port)
        flags = " ".join([*security.client_flags(address), *(["--key", "NAME.pem"] if security.ca else [])])
        _say(console, "ready; a newcomer runs:")
        _say(console, f"  flower-client join --server {address} {flags} --data WHAT --out model")
        yield grid


def _address(host: str, port: int) -> str:
    """Return what clients on other machines connect to."""
    return f"{socket.gethostname() if host in ('0.0.0.0', '::') else host}:{port}"


def _say(console: Console, text: str, style: str = "") -> None:
    """Print a line as it is: paths and names are no markup."""
    console.print(text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)


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


class _LogFile(logging.FileHandler):
    """What the disk does not take is lost without a word: the run's own files tell."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Go on."""


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Write our log, and Flower's, into the run folder."""
    handler = _LogFile(path)
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
