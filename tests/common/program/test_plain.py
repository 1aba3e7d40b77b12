"""Where plain text may be spoken."""

import pytest

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.program.plain import check_insecure, is_loopback, place_of


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.255.0.9", "::1", "[::1]"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    check_insecure("--host", host, 1)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.5", "128.0.0.1", "fe80::1", "gpu-box", "127.0.0.1.evil.org", ""]
)
def test_all_else_is_a_network(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="is not loopback"):
        check_insecure("--host", host, 1)
    check_insecure("--host", host, 2)


def test_a_place_is_a_host_and_a_port() -> None:
    assert place_of("gpu-box:9092") == ("gpu-box", 9092) and place_of("[::1]:9092") == ("::1", 9092)


@pytest.mark.parametrize("address", ["gpu-box", "::1:9092", "fe80::1", ":9092", "gpu-box:0", "gpu-box:many", "[::1]"])
def test_what_is_no_place_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^--server: expected HOST:PORT, such as gpu-box:9092 or \["):
        place_of(address)
