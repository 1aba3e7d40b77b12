"""`flower-client doctor`."""

from pathlib import Path

import click

from hyperbloom.client.flags import CONNECTION
from hyperbloom.common.commands import FOLDER, Command

_EPILOG = """\
\b
Example:
  flower-client doctor --server gpu-box:9092 --root-certificates ca.pem --key ward-7.pem
"""


@click.command("doctor", cls=Command, params=[*CONNECTION], epilog=_EPILOG)
@click.option("--client-id", default="client", metavar="NAME", help="names the default state folder")
@click.option("--state-dir", type=FOLDER, metavar="DIR", help="where the client keeps its state")
def command(
    server: str | None,
    insecure: int,
    root_certificates: Path | None,
    key: Path | None,
    client_id: str,
    state_dir: Path | None,
) -> int:
    """Check this machine before it joins.

    Looks at packages, GPU, threads, disk, clock, key, and with --server at the way to the server. Prints a table with
    what to do for each thing that is not ok. Exit code 1 if something would keep the client from joining, 0 otherwise.
    Whether the server knows this client's key shows when it joins.
    """
    from hyperbloom.client.state import default_state_dir
    from hyperbloom.common.doctor import check_expiry, check_file, check_folder, check_machine, check_server, report

    findings = [*check_machine(), check_folder("state folder", state_dir or default_state_dir(client_id))]
    if root_certificates:
        findings.append(check_expiry("CA", root_certificates, "get a new ca.pem from whoever runs the server"))
    if key:
        findings.append(check_file("key", lambda: _fingerprint(key)))
    if server:
        findings += check_server(server, root_certificates, bool(insecure))
    return report(findings)


def _fingerprint(key: Path) -> str:
    from hyperbloom.common.keys import fingerprint, public_pem, read_private_key

    return f"{key}: {fingerprint(public_pem(read_private_key(key, '--key')))}"
