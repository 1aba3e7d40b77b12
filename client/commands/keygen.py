"""Make this client's key pair; the private key stays here, the server gets the public one.

The public key is written beside it (FILE with suffix .pub) and printed: send it to whoever runs the server, who adds it
with `flower-server clients add NAME --public-key FILE`.
"""

import argparse
from pathlib import Path

from hyperbloom.common.errors import ConfigError

EXAMPLE = "keygen --out ward-7.pem"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `keygen`."""
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="where the private key goes (mode 0600)"
    )


def run(args: argparse.Namespace) -> None:
    """Make the pair."""
    from hyperbloom.common.keys import fingerprint, make_key, public_pem, write_private_key
    from hyperbloom.common.storage import write_bytes

    public = args.out.with_suffix(".pub")
    if args.out == public:
        raise ConfigError(f"--out: expected another suffix than .pub, which the public key gets; found {args.out}")
    for path in (args.out, public):
        if path.exists():
            raise ConfigError(f"--out: {path} is there already; keys are never overwritten")
    key = make_key()
    write_private_key(args.out, key)
    pem = public_pem(key)
    write_bytes(public, pem.encode())
    print(f"{pem}fingerprint {fingerprint(pem)}\nthe private key is {args.out}, the public key {public}")
