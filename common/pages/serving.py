"""How a page is served: read-only, in a process of its own, to one machine unless another address is named."""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hyperbloom.common.errors import ConnectionFailed, HyperbloomError
from hyperbloom.common.program.plain import is_loopback, listening_at
from hyperbloom.common.program.signals import end_children, end_with

PARENT = "HYPERBLOOM_PAGE_OF"
"""Environment variable of a page's process: the process with whose end it ends."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


async def _refused(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = error.detail if isinstance(error, HTTPException) else str(error)
    return Response(f"{text}\n", status, HEADERS, "text/plain")


def read_only(routes: Sequence[Route], host: str) -> Starlette:
    """Return a web application.

    If `host`, where it listens, is on loopback, requests that name another host are refused: so a page from elsewhere
    cannot read this one by pointing its own name at this machine.
    """
    # Starlette looks at what stands before the first colon, which is a bracket where an IPv6 address is named.
    hosts = ["localhost", "127.0.0.1", "[", host] if is_loopback(host) else ["*"]
    return Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers={HTTPException: _refused, HyperbloomError: _refused},
    )


def serve_at(address: str, application: Callable[[str], Starlette], say: Callable[[str], None]) -> None:
    """Serve an application of its host at `[HOST:]PORT` until Ctrl-C; `say` receives the address.

    Raises:
        ConfigError: the address is invalid.
        ConnectionFailed: the server cannot listen there.
    """
    host, port = listening_at("--web", address)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConnectionFailed(f"--web {address}: cannot listen there: {error.strerror or error}") from None
    if parent := os.environ.get(PARENT):
        end_with(int(parent))
    with listening:
        shown = f"[{host}]" if ":" in host else host
        say(f"live page: http://{shown}:{listening.getsockname()[1]}/")
        # uvloop loses a SIGTERM that comes while it starts, and then never ends.
        # A page that is open when this ends is cut off, which is no error.
        logging.getLogger("uvicorn.error").addFilter(lambda x: not x.exc_info or isinstance(x.exc_info[1], Exception))
        how: dict[str, Any] = {"loop": "asyncio", "log_level": "warning", "access_log": False}
        config = uvicorn.Config(application(host), timeout_graceful_shutdown=1, **how)
        uvicorn.Server(config).run(sockets=[listening])


@contextmanager
def serve_in_child(command: Sequence[str], address: str) -> Iterator[str]:
    """Run `python -m` with a command and `--web ADDRESS` beside this process; yield its line with the address.

    Raises:
        ConnectionFailed: the server cannot start; the message is its own.
    """
    listening_at("--web", address)
    child = subprocess.Popen(
        [sys.executable, "-m", *command, "--web", address],
        env={**os.environ, PARENT: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert child.stdout is not None
    # Who speaks no HTTP to the page fills a pipe that nobody reads, and then the page stands still.
    drain = threading.Thread(target=deque, args=(child.stdout, 0), daemon=True)
    try:
        line = ""
        while not line.startswith("live page:"):  # the system may warn of something before
            said, line = line, child.stdout.readline()
            if not line:
                raise ConnectionFailed(said.strip() or f"--web {address}: the page could not be started")
        drain.start()
        yield line.strip()
    finally:
        end_children([child], 0.0)
        if drain.ident is not None:
            drain.join()
        child.stdout.close()
