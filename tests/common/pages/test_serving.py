"""How pages are served: by a process that ends, and to whom."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hyperbloom.common.errors import ConnectionFailed
from hyperbloom.common.pages.serving import read_only, serve_in_child
from hyperbloom.common.program import signals

NOISY = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("live page: http://here", flush=True)
for _ in range(2000):  # a line for each request that is no HTTP
    print("WARNING:  Invalid HTTP request received." * 10, flush=True)
Path("said").touch()
time.sleep(600)
"""


def test_a_page_that_says_much_goes_on_and_one_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its pipe is full, the page stands still, and the run waits for it for ever."""
    (tmp_path / "noisy.py").write_text(NOISY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signals, "KILLED_S", 0.2)
    with serve_in_child(["noisy"], "0") as line:
        assert line == "live page: http://here"
        while not (tmp_path / "said").exists():
            time.sleep(0.01)


@pytest.mark.parametrize("ends", [False, True])
def test_what_the_system_says_before_a_page_is_no_error_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """As a loader that warns of something at the start of every process."""
    page = "" if ends else "print('live page: http://here', flush=True)\nimport time; time.sleep(600)"
    (tmp_path / "warned.py").write_text(f"print('ld.so: ignored.'); print('why', flush=True)\n{page}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signals, "KILLED_S", 0.2)
    if ends:
        with pytest.raises(ConnectionFailed, match=r"^why$"), serve_in_child(["warned"], "0"):
            pass
    else:
        with serve_in_child(["warned"], "0") as line:
            assert line == "live page: http://here"


ORPHANED = """
import os, sys, time
from hyperbloom.common.pages.serving import serve_in_child
with serve_in_child(["hyperbloom.server", "watch", sys.argv[1]], "0") as line:
    print(line, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.timeout(60)
def test_a_page_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """Else it keeps the port, and the run cannot go on there."""
    (tmp_path / "config.yaml").write_text("strategy: local")
    done = subprocess.run([sys.executable, "-c", ORPHANED, str(tmp_path)], capture_output=True, text=True)
    page = done.stdout.split()[-1]
    assert done.returncode == -9 and page.startswith("http://127.0.0.1:")
    gone = False
    while not gone:
        try:
            httpx.get(page, timeout=5)
        except httpx.TimeoutException:
            pass  # it is there, and slow
        except httpx.TransportError:
            gone = True
        time.sleep(0.1)


STREAMED = """
import asyncio
from starlette.responses import StreamingResponse
from starlette.routing import Route
from hyperbloom.common.pages.serving import read_only, serve_at

async def endless(request):
    async def lines():
        while True:
            yield "a line"
            await asyncio.sleep(0.01)
    return StreamingResponse(lines())

try:
    serve_at("0", lambda host: read_only([Route("/", endless)], host), lambda line: print(line, flush=True))
except KeyboardInterrupt:
    pass
"""


def test_an_open_page_is_no_error_when_its_server_ends() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", STREAMED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        with httpx.stream("GET", child.stdout.readline().split()[-1]) as page:
            assert next(page.iter_text())
            child.send_signal(signal.SIGINT)
            _, said = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert "ASGI" not in said and "CancelledError" not in said


@pytest.mark.parametrize(
    ("listens", "named", "status"),
    [
        ("127.0.0.1", "127.0.0.1:80", 200),
        ("::1", "[::1]:80", 200),
        ("127.0.0.1", "localhost", 200),
        ("::1", "evil.example", 400),
        ("192.0.2.1", "ward.example", 200),
    ],
)
def test_on_loopback_only_its_names_are_answered(listens: str, named: str, status: int) -> None:
    async def front(request: Request) -> Response:
        return Response("here")

    async def ask() -> int:
        transport = httpx.ASGITransport(read_only([Route("/", front)], listens))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.get("/", headers={"host": named})).status_code

    assert asyncio.run(ask()) == status
