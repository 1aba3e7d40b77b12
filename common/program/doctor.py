"""The checks of `flower-server doctor` and `flower-client doctor`: the machine, its files, and the way to the server.

Each check returns findings and raises nothing. A problem is a row of the table with advice.
"""

import datetime as dt
import json
import platform
import shutil
import socket
import ssl
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from cryptography import x509

from hyperbloom.common.errors import HyperbloomError
from hyperbloom.common.secrecy.keys import shown_certificates

State = Literal["ok", "warning", "failure"]
TIMEOUT_S = 5.0
SOON = dt.timedelta(days=30)
LEAST_FREE, LITTLE_FREE = 100 * 2**20, 2**30
CLOCK = "set this machine's clock"

# Advice for parts of OpenSSL's error text; the first match counts.
_VERIFICATION = {
    "expired": "make a new certificate on the server (flower-server certs renew), or set this machine's clock",
    "not yet valid": CLOCK,
    "mismatch": "make a certificate that names this address (flower-server certs renew --host NAME_OR_IP)",
    "": "get the ca.pem of this server from whoever runs it, and give it as --root-certificates",
}


@dataclass(frozen=True)
class Finding:
    """A row of the table: the object of the check, its state, what was found, and what to do if it is not ok."""

    what: str
    state: State
    found: str
    do: str = ""


def report(findings: Sequence[Finding], as_json: bool = False) -> int:
    """Print the table, or a JSON list of findings; return the exit code, 1 if something fails."""
    failures = sum(finding.state == "failure" for finding in findings)
    if as_json:
        print(json.dumps([vars(finding) for finding in findings], indent=1))
        return int(failures > 0)
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("what", "", box=None, pad_edge=False)
    table.add_column("found", overflow="fold")  # do not truncate paths
    table.add_column("what to do", overflow="fold")
    for finding in findings:
        colour = {"ok": "green", "warning": "yellow", "failure": "red"}[finding.state]
        table.add_row(finding.what, Text(finding.state, colour), Text(finding.found), Text(finding.do))
    Console().print(table)
    said = f"{failures} failure{'s' if failures > 1 else ''}"
    print(said if failures else "nothing here keeps a run from working")
    return int(failures > 0)


def check_machine() -> list[Finding]:
    """Look at Python, packages, accelerators and threads."""
    return [Finding("Python", "ok", platform.python_version()), check_packages(), *_torch()]


def check_packages() -> Finding:
    """Compare the installed packages, except those of extras, with the tested ranges."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in requires("hyperbloom") or ()]
    except PackageNotFoundError:
        return Finding("packages", "warning", "hyperbloom itself is not installed", "pip install it")
    wanted = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    wrong = []
    for one in wanted:
        try:
            found = version(one.name)
        except PackageNotFoundError:
            found = "none"
        if found == "none" or not one.specifier.contains(found, prereleases=True):
            wrong.append((one, found))
    if not wrong:
        return Finding("packages", "ok", f"{len(wanted)} in their tested ranges")
    said = "; ".join(f"{one.name} {found}, tested with {one.specifier}" for one, found in wrong)
    lacking = any(found == "none" for _, found in wrong)
    line = " ".join(f"'{one.name}{one.specifier}'" for one, _ in wrong)
    return Finding("packages", "failure" if lacking else "warning", said, f"pip install {line}")


def _torch() -> list[Finding]:
    try:
        import torch
    except Exception as error:
        return [Finding("torch", "failure", f"cannot be imported: {error}", "install it anew")]
    accelerator = Finding("accelerator", "ok", "none; training is on the CPU")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        accelerator = Finding("accelerator", "ok", f"CUDA: {', '.join(names)}")
    elif torch.backends.mps.is_available():
        accelerator = Finding("accelerator", "ok", "MPS; training is on the CPU, unless you set --device mps")
    elif Path("/dev/nvidia0").exists():
        found = f"an NVIDIA device, which torch {torch.__version__} does not see"
        accelerator = Finding("accelerator", "warning", found, "install a driver and a torch of one CUDA version")
    from hyperbloom.common.program.device import cores, limit_threads

    limit_threads()
    return [accelerator, Finding("threads", "ok", f"{torch.get_num_threads()} for {cores()} cores")]


def check_folder(what: str, folder: Path) -> Finding:
    """Try to write into a folder, or into its nearest existing parent, and check the free space."""
    there = folder.expanduser().absolute()
    try:
        while not there.exists() and there != there.parent:
            there = there.parent
        with tempfile.NamedTemporaryFile(dir=there) as file:
            file.write(b"x")
            file.flush()
        free = shutil.disk_usage(there).free
    except OSError as error:
        do = f"make {folder} writable for this user, or choose another"
        return Finding(what, "failure", f"{there}: {error.strerror or error}", do)
    found = f"{folder}: writable, {free / 2**30:.1f} GiB free"
    if free < LITTLE_FREE:
        return Finding(what, "failure" if free < LEAST_FREE else "warning", found, "make room, or choose another disk")
    return Finding(what, "ok", found)


def check_file(what: str, check: Callable[[], str], do: str = "put the right file there") -> Finding:
    """Return the result of `check`, or its error, with the advice after its last ';' or else `do`."""
    try:
        return Finding(what, "ok", check())
    except HyperbloomError as error:
        found, _, advice = str(error).rpartition("; ")
        told = found and not advice.startswith("found")
        return Finding(what, "failure", found, advice) if told else Finding(what, "failure", str(error), do)


def check_expiry(what: str, path: Path, renew: str) -> Finding:
    """Check the validity of the first certificate in a file; `renew` is the advice if it ends soon."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        return Finding(what, "failure", f"{path}: {error.strerror}", "put the file there, or name another")
    except (ValueError, x509.InvalidVersion):
        return Finding(what, "failure", f"{path}: no certificate in PEM", "name another file")
    return _validity(what, certificate, renew)


