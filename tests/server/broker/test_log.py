"""What the SuperLink says, and what of it is kept and told."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hyperbloom.server.broker import log as superlink_log
from hyperbloom.server.broker.log import follow, say

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


@pytest.fixture
def heard(tmp_path: Path) -> Callable[[str], tuple[list[str], str]]:
    """Return a function that writes to standard error as gRPC does, and returns what is told and what is kept."""

    def hear(text: str) -> tuple[list[str], str]:
        told: list[str] = []
        with follow(tmp_path / "superlink.log", told.append):
            os.write(2, text.encode())
        return told, (tmp_path / "superlink.log").read_text()

    return hear


Hear = Callable[[str], tuple[list[str], str]]


def test_grpcs_errors_are_kept_and_what_others_write_goes_where_it_went(
    heard: Hear, capfd: pytest.CaptureFixture[str]
) -> None:
    error = "E1121 11:00:00.1 7 server.cc:5] cannot listen\n"
    assert heard(f"WARNING : something\nTraceback:\n{error}  File x\nno newline") == ([], error)
    assert capfd.readouterr().err == "WARNING : something\nTraceback:\n  File x\nno newline\n"
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "afterwards\n"


def test_a_handshake_that_works_leaves_nothing(heard: Hear) -> None:
    assert heard("".join(trace("x").splitlines(keepends=True)[:2])) == ([], "")


@pytest.mark.parametrize(
    ("peer", "shown"),
    [("ipv4:10.0.0.9:53334", "10.0.0.9"), ("ipv6:%5B2001:db8::1%5D:9", "2001:db8::1"), ("ipv6:[::1]:9", "::1")],
)
def test_plain_text_at_the_tls_port_is_told_with_its_origin(heard: Hear, peer: str, shown: str) -> None:
    told, kept = heard(trace(PLAIN, peer))
    assert told == [f"refused {shown}: it spoke plain text to the TLS port (is it a client with --insecure?)"]
    assert kept == told[0] + "\n"


def test_a_client_that_breaks_off_may_lack_the_ca(heard: Hear) -> None:
    (line,), _ = heard(trace(CLOSED))
    assert line.startswith("10.0.0.9 broke off the TLS handshake: a client that does not trust this certificate")


def test_any_other_reason_is_told_in_grpcs_words(heard: Hear) -> None:
    assert heard(trace("DEADLINE"))[0] == ["refused 10.0.0.9: the TLS handshake failed (DEADLINE)"]
    (line,), _ = heard(trace("Cannot check peer: missing selected ALPN property."))
    assert line.endswith("ALPN property.); does it speak HTTP (--http), or scan ports?")


def test_what_the_door_says_is_told_and_kept(tmp_path: Path) -> None:
    told: list[str] = []
    with follow(tmp_path / "log", told.append):
        say("refused ipv4:10.0.0.9:1: its key SHA256:x is unknown or revoked")
    say("nobody listens any more")
    assert told == ["refused 10.0.0.9: its key SHA256:x is unknown or revoked"]
    assert (tmp_path / "log").read_text() == f"{told[0]}\n"


def test_what_flower_says_of_a_member_floods_no_terminal_and_controls_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flower = logging.getLogger("flwr")
    flower.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, "flwr"), follow(tmp_path / "log", lambda text: None):
            for number in range(5):
                flower.info("asks for fab_hash=%s", f"{number}\x1b[2J\nthe run is over" + "x" * 10_000)
            flower.info("another line")
    finally:
        flower.removeHandler(caplog.handler)
    first, other = dict.fromkeys(record.getMessage() for record in caplog.records if record.name == "flwr")
    assert first.startswith("asks for fab_hash=0 [2J the run is over") and len(first) < 1000
    assert other == "another line"


def test_a_stranger_whose_words_grpc_logs_fills_no_disk_and_controls_no_terminal(
    heard: Hear, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "I1121 18:18:47.434 7 chttp2_transport.cc:99] Got goaway [2] Debug Text: x\n\x1b[31mFORGED\x07" + "z" * 300
    monkeypatch.setattr(superlink_log, "LARGEST_LOG", 1000)
    told, kept = heard(f"{words}\n" * 130 + "E1121 11:00:00.1 7 server.cc:5] \x1b[2J\n" * 5)
    assert told == [] and kept == "", "the others are dropped in this minute"
    err = capfd.readouterr().err
    assert err.count("FORGED") == superlink_log.MOST and "\x1b" not in err and "\x07" not in err
    assert len(err) < superlink_log.MOST * (superlink_log.LONGEST + 2)
    told, kept = heard("E1121 11:00:00.1 7 server.cc:5] \x1b[2J%s\n" * 200)
    assert told == [] and kept.startswith("E1121 11:00:00.1 7 server.cc:5]  [2J%s\n") and len(kept) <= 1000
    assert max(path.stat().st_size for path in tmp_path.iterdir()) <= 1000, "the file is bounded"


def test_what_a_stranger_calls_a_reason_is_short_and_controls_no_terminal(heard: Hear) -> None:
    (line,), kept = heard(trace("%1B[2J" + "z" * 9000))
    assert line.startswith("refused 10.0.0.9: the TLS handshake failed ( [2Jzz") and len(line) <= superlink_log.LONGEST
    assert kept == line + "\n"


def test_a_stranger_who_knocks_all_the_time_is_told_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, told = [1000.0], list[str]()
    monkeypatch.setattr(superlink_log.time, "monotonic", lambda: now[0])
    with follow(tmp_path / "log", told.append):
        for port in range(50):
            now[0] += 1
            say(f"refused ipv4:10.0.0.9:{port}: its key is unknown")
        assert len(told) == 1
        for i in range(2500):
            say(f"refused ipv4:10.1.{i // 200}.{i % 200}:5: its key is unknown")
        assert len(told) == superlink_log.MOST, "strangers of many addresses fill no disk"
        (once,) = superlink_log._log.filters
        assert len(once._said) <= superlink_log.MOST, "nor memory"
        now[0] += superlink_log.AGAIN_AFTER_S
        for text in "aba":
            say(text)
        assert told[superlink_log.MOST :] == ["a", "b"]
    assert not superlink_log._log.filters, "the next SuperLink of this process begins anew"


def test_grpc_traces_handshakes_here_and_not_in_processes_that_are_started_from_here() -> None:
    program = (
        "import os, sys; from hyperbloom.server.broker.log import trace; trace(); "
        "print([name for name in os.environ if name.startswith('GRPC')])\n"
        "import socket, time, grpc\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "server = grpc.server(ThreadPoolExecutor(1))\n"
        "port = server.add_insecure_port('127.0.0.1:0'); server.start()\n"
        "grpc.channel_ready_future(grpc.insecure_channel(f'127.0.0.1:{port}')).result(30)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert done.stdout == "[]\n"
    assert "handshaker" in done.stderr and "endpoint_peer_address=ipv4:127.0.0.1" in done.stderr


def test_on_a_full_disk_the_user_hears_all_and_nobody_fails() -> None:
    told: list[str] = []
    with follow(Path("/dev/full"), told.append):
        for line in ("refused 10.0.0.9: its key is unknown", "refused 10.0.0.8: its key is unknown"):
            say(line)
        os.write(2, b"E1121 11:00:00.1 7 server.cc:5] cannot listen\n")
    assert [line.partition(":")[0] for line in told] == ["refused 10.0.0.9", "refused 10.0.0.8"]


def test_a_line_that_cannot_be_shown_is_kept_and_stops_nobody(tmp_path: Path) -> None:
    def fail(text: str) -> None:
        raise RuntimeError("dictionary changed size during iteration")

    with follow(tmp_path / "superlink.log", fail):
        say("refused 10.0.0.9")
    assert (tmp_path / "superlink.log").read_text() == "refused 10.0.0.9\n"
