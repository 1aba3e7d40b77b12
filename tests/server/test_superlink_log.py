"""What the SuperLink says, and what of it is kept and told."""

import io

import pytest

from hyperbloom.server.broker import log as superlink_log
from hyperbloom.server.broker.log import relay

TRACE = """\
I1121 18:18:47.434 28088 handshaker.cc:80] handshake_manager 0x7f0: adding handshaker security [0x7f] at index 1
I1121 18:18:47.434 28088 handshaker.cc:155] CallNextHandshakerLocked: error=OK shutdown=false index=0, args={ADDRESS}
I1121 18:18:47.434 28088 handshaker.cc:155] CallNextHandshakerLocked: error=REASON
=== Source Location Trace: ===
src/core/util/status_helper.cc:124
 shutdown=false index=2, args={a=b, ADDRESS, read_buffer.Length()=0, exit_early=0}
I1121 18:18:47.434 28088 channel_trace.h:396] handshake manager 0x7f0: Failed with error: REASON
=== Source Location Trace: ===
src/core/util/status_helper.cc:124

"""
PLAIN = "UNKNOWN: Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:100000f7: WRONG_VERSION_NUMBER: OK"
CLOSED = "UNAVAILABLE: Handshake read failed (Socket closed)"


def trace(reason: str, peer: str = "ipv4:10.0.0.9:53334") -> str:
    """Return what gRPC writes of a handshake that fails."""
    return TRACE.replace("ADDRESS", f"grpc.internal.endpoint_peer_address={peer}").replace("REASON", reason)


def heard(text: str) -> tuple[list[str], str]:
    """Return what is told and what is kept."""
    told: list[str] = []
    log = io.BytesIO()
    relay(text.encode().splitlines(keepends=True), log, told.append)
    return told, log.getvalue().decode()


def test_flowers_own_log_is_kept_as_it_is() -> None:
    text = "WARNING : something\nTraceback:\n  File x\nE1121 11:00:00.1 7 server.cc:5] cannot listen\nno newline"
    assert heard(text) == ([], text)


def test_a_handshake_that_works_leaves_nothing() -> None:
    assert heard("".join(trace("x").splitlines(keepends=True)[:2])) == ([], "")


@pytest.mark.parametrize(
    ("peer", "shown"),
    [("ipv4:10.0.0.9:53334", "10.0.0.9"), ("ipv6:%5B2001:db8::1%5D:9", "2001:db8::1"), ("ipv6:[::1]:9", "::1")],
)
def test_plain_text_at_the_tls_port_is_told_with_its_origin(peer: str, shown: str) -> None:
    told, kept = heard(trace(PLAIN, peer))
    assert told == [f"refused {shown}: it spoke plain text to the TLS port (is it a client with --insecure?)"]
    assert kept == told[0] + "\n"


def test_a_client_that_breaks_off_may_lack_the_ca() -> None:
    (line,), _ = heard(trace(CLOSED))
    assert line.startswith("10.0.0.9 broke off the TLS handshake: a client that does not trust this certificate")


def test_any_other_reason_is_told_in_grpcs_words() -> None:
    assert heard(trace("DEADLINE"))[0] == ["refused 10.0.0.9: the TLS handshake failed (DEADLINE)"]


def test_what_the_door_says_is_told_and_kept() -> None:
    told, kept = heard("door: refused ipv4:10.0.0.9:1: its key SHA256:x is unknown or revoked\nelse\n")
    assert told == ["refused 10.0.0.9: its key SHA256:x is unknown or revoked"]
    assert kept == f"{told[0]}\nelse\n"


def test_a_stranger_who_knocks_all_the_time_is_told_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(superlink_log.time, "monotonic", lambda: now[0])
    told: list[str] = []

    def knock() -> None:
        for port in range(50):
            now[0] += 1
            yield f"door: refused ipv4:10.0.0.9:{port}: its key is unknown\n".encode()

    relay(knock(), io.BytesIO(), told.append)  # type: ignore[arg-type, func-returns-value]
    assert len(told) == 1
    many = [f"door: refused ipv4:10.0.{i // 200}.{i % 200}:5: its key is unknown\n".encode() for i in range(2500)]
    log = io.BytesIO()
    relay(many, log, told.append)
    assert len(told) == 2501
    relay([b"door: a\n", b"door: b\n", b"door: a\n"], log, told.append)
    assert told[2501:] == ["a", "b"]
    monkeypatch.setattr(superlink_log, "AGAIN_AFTER_S", 0.0)
    relay([b"door: a\n", b"door: a\n"], log, told.append)
    assert told[2503:] == ["a", "a"]
