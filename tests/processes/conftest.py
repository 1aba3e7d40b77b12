"""Real processes: a server and clients as a user starts them, on loopback ports of their own."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hyperbloom.server.broker.superlink import free_port
from siege import faults
from tests.processes.nursery import Forked, nursery

DEADLINE_S = 100
SERVERS = ("hyperbloom.server", "tests.processes.hasty", "tests.processes.impatient")


class Process(faults.Process):
    """A command whose output goes to a file, and which never outlives the test."""

    popen: Forked  # type: ignore[assignment]

    def __init__(self, module: str, args: list[str], log: Path) -> None:
        self.module, self.log = module, log
        log.touch()
        self.popen = nursery("server" if module in SERVERS else "client").start(module, args, log)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output}") from None

    def wait_for(self, text: str, times: int = 1, timeout_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while self.output.count(text) < times:
            assert self.popen.poll() is None, f"ended before it said {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"did not say {text!r} in {timeout_s} s:\n{self.output}"
            time.sleep(0.05)

    def interrupt(self) -> None:
        self.popen.send_signal(signal.SIGINT)


class Site:
    """Starts servers and clients for one test; `folder` holds everything that they write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: list[Process] = []

    def start(self, module: str, name: str, *args: str) -> Process:
        process = Process(module, list(args), self.folder / f"{name}-{len(self.processes)}.log")
        self.processes.append(process)
        return process

    def server(self, *args: str, insecure: bool = True, hasty: bool = False) -> Process:
        security = ["--insecure"] if insecure else []
        if not any("gains" in arg for arg in args):  # most tests are of other things, and this takes time
            args = (*args, "--set", "gains=false")
        return self.start(SERVERS[hasty], "server", "--port", str(self.port), *security, *args)

    def client(self, name: str, *args: str, state: str = "", insecure: bool = True) -> Process:
        security = ["--insecure"] if insecure else []
        address, state_dir = f"127.0.0.1:{self.port}", str(self.folder / "state" / (state or name))
        args = ("--server", address, "--client-id", name, "--state-dir", state_dir, "--threads", "1", *security, *args)
        return self.start("hyperbloom.client", name, *args)


def memory(pid: int, field: str = "VmRSS") -> float:
    """Return the MiB that a process takes now, or with `VmHWM` the most that it ever took."""
    (line,) = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if field in each]
    return int(line.split()[1]) / 2**10


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with cleared(tmp_path) as site:
        yield site


@contextmanager
def cleared(folder: Path) -> Iterator[Site]:
    """Yield a site in `folder`, and end what it has started."""
    site = Site(folder)
    try:
        yield site
    finally:
        _end(site)


def _end(site: Site) -> None:
    for process in site.processes:
        if process.popen.poll() is None:
            # A server ends its local clients when it is asked to; the rest is forced.
            process.interrupt() if process.module == "hyperbloom.server" else process.popen.terminate()
    for process in site.processes:
        try:
            process.popen.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture
def until() -> Callable[[Callable[[], bool], str], None]:
    def wait(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
            time.sleep(0.05)

    return wait