def _validity(what: str, certificate: x509.Certificate, renew: str) -> Finding:
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    now, until = dt.datetime.now(dt.UTC), f"valid until {last:%Y-%m-%d}"
    if now < first:
        return Finding(what, "failure", f"valid from {first:%Y-%m-%d %H:%M} UTC, now {now:%Y-%m-%d %H:%M}", CLOCK)
    if now > last:
        return Finding(what, "failure", f"expired on {last:%Y-%m-%d}", f"{renew}; or {CLOCK}")
    return Finding(what, "warning", until, renew) if last - now < SOON else Finding(what, "ok", until)


def check_server(address: str, ca: Path | None, insecure: bool) -> list[Finding]:
    """Connect to `HOST:PORT` and do a TLS handshake as a client does, but send no request.

    `ca` is the CA of the server's certificate, None for those of the system. An `insecure` server speaks plain text.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        return [Finding("server", "failure", address, "name it as HOST:PORT, such as gpu-box:9092")]
    try:
        socket.create_connection((host, int(port)), TIMEOUT_S).close()
    except socket.gaierror as error:
        return [Finding("server", "failure", f"{host}: {error.strerror}", "check the name, or use the address")]
    except ConnectionRefusedError:
        return [Finding("server", "failure", f"nothing listens at {address}", "start flower-server; check the port")]
    except OSError as error:
        do = "check the address, and firewalls on the way"
        return [Finding("server", "failure", f"{address}: {error.strerror or 'no answer'}", do)]
    reached = Finding("server", "ok", f"{address} takes connections")
    shown = next(iter(shown_certificates(host, int(port), TIMEOUT_S)), None)
    if insecure:
        wrong = Finding("TLS", "failure", "it speaks TLS", "leave --insecure out")
        return [reached, wrong] if shown else [reached]
    return [reached, *_handshake(host, int(port), ca, shown)]


def _handshake(host: str, port: int, ca: Path | None, shown: x509.Certificate | None) -> list[Finding]:
    try:
        context = ssl.create_default_context(cafile=str(ca) if ca else None)
    except (OSError, ValueError):  # an ssl.SSLError is an OSError
        return [Finding("TLS", "failure", f"no certificates in {ca}", "give the server's ca.pem")]
    context.set_alpn_protocols(["h2"])  # gRPC refuses handshakes without it and logs them
    if shown is None:
        return [Finding("TLS", "failure", "it does not speak TLS", "check the port; was it started with --insecure?")]
    dates = _validity("its certificate", shown, "whoever runs the server: flower-server certs renew")
    try:
        with (
            socket.create_connection((host, port), TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return [Finding("TLS", "ok", f"it is {host}, signed by {ca or 'a CA of the system'}"), dates]
    except ssl.SSLCertVerificationError as error:
        do = next(advice for text, advice in _VERIFICATION.items() if text in error.verify_message.lower())
        do = do if ca else "join with --token, which names the server's CA, or give --root-certificates"
        return [Finding("TLS", "failure" if ca else "warning", error.verify_message, do), dates]
    except OSError as error:
        return [Finding("TLS", "failure", str(error), "check that it is the Fleet port of a flower-server"), dates]
