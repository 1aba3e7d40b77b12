"""Signals that end a process: what becomes of them, and when; and a process that is certain to end."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from hyperbloom.common.program.signals import terminate_as_interrupt, uninterrupted


def test_sigterm_is_what_ctrl_c_is_and_only_meanwhile() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminate_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_the_body_is_through(number: signal.Signals) -> None:
    steps = []
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt), terminate_as_interrupt():
        with uninterrupted():
            os.kill(os.getpid(), number)
            steps.append("through")
        steps.append("never")
    assert steps == ["through"]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_error_in_the_body_is_not_lost_without_a_signal() -> None:
    with pytest.raises(ValueError, match="broken"), uninterrupted():
        raise ValueError("broken")


def test_other_threads_are_left_alone() -> None:
    seen: list[object] = []

    def body() -> None:
        with uninterrupted(), terminate_as_interrupt():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


# ---------------------------------------------------------------------- the end of a program

BLOCKED = {
    "nothing": "",
    "a thread": "threading.Thread(target=never.wait).start()",
    "a pool": "concurrent.futures.ThreadPoolExecutor().submit(never.wait)",
    "atexit": "atexit.register(never.wait)",
    # As a gRPC channel does that nobody has closed: it is freed with its module and waits for a thread that is gone.
    "a destructor": "kept = type('Channel', (), {'__del__': lambda self, never=never: never.wait()})()",
    "an atexit that fails": "atexit.register(lambda: 1 / 0)",
}


def run(setting: str, main: str) -> subprocess.CompletedProcess[str]:
    """Run a program; the limit is far beyond what it may take, and far below what blocks it."""
    code = (
        "import atexit, concurrent.futures, sys, threading\n"
        "from hyperbloom.common.program.signals import run_program\n"
        "never = threading.Event()\n"
        f"{setting}\n"
        "def main():\n"
        "    sys.stdout.write('half a line')\n"
        f"    {main}\n"
        "run_program(main)\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("what", BLOCKED)
def test_a_program_ends_whatever_stands_in_its_way(what: str) -> None:
    done = run(BLOCKED[what], "return 5")
    assert (done.returncode, done.stdout) == (5, "half a line")
    assert ("ZeroDivisionError" in done.stderr) == ("fails" in what)


@pytest.mark.parametrize(
    ("main", "code", "said"),
    [
        ("return None", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("sys.exit('a reason')", 1, "a reason\n"),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_the_exit_code_is_what_the_program_asked_for(main: str, code: int, said: str) -> None:
    done = run("", main)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_program_without_a_terminal_ends_as_any_other() -> None:
    done = run("sys.stdout = sys.stderr = None", "return 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


def test_a_defect_shows_its_traceback_and_ends_with_1() -> None:
    done = run("", "raise ValueError('a defect')")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ValueError: a defect\n")


def test_what_has_to_run_at_the_exit_runs() -> None:
    done = run("atexit.register(print, ', and the other half')", "return 0")
    assert (done.returncode, done.stdout) == (0, "half a line, and the other half\n")


def test_an_output_that_nobody_reads_is_no_defect() -> None:
    done = run("import os\nreader, writer = os.pipe()\nos.close(reader)\nsys.stdout = open(writer, 'w')", "return 0")
    assert (done.returncode, done.stderr) == (0, "")
