"""Addresses, and where plain text is allowed: on loopback, or anywhere with --insecure given twice."""

import ipaddress

from hyperbloom.common.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is on this machine's loopback interface."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_insecure(where: str, host: str, times: int) -> None:
    """Refuse plain text over a network; ConfigError if the host is not on loopback, and --insecure was not given twice.

    `where` is the flag that named the host, and `times` is how often --insecure was given.
    """
    if times == 1 and not is_loopback(host):
        raise ConfigError(
            f"--insecure: {where} {host} is not loopback, and everyone on the network could read and forge what is "
            "sent; use certificates (docs/security.md), or say --insecure --insecure"
        )


def place_of(address: str, flag: str = "--server") -> tuple[str, int]:
    """Return the host and the port of `HOST:PORT`; ConfigError if the address is none."""
    host, _, port = address.rpartition(":")
    bare = ":" in host and host[:1] != "["  # of an IPv6 address, whose last group is no port
    if not host or bare or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        raise ConfigError(f"{flag}: expected HOST:PORT, such as gpu-box:9092 or [::1]:9092; found {address!r}")
    return host.strip("[]"), int(port)


def listening_at(flag: str, address: str) -> tuple[str, int]:
    """Return host and port of `[HOST:]PORT`, on loopback without a host. Raise a ConfigError that names the flag."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{flag}: expected PORT or HOST:PORT, found {address!r}")
    return host.strip("[]") or "127.0.0.1", int(port)
