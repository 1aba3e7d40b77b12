"""The live page's server: a real process, and real requests."""

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from hyperbloom.common.errors import ConfigError, ConnectionFailed
from hyperbloom.common.pages.serving import serve_in_child
from hyperbloom.server.live import site
from hyperbloom.server.live.run import find_runs
from hyperbloom.server.live.site import serve

from ..recorded import Recording


@contextmanager
def served(folder: Path) -> Iterator[httpx.Client]:
    """Yield a client of the live page of `folder`."""
    with (
        serve_in_child(["hyperbloom.server", "watch", str(folder)], "0") as line,
        httpx.Client(base_url=line.split()[-1], timeout=30) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a whole run and a damaged one."""
    folder = tmp_path_factory.mktemp("runs")
    Recording(folder / "one").whole()
    Recording(folder / "two").begin("pfedhn")
    (folder / "two" / "metrics.jsonl").write_text("{}\n")
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    """Yield a client of one live page for the tests that only look."""
    with served(folder) as client:
        yield client


def changes(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """Yield the parts of each event."""
    return (dict(json.loads(line[6:])) for line in lines if line.startswith("data: "))


def test_a_browser_gets_the_page_and_then_what_changes(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "run")
    recording.begin("pfedhn")
    with served(tmp_path / "run") as client, client.stream("GET", "/changes/run") as stream:
        told = changes(stream.iter_lines())
        assert set(next(told)) == {"head", "figures", "curve", "clients", "map", "events"}
        recording.folder.event("somebody joined")
        changed = next(each for each in told if "somebody joined" in each.get("events", ""))
        assert list(changed) == ["events"]

        sent = client.get("/", follow_redirects=True)
        assert sent.url.path == "/run/run" and "Nothing has been evaluated yet" in sent.text
        seen = re.search('data-changes="(/changes/run[^"]+)"', sent.text)
        assert seen is not None
        with client.stream("GET", seen[1]) as other:
            assert next(other.iter_lines()).startswith(": nothing has changed")

        recording.go(1)
        recording.go(2)
        assert any("21.0 %" in each.get("figures", "") for each in told)  # it may look between the two rounds


def test_any_folder_can_be_watched(tmp_path: Path) -> None:
    with served(Recording(tmp_path / "run #1?").whole()) as client:
        sent = client.get("/", follow_redirects=True)
        assert sent.status_code == 200
        (names,) = re.findall('<svg[^>]*aria-labelledby="([^"]+curve[^"]+)"', sent.text)
        assert all(f'id="{name}"' in sent.text for name in names.split())


def test_it_is_read_only_and_loads_nothing_from_elsewhere(folder: Path, client: httpx.Client) -> None:
    for path in ("/", "/run/one", "/live.js", "/run/none", "/report/one"):
        policy = client.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "frame-ancestors" in policy
    assert client.get("/run/none").status_code == client.get("/run/%2e%2e/one").status_code == 404
    assert client.get("/report/one").status_code == 404  # none is written yet
    assert client.post("/run/one").status_code == 405
    (folder / "one" / "report.html").write_text("<p>the report</p>")
    assert client.get("/report/one").text == "<p>the report</p>"
    assert 'href="/report/one"' in client.get("/run/one").text
    assert client.get("/run/one", params={"beside": "one"}).text.count('data-changes="/changes/one?seen=') == 1
    many = client.get("/run/one", params={"beside": list("abcde")})
    assert many.status_code == 400 and "at most 4 runs beside another, found 5" in many.text


def test_on_loopback_no_other_name_is_answered(client: httpx.Client) -> None:
    assert client.get("/run/one", headers={"host": "evil.example"}).status_code == 400
    assert client.get("/run/one", headers={"host": "localhost:1"}).status_code == 200


def test_a_damaged_run_is_one_line(client: httpx.Client) -> None:
    answer = client.get("/run/two")
    assert answer.status_code == 500 and "metrics.jsonl is damaged" in answer.text
    listed = client.get("/")
    assert listed.status_code == 200 and "metrics.jsonl is damaged" in listed.text and 'href="/run/one"' in listed.text


def test_wrong_addresses_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--web: expected PORT or HOST:PORT, found 'x'"):
        serve(tmp_path, "x", print)
    with pytest.raises(ConfigError, match="found none in"):
        serve(tmp_path, "0", print)
    Recording(tmp_path / "one").whole()
    with pytest.raises(ConnectionFailed, match=r"--web 192\.0\.2\.1:0: cannot listen there"):
        serve(tmp_path, "192.0.2.1:0", print)
    beside = serve_in_child(["hyperbloom.server", "watch", str(tmp_path)], "192.0.2.1:0")
    with pytest.raises(ConnectionFailed, match="cannot listen there"), beside:
        pass


def test_ctrl_c_ends_the_command(tmp_path: Path) -> None:
    Recording(tmp_path / "one").whole()
    arguments = [sys.executable, "-m", "hyperbloom.server", "watch", "--web", "0", str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("live page: http://127.0.0.1:")
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode in (0, 130)


def test_reading_many_folders_keeps_no_other_page_waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page reads folders in a thread of its own, and the loop that serves them all goes on."""
    threads = set[int]()

    def noted(of: Path) -> dict[str, Path]:
        threads.add(threading.get_ident())
        return find_runs(of)

    monkeypatch.setattr(site, "find_runs", noted)

    async def look() -> int:
        of = site._Site(folder)
        for path, page in (("run", of.runs), ("changes", of.changes), ("report", of.report)):
            scope = {"type": "http", "path": f"/{path}/one", "path_params": {"name": "one"}, "query_string": b""}
            with suppress(HTTPException):
                await page(Request({**scope, "headers": []}))
        return threading.get_ident()

    assert asyncio.run(look()) not in threads and threads
