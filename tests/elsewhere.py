"""Run a module without what Windows lacks: `python -m tests.elsewhere MODULE ARGUMENTS...`, or import all modules.

POSIX modules cannot be imported, POSIX functions and signals do not exist, no folder can be opened, no open file
replaced or removed, and no file has a name that Windows refuses. `filelock` alone keeps `fcntl`, because it has other
code there. This shows that our own code asks for nothing of this. It is no run on Windows.
"""

import importlib
import os
import re
import runpy
import shutil
import signal
import sys
from pathlib import Path

import filelock  # noqa: F401  # binds fcntl before it is gone

MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}
SIGNALS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"}
FUNCTIONS = [
    "chown", "fchmod", "fchown", "fork", "forkpty", "getegid", "geteuid", "getgid", "getgroups", "getloadavg",
    "getpgid", "getpgrp", "getsid", "getuid", "killpg", "lchown", "mkfifo", "nice", "openpty", "sched_getaffinity",
    "sched_yield", "setgid", "setpgid", "setsid", "setuid", "statvfs", "wait", "O_DIRECTORY", "O_NOFOLLOW",
    "O_NONBLOCK",
]  # fmt: skip


def hide_posix() -> None:
    """Take away what Windows lacks, for the rest of this process."""
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # it opens folders where that is possible
    for name in MODULES:
        sys.modules.pop(name, None)
    for name in FUNCTIONS:
        vars(os).pop(name, None)
    for name in [each for each in vars(signal) if re.fullmatch(r"SIG[A-Z0-9]+", each)]:
        if name not in {*SIGNALS, "SIG_DFL", "SIG_IGN"}:
            delattr(signal, name)
    sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple[object, ...]) -> None:
    if event == "import" and args[0] in MODULES:
        raise ModuleNotFoundError(f"No module named {args[0]!r}", name=str(args[0]))
    if event == "open" and isinstance(args[0], str):
        if os.path.isdir(args[0]):
            raise PermissionError(13, "Windows opens no folders", args[0])
        if re.search(r'[<>:"|?*]', args[0]) or args[0].endswith((".", " ")):
            raise OSError(22, "Windows refuses the name", args[0])
    if event in ("os.rename", "os.remove"):
        targets = {os.path.realpath(str(each)) for each in args[:2] if isinstance(each, str | Path)}
        if targets & {os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()}:
            raise PermissionError(13, "Windows replaces and removes no open file", str(targets))


def main() -> None:
    """Run the module that the command line names, or import all of ours."""
    hide_posix()
    if sys.argv[1:]:
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    from tests.test_architecture import SOURCES, dotted

    for path in SOURCES:
        importlib.import_module(dotted(path))
    print(f"{len(SOURCES)} modules")


if __name__ == "__main__":
    main()
