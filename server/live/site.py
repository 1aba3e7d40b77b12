"""The live page's web server: `flower-server watch --web`, and `--web` on a run.

It reads run folders in a process of its own, so it can neither slow nor break a run. A browser receives a page whole,
and then, as server-sent events, the parts of it that have changed. A page loads nothing from elsewhere.
"""

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.pages.serving import HEADERS, read_only, serve_at
from hyperbloom.common.program.plain import listening_at
from hyperbloom.server.live.parts import overview_parts, run_parts
from hyperbloom.server.live.run import LiveRun, find_runs
from hyperbloom.server.pages.page import render
from hyperbloom.server.runs.lines import REPORT

LOOK_EVERY_S = 0.5
FIRST_LOOK_S = 0.2
"""Longest reading before a page is sent. What is not read by then follows as events."""

MOST_BESIDE = 4
Parts = Mapping[str, Markup]


class _Panel:
    """One run's parts, for all who look at it: they are made again only when the run has changed."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._run, self._lock = name, LiveRun(folder), threading.Lock()
        self._made: tuple[int, bool] | None = None
        self._parts: Parts = {}

    def parts(self, seconds: float) -> Parts:
        """Read the folder for at most about `seconds`, and return the parts."""
        with self._lock:
            self._run.look(seconds)
            state = self._run.version, self._run.behind
            if state != self._made:
                self._made, self._parts = state, run_parts(self._run, self._name)
            return self._parts


class _Site:
    """The pages of a folder of runs, or of a single run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._panels: dict[str, _Panel] = {}
        self._listed: dict[Path, LiveRun] = {}
        self._lock = threading.Lock()

    def _panel(self, name: str) -> _Panel:
        """Return a run's panel. Raise an HTTPException if there is no such run."""
        path = find_runs(self._folder).get(name)
        if path is None:
            raise HTTPException(404, f"there is no run {name!r} in {self._folder}")
        with self._lock:
            if name not in self._panels:
                self._panels[name] = _Panel(name, path)
            return self._panels[name]

    def _first(self, name: str) -> tuple[str, str, Parts]:
        return name, f"/changes/{name}", self._panel(name).parts(FIRST_LOOK_S)

    def _overview(self) -> Parts:
        with self._lock:
            return overview_parts(find_runs(self._folder), self._listed)

    async def front(self, request: Request) -> Response:
        """Send the list of runs, or to the run if there is only one."""
        names = await run_in_threadpool(find_runs, self._folder)
        if list(names.values()) == [self._folder]:
            return RedirectResponse(f"/run/{quote(next(iter(names)))}", headers=HEADERS)
        return _page([("", "/changes", await run_in_threadpool(self._overview))], self._folder.resolve().name)

    async def runs(self, request: Request) -> Response:
        """Send the page of one run, or of several side by side."""
        names = list(dict.fromkeys([request.path_params["name"], *request.query_params.getlist("beside")]))
        if len(names) > 1 + MOST_BESIDE:
            raise HTTPException(400, f"expected at most {MOST_BESIDE} runs beside another, found {len(names) - 1}")
        return _page([await run_in_threadpool(self._first, name) for name in names], " and ".join(names))

    async def changes(self, request: Request) -> Response:
        """Stream the parts that change: of a run, or of the list of runs."""
        name = request.path_params.get("name")
        if name is None:
            return _stream(self._overview, request)
        panel = await run_in_threadpool(self._panel, name)
        return _stream(lambda: panel.parts(1.0), request)

    async def report(self, request: Request) -> Response:
        folder = (await run_in_threadpool(find_runs, self._folder)).get(request.path_params["name"])
        if folder is None or not (folder / REPORT).is_file():
            raise HTTPException(404, "this run has no report yet")
        return FileResponse(folder / REPORT, media_type="text/html", headers=HEADERS)


def _page(shown: list[tuple[str, str, Parts]], title: str) -> Response:
    panels = [(name, f"{quote(changes)}?seen={_digest(parts)}", parts) for name, changes, parts in shown]
    return Response(render("live.html", panels=panels, title=title), headers=HEADERS, media_type="text/html")


def _digest(parts: Parts) -> str:
    return hashlib.blake2b("".join(parts.values()).encode(), digest_size=8).hexdigest()


def _stream(look: Callable[[], Parts], request: Request) -> Response:
    """Return the response that sends each part when it changes; all at once if the page has not the present ones."""

    async def events() -> AsyncIterator[str]:
        parts = await run_in_threadpool(look)
        sent = dict(parts) if request.query_params.get("seen") == _digest(parts) else {}
        while True:
            parts = await run_in_threadpool(look)
            changed = {name: part for name, part in parts.items() if sent.get(name) != part}
            if changed:
                sent |= changed
                yield f"data: {json.dumps(changed)}\n\n"
            else:
                yield ": nothing has changed\n\n"  # fails if the browser has gone
            await asyncio.sleep(LOOK_EVERY_S)

    return StreamingResponse(events(), media_type="text/event-stream", headers=HEADERS)


async def _script(request: Request) -> Response:
    return Response(render("live.js"), headers=HEADERS, media_type="text/javascript")


def application(folder: Path, host: str) -> Starlette:
    """Return the web application on a run's folder, or on a folder of runs, which listens at `host`."""
    site = _Site(folder)
    routes = [
        Route("/", site.front),
        Route("/live.js", _script),
        Route("/changes", site.changes),
        Route("/changes/{name:path}", site.changes),
        Route("/report/{name:path}", site.report),
        Route("/run/{name:path}", site.runs),
    ]
    return read_only(routes, host)


def serve(folder: Path, address: str, say: Callable[[str], None]) -> None:
    """Serve the live page as `serve_at` does, until Ctrl-C; ConfigError also if the folder holds no run."""
    listening_at("--web", address)
    if not find_runs(folder):
        raise ConfigError(f"expected the folder of a run, or of runs, found none in {folder}")
    serve_at(address, partial(application, folder), say)
