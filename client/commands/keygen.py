"""`flower-client keygen`."""

from pathlib import Path

import click

from hyperbloom.common.commands import FILE, Command
from hyperbloom.common.errors import ConfigError

_EPILOG = """\
\b
Example:
  flower-client keygen --out ward-7.pem
"""


@click.command("keygen", cls=Command, epilog=_EPILOG)
@click.option("--out", type=FILE, required=True, metavar="FILE", help="where the private key goes (mode 0600)")
def command(out: Path) -> None:
    """Make this client's key pair.

    The private key stays here, and the server gets the public one. The public key is written beside it (FILE with
    suffix .pub) and printed. Send it to whoever runs the server, who adds it with `flower-server clients add NAME
    --public-key FILE`.
    """
    from hyperbloom.common.keys import fingerprint, make_key, public_pem, write_private_key
    from hyperbloom.common.storage import write_bytes

    public = out.with_suffix(".pub")
    if out == public:
        raise ConfigError(f"--out: expected another suffix than .pub, which the public key gets; found {out}")
    for path in (out, public):
        if path.exists():
            raise ConfigError(f"--out: {path} is there already; keys are never overwritten")
    key = make_key()
    write_private_key(out, key)
    pem = public_pem(key)
    write_bytes(public, pem.encode())
    print(f"{pem}fingerprint {fingerprint(pem)}\nthe private key is {out}, the public key {public}")
