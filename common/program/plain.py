"""Where plain text is allowed: on loopback, or anywhere if the user gives --insecure twice."""

import ipaddress

from hyperbloom.common.errors import ConfigError

__all__ = ["check_insecure", "is_loopback"]


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is on this machine's loopback interface."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_insecure(where: str, host: str, times: int) -> None:
    """Refuse plain text over a network.

    Args:
        where: the flag that named the host.
        host: name or address.
        times: number of times that --insecure was given.

    Raises:
        ConfigError: the host is not on loopback, and --insecure was not given twice.
    """
    if times == 1 and not is_loopback(host):
        raise ConfigError(
            f"--insecure: {where} {host} is not loopback, and everyone on the network could read and forge what is "
            "sent; use certificates (docs/security.md), or say --insecure --insecure"
        )
