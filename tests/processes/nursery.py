"""Forks servers and clients from a process that has imported their code.

A program that starts anew spends seconds on imports, more than a hundred times in a run of the tests. A forked one is
as real a process: it has its own memory, files, signals and end. The clients of `--local-clients` start anew, and so do
the programs of `tests/siege`.
"""

import ctypes
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

CLIENT = (
    "hyperbloom.client.cli",
    "hyperbloom.client.app",
    "hyperbloom.client.link.runtime",
    "hyperbloom.client.newcomer.newcomer",
)
SERVER = (
    "hyperbloom.server.cli",
    "hyperbloom.server.commands.runs",
    "hyperbloom.server.grids.live",
    "hyperbloom.server.newcomers.on_demand",
    "hyperbloom.server.watch.view",
    "hyperbloom.server.pages.report",
)
PR_SET_PDEATHSIG = 1


class Forked:
    """A forked process, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, nursery: "Nursery") -> None:
        """Stand for process `pid`."""
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.code(self.pid, 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code."""
        if self.returncode is None:
            self.returncode = self._nursery.code(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that forks `kind`, server or client; it and all that it has forked end with this one."""

    def __init__(self, kind: str) -> None:
        """Start it."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-u", __file__, kind]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)
        self._news = threading.Condition()
        self._started: list[int] = []
        self._codes: dict[int, int] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, module: str, args: list[str], log: Path) -> Forked:
        """Fork a process that runs a module and writes to `log`."""
        environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
        wanted = {"module": module, "args": args, "log": str(log), "cwd": os.getcwd(), "environment": environment}
        assert self._process.stdin is not None
        with self._news:
            self._process.stdin.write(json.dumps(wanted) + "\n")
            self._process.stdin.flush()
            assert self._news.wait_for(lambda: self._started, 100), "the nursery has forked nothing"
            return Forked(self._started.pop(), self)

    def code(self, pid: int, timeout: float | None) -> int | None:
        """Return the exit code of a process, or None if it still runs after `timeout` seconds."""
        with self._news:
            self._news.wait_for(lambda: pid in self._codes, timeout)
            return self._codes.get(pid)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            what, *numbers = line.split()
            with self._news:
                if what == "started":
                    self._started.append(int(numbers[0]))
                else:
                    self._codes[int(numbers[0])] = int(numbers[1])
                self._news.notify_all()


@cache
def nursery(kind: str) -> Nursery:
    """Return this process's nursery of servers or of clients."""
    return Nursery(kind)


def _main() -> None:
    if sys.argv[1] == "server":
        importlib.import_module("hyperbloom.server.broker.log").trace()  # gRPC reads this when it is imported
    for module in SERVER if sys.argv[1] == "server" else CLIENT:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread; threads do not survive a fork"
    out = os.dup(1)

    def reap(*_: object) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            os.write(out, f"ended {pid} {os.waitstatus_to_exitcode(status)}\n".encode())

    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # "started" comes before "ended"
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            os.close(out)
            _become(**json.loads(line))
        os.write(out, f"started {pid}\n".encode())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _become(module: str, args: list[str], log: str, cwd: str, environment: dict[str, str]) -> NoReturn:
    """Turn this process into one that was started as `python -m module args`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    null, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for old, new in ((null, 0), (file, 1), (file, 2)):
        os.dup2(old, new)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv[1:], sys.path[0] = args, cwd
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    raise AssertionError("a program ends its process")


if __name__ == "__main__":
    _main()
