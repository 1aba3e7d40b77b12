"""A federation under fire: real processes that are killed, frozen and cut off at random, and what must hold after it.

A server and three clients, each behind a TCP proxy of its own, train pfedhn-pc on the digits, with
personal heads that are nowhere but on the clients. Until most rounds are done, every few seconds one of these happens:

* a client or the server is killed (SIGKILL); clients start again, the server with --resume;
* a client or the server is frozen (SIGSTOP) for some seconds;
* one client's or all clients' connections hang, or are cut and refused, for some seconds;
* a stranger attacks the port (`siege/stranger.py`) for some seconds.

All the while a fourth member announces replies and never uploads them (`siege/hostile_member.py`).

Then everything is healed, and when the run is over it must be true that: the server ended with code 0; each client is
on the row that it always had, with the secret that it always had; no personal head was ever lost, or set back but by a
server that went back; each round stands in metrics.jsonl once; nobody printed a traceback; and they have learned.

    python -m siege.faults --minutes 10 [--seed 1]

Runs are repeated with new seeds until the minutes are over. Exit code 1 if anything does not hold; what was done when
is in actions.log, beside the logs of all processes.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from safetensors.torch import load_file

from benchmarks import LEASH
from hyperbloom.server.broker.superlink import free_port
from siege.stranger import ATTACKS

__all__ = ["Proxy", "Siege", "besiege"]

CLIENTS, ROUNDS = 3, 60
QUIET_AFTER = 0.7  # share of the rounds after which nothing more is broken
PATIENCE_S = 240.0
BREATH_AFTER, BREATH_S = 5, 180.0  # faults without a round between them, and how long we then wait for one
CHANCE = 2 / 3  # accuracy, as a share, that is above it


class Proxy:
    """Forwards connections to a port of this machine, until it is told not to."""

    def __init__(self, target: int) -> None:
        """Listen on a free port of loopback."""
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._flows = threading.Event()
        self._flows.set()
        self._refuses = False
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def hang(self) -> None:
        """Let connections stand, and no byte through."""
        self._flows.clear()

    def cut(self) -> None:
        """End all connections, and each new one at once."""
        self._refuses = True
        for each in list(self._open):
            _end(each)

    def heal(self) -> None:
        """Forward again."""
        self._refuses = False
        self._flows.set()

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()
        self._flows.set()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                incoming, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._refuses:
                    raise OSError
                outgoing = socket.create_connection(("127.0.0.1", self.target), timeout=5)
                outgoing.settimeout(None)
            except OSError:
                incoming.close()
                continue
            self._open |= {incoming, outgoing}
            for pair in ((incoming, outgoing), (outgoing, incoming)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(65536):
                self._flows.wait()
                target.sendall(content)
        self._open -= {source, target}
        _end(source)
        _end(target)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Process:
    """A command in a session of its own, whose output goes to a file."""

    def __init__(self, module: str, args: list[str], log: Path) -> None:
        """Start it."""
        self.log = log
        with log.open("ab") as file:
            self.popen = subprocess.Popen(
                [*LEASH, sys.executable, "-u", "-m", module, *args],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    @property
    def lives(self) -> bool:
        return self.popen.poll() is None

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.lives:
                self.popen.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.popen.wait()


class Siege:
    """One run and what is done to it; `problems` has what does not hold."""

    def __init__(self, folder: Path, seed: int, rounds: int = ROUNDS) -> None:
        """Start server and clients."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rounds, self.run = folder, rounds, folder / "run"
        self.problems: list[str] = []
        self.actions: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._pending: list[tuple[float, Callable[[], None]]] = []
        self._heads: dict[int, tuple[int, ...]] = {}
        self._secrets: dict[int, str] = {}
        self._resuming = False
        self.port = free_port()
        self.proxies = [Proxy(self.port) for _ in range(CLIENTS)]
        flags = ["--strategy", "pfedhn-pc", "--clients", str(CLIENTS), "--cohort", str(CLIENTS), "--rounds"]
        flags += [str(rounds), "--eval-every", "10", "--seed", str(seed), "--insecure", "--port", str(self.port)]
        for key, value in (("checkpoint_every", 3), ("round_timeout_s", 5.0), ("local.steps", 40)):
            flags += ["--set", f"{key}={value}"]
        self.server = self._start_server(*flags, "--run-dir", str(self.run))
        self.clients = [self._start_client(index) for index in range(CLIENTS)]
        self.member: Process | None = None

    def _start_server(self, *args: str) -> Process:
        return Process("hyperbloom.server", list(args), self.folder / "server.log")

    def _start_client(self, index: int) -> Process:
        state = str(self.folder / "state" / str(index))
        args = ["--server", f"127.0.0.1:{self.proxies[index].port}", "--insecure", "--threads", "1"]
        args += ["--client-id", f"c{index}", "--partition", f"{index}/{CLIENTS}", "--state-dir", state]
        return Process("hyperbloom.client", args, self.folder / f"client-{index}.log")

    def _start_member(self) -> Process:
        address = f"127.0.0.1:{self.port}"
        return Process("siege.hostile_member", [address, "mallory"], self.folder / "member.log")

    @property
    def done(self) -> int:
        """Rounds that stand in the run folder."""
        path = self.run / "metrics.jsonl"
        return path.read_text(errors="replace").count("\n") if path.exists() else 0

    def _is_after(self, done: int) -> bool:
        return self.done > done

    # ------------------------------------------------------------------ what happens

    def rage(self, seconds: float) -> None:
        """Break something now and then, for so long or until most rounds are done; then heal everything."""
        self._wait(lambda: self.done >= 2, "two rounds")
        self.member = self._start_member()
        end, done, faults = time.monotonic() + seconds, self.done, 0
        while time.monotonic() < end and self.done < QUIET_AFTER * self.rounds and not self.problems:
            getattr(self, f"_{self._random.choice(_FAULTS)}")()
            self._live(self._random.uniform(1.0, 6.0))
            faults = 0 if self.done > done else faults + 1
            if faults == BREATH_AFTER:
                # On a busy machine a server takes longer to start than we take to kill it again.
                self._wait(partial(self._is_after, self.done), None, min(BREATH_S, end - time.monotonic()))
                faults = 0
            done = self.done
        for _, mend in self._pending:
            mend()
        self._pending = []
        for proxy in self.proxies:
            proxy.heal()
        for process in (self.server, *self.clients):
            process.signal(signal.SIGCONT)

    def _note(self, what: str) -> None:
        self.actions[what.split(":")[0]] += 1
        with (self.folder / "actions.log").open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} after {self.done} rounds: {what}\n")

    def _later(self, mend: Callable[[], None], most: float = 8.0) -> None:
        self._pending.append((time.monotonic() + self._random.uniform(0.5, most), mend))

    def _kill_client(self) -> None:
        index = self._random.randrange(CLIENTS)
        if self.clients[index].lives:
            self._note(f"kill a client: {index}")
            self.clients[index].kill()
            self._later(lambda: self._restart_client(index), 4.0)

    def _restart_client(self, index: int) -> None:
        if not self.clients[index].lives:
            self.clients[index] = self._start_client(index)

    def _freeze_client(self) -> None:
        client = self._random.choice(self.clients)
        self._note(f"freeze a client: {self.clients.index(client)}")
        client.signal(signal.SIGSTOP)
        self._later(lambda: client.signal(signal.SIGCONT))

    def _freeze_server(self) -> None:
        self._note("freeze the server")
        server = self.server
        server.signal(signal.SIGSTOP)
        self._later(lambda: server.signal(signal.SIGCONT), 4.0)

    def _kill_server(self) -> None:
        if self.server.lives:
            self._note("kill the server")
            self.server.kill()

    def _partition(self) -> None:
        some = self._random.choice([[proxy] for proxy in self.proxies] + [self.proxies])
        how = self._random.choice(("hang", "cut"))
        self._note(f"{how} connections: {[self.proxies.index(proxy) for proxy in some]}")
        for proxy in some:
            getattr(proxy, how)()
            self._later(proxy.heal)

    def _stranger(self) -> None:
        how = self._random.choice(ATTACKS)
        self._note(f"a stranger attacks: {how}")
        args = [f"127.0.0.1:{self.port}", "--how", how, "--seconds", "30"]
        self._later(Process("siege.stranger", args, self.folder / "stranger.log").kill)

    # ------------------------------------------------------------------ what goes on

    def _live(self, seconds: float) -> None:
        """Let time pass: mend what is due, start again what ended, look at the clients' disks."""
        end = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            due = [mend for when, mend in self._pending if when <= now]
            self._pending = [each for each in self._pending if each[0] > now]
            for mend in due:
                mend()
            self._look()
            if not self.server.lives and self.server.popen.returncode not in (0, 2):
                self._resume()
            if now >= end:
                return
            time.sleep(0.1)

    def _resume(self) -> None:
        """Start the server again, as whatever supervises it would."""
        self.server.popen.wait()
        if not (self.run / "checkpoints").exists():
            self.problems.append("the server ended before its first checkpoint")
        time.sleep(0.5)
        self.server = self._start_server("--resume", str(self.run), "--insecure")
        if self.member:  # Flower gives it no new session on another server's SuperLink
            self.member.kill()
            self.member = self._start_member()

    def _look(self) -> None:
        """Note a secret that changes, and a head that goes away, or back without the server's going back."""
        for index in range(CLIENTS):
            state = self.folder / "state" / str(index)
            with suppress(FileNotFoundError):
                secret = (state / "identity.json").read_text()
                if self._secrets.setdefault(index, secret) != secret:
                    self.problems.append(f"c{index} has another secret")
            heads = list((state / "personal").glob("*.safetensors"))
            if len(heads) != 1:
                if index in self._heads:
                    self.problems.append(f"c{index} has {len(heads)} heads")
                continue
            number, rewinds = load_file(heads[0])["moment"].tolist()
            if (rewinds, number) < self._heads.get(index, (0, 0)):
                self.problems.append(f"c{index}: head of round {number} after {self._heads[index]}")
            self._heads[index] = (rewinds, number)

    def _wait(self, condition: Callable[[], bool], what: str | None, seconds: float = PATIENCE_S) -> None:
        """Let time pass until something is so; if it has a name, that it is not is a problem."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                if what:
                    self.problems.append(f"not within {seconds:.0f} s: {what}")
                return
            self._live(0.2)

    # ------------------------------------------------------------------ what must hold

    def finish(self) -> list[str]:
        """Wait until the run is over, and return what does not hold."""
        if self.member:
            self.member.kill()
        self.member = None
        for index in range(CLIENTS):
            self._restart_client(index)
        self._wait(lambda: self.server.popen.poll() in (0, 2), "the end of the run")
        if self.server.popen.poll() != 0:
            self.problems.append(f"the server ended with {self.server.popen.poll()}")
        self._check_clients()
        self._check_files()
        for log in sorted(self.folder.glob("*.log")):
            if "Traceback (most recent call last)" in log.read_text(errors="replace"):
                self.problems.append(f"a traceback in {log.name}")
        return self.problems

    def _check_clients(self) -> None:
        end = time.monotonic() + 20
        while any(client.lives for client in self.clients) and time.monotonic() < end:
            time.sleep(0.1)
        for index, client in enumerate(self.clients):
            if client.lives:  # it was on its way back while the others heard the goodbye
                self._note(f"missed the goodbye: {index}")
                client.signal(signal.SIGTERM)  # whoever started us in the background has us ignore SIGINT
            try:
                code = client.popen.wait(30)
            except subprocess.TimeoutExpired:
                code = None
            if code != 0:
                self.problems.append(f"c{index} ended with {code}")

    def _check_files(self) -> None:
        lines = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        if [line["round"] for line in lines] != list(range(1, self.rounds + 1)):
            self.problems.append(f"rounds in metrics.jsonl: {[line['round'] for line in lines]}")
        members = [json.loads(line) for line in (self.run / "clients.jsonl").read_text().splitlines()]
        unscored = [line["round"] for line in lines if line["round"] % 10 == 0 and "test_mean" not in line]
        for number in unscored:  # all may have been cut off, but then it says so of each
            told = {line["client"] for line in members if line["round"] == number and "refused" in line}
            if len(told) < CLIENTS:
                self.problems.append(f"round {number} was not evaluated, which is told of {sorted(told)} only")
        if max((line.get("test_mean", 0.0) for line in lines), default=0.0) < 100 * CHANCE:
            self.problems.append("they have not learned")
        clients = json.loads((self.run / "roster.json").read_text())["clients"]
        if [(each["client_id"], each["row"]) for each in clients[:CLIENTS]] != [(f"c{i}", i) for i in range(CLIENTS)]:
            self.problems.append(f"roster: {[(each['client_id'], each['row']) for each in clients]}")
        self._look()
        if self._heads.keys() != set(range(CLIENTS)):
            self.problems.append(f"heads of {sorted(self._heads)} only")

    def close(self) -> None:
        """End whatever is left of what was started here."""
        if self.member:
            self.member.kill()
        for process in (self.server, *self.clients):
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGTERM)
        for process in (self.server, *self.clients):
            try:
                process.popen.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        for proxy in self.proxies:
            proxy.close()


_FAULTS = (
    *["kill_client", "freeze_client", "partition", "stranger"] * 3,
    *["kill_server", "freeze_server"],
)


def besiege(folder: Path, seed: int, seconds: float, rounds: int = ROUNDS) -> tuple[list[str], Counter[str]]:
    """Run one siege; returns what does not hold, and how often what was done."""
    siege = Siege(folder, seed, rounds)
    try:
        siege.rage(seconds)
        return siege.finish(), siege.actions
    finally:
        siege.close()


def run(minutes: float, seed: int, folder: Path) -> int:
    """Repeat sieges until the time is over, and print a line for each; returns how many had problems."""
    end, failed, total = time.monotonic() + 60 * minutes, 0, Counter[str]()
    while (left := end - time.monotonic()) > 0:
        place = folder / f"seed-{seed}"
        problems, actions = besiege(place, seed, left)
        total += actions
        print(f"seed {seed}: {sum(actions.values())} faults, {'; '.join(problems) or 'all holds'}", flush=True)
        if problems:
            failed += 1
            print(f"  see {place}; again: python -m siege.faults --seed {seed}")
        seed += 1
    print(", ".join(f"{what} {count}" for what, count in sorted(total.items())))
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where all of it stays (default: a new temporary folder)")
    args = parser.parse_args()
    sys.exit(bool(run(args.minutes, args.seed, args.folder or Path(tempfile.mkdtemp(prefix="faults-")))))
