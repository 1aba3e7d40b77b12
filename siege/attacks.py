"""A standing attacker: a federation under every attack that is known, and a bound on what each may cost.

* `stranger`: processes without a key flood the port (`siege/stranger.py`).
* `member`: clients with keys lie or say nothing (`siege/hostile_member.py`), and one starts with another one's key.
* `server`: a server orders what clients must refuse (`siege/lying_server.py`). One client demands noise and allows 20
  changes, the other one demands nothing. Afterwards both meet an honest server.

All attacks of a role come at once, or one after the other with `--apart`. A table has for each

* rounds a second before, during and after, and the seconds of rounds that were lost (not for `server`),
* MiB of memory that the attacked process took more at most, and after the end, and MiB of files that were written,
* seconds from the end of the attack until each honest client has taken part in a round again.

The exit code is 1 if anything is beyond the bound of its role. The attackers' processes have a low priority: a real one
brings its own processor. Other programs on this machine should do the same all the time.

    python -m siege.attacks --minutes 1 [--role stranger] [--apart]
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.measure import machine
from hyperbloom.common.secrecy.keys import make_key, public_pem, write_private_key
from hyperbloom.server.access.certificates import init
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.broker.superlink import free_port, superlink
from hyperbloom.server.runs.lines import Tail
from siege import hostile_member, stranger
from siege.faults import Process
from siege.lying_server import ESCAPE, HARMLESS, TRUSTING, lie

HONEST = ("a", "b", "c")
CONNECTIONS = {"calls": 2, "bodies": 3, "gzip": 3, "silent": 1100}
MOST_CHANGES = 20
NICE = 19
LOOK_EVERY_S, SETTLE_S, PATIENCE_S = 0.2, 5.0, 120.0
MIB = 2**20


@dataclass(frozen=True)
class Cost:
    """What an attack has cost, or may cost at most.

    Attributes:
        lost_s: seconds of rounds.
        peak: MiB that the attacked process took more.
        kept: MiB that it still has more when it is over.
        disk: MiB of files.
        recovery_s: seconds until all is as before.
    """

    lost_s: float
    peak: float
    kept: float
    disk: float
    recovery_s: float


def bounds(role: str, seconds: float) -> Cost:
    """Return what a role may cost in an attack of so many seconds."""
    return {
        "stranger": Cost(lost_s=3 + seconds / 10, peak=200, kept=50, disk=16, recovery_s=10),
        # Each member that never uploads may hold up a round for 5 s, again after 30 s, until its third quarantine.
        "member": Cost(lost_s=15 + seconds / 3, peak=200, kept=50, disk=32, recovery_s=40),
        "server": Cost(lost_s=0, peak=100, kept=50, disk=16, recovery_s=60),
    }[role]


class Site:
    """A folder with certificates, keys, processes and what they write."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.files = init(folder / "certs", [], days=30)
        self.started: list[Process] = []

    @property
    def address(self) -> str:
        """Return where clients find the server."""
        return f"127.0.0.1:{self.port}"

    def start(self, module: str, name: str, *args: str) -> Process:
        """Start a process whose output goes to NAME.log."""
        self.started.append(Process(module, list(args), self.folder / f"{name}.log"))
        return self.started[-1]

    def server(self, clients: int, run: str = "run") -> Process:
        """Start a server of short rounds."""
        count = str(clients)
        flags = ["--strategy", "pfedhn", "--clients", count, "--cohort", count, "--rounds", "100000"]
        flags += ["--eval-every", "100000", "--port", str(self.port), "--host", "127.0.0.1"]
        flags += ["--certs", str(self.files.folder), "--run-dir", str(self.folder / run)]
        return self.start("hyperbloom.server", run, *flags, "--set", "local.steps=50", "--set", "hidden_dim=8")

    def key(self, name: str) -> list[str]:
        """Make a key for a client if it has none, and return where it is."""
        path = self.folder / f"{name}.pem"
        if not path.exists():
            write_private_key(path, key := make_key())
            ClientRegistry(self.files.clients).add(name, public_pem(key))
        return ["--key", str(path)]

    def client(self, name: str, *flags: str, state: str = "") -> Process:
        """Start an honest client."""
        words = ["--server", self.address, "--root-certificates", str(self.files.ca), "--client-id", name, "--stay"]
        words += [*self.key(name), "--state-dir", str(self.folder / "state" / (state or name))]
        return self.start("hyperbloom.client", state or name, *words, "--max-train", "60", "--threads", "1", *flags)

    def rounds(self) -> int:
        """Return in how many rounds somebody has trained."""
        return sum(line["clients"] > 0 for line in Tail(self.folder / "run/metrics.jsonl").read())

    def written(self, place: str) -> float:
        """Return the MiB of all files in a folder."""
        return sum(each.stat().st_size for each in (self.folder / place).rglob("*") if each.is_file()) / MIB

    def wait(self, what: str, condition: Callable[[], bool]) -> float:
        """Wait until something is so, and return how many seconds that took."""
        begun = time.monotonic()
        while not condition():
            ended = [each.log for each in self.started if not each.lives and each.log.stem in ("run", *HONEST)]
            if ended or time.monotonic() - begun > PATIENCE_S:
                raise SystemExit(f"{what}: not after {time.monotonic() - begun:.0f} s; ended: {ended or 'nobody'}")
            time.sleep(LOOK_EVERY_S)
        return time.monotonic() - begun

    def close(self) -> None:
        """End all processes."""
        for process in reversed(self.started):
            process.kill()


def _lower(pid: int) -> None:
    """Give a process a low priority. Linux may share out its time by sessions first (autogroup)."""
    os.setpriority(os.PRIO_PROCESS, pid, NICE)
    if (group := Path(f"/proc/{pid}/autogroup")).exists():
        group.write_text(str(NICE))


def resident(process: Process) -> float:
    """Return the MiB of memory that a process has."""
    (line,) = [each for each in Path(f"/proc/{process.popen.pid}/status").read_text().splitlines() if "VmRSS" in each]
    return int(line.split()[1]) / 1024


def observe(site: Site, server: Process, seconds: float) -> tuple[float, float]:
    """Return rounds a second, and the most MiB that the server has, over so many seconds."""
    done, begun, most = site.rounds(), time.monotonic(), 0.0
    while (passed := time.monotonic() - begun) < seconds:
        most = max(most, resident(server))
        time.sleep(LOOK_EVERY_S)
    return (site.rounds() - done) / passed, most


def counted(log: Path) -> int:
    """Return how many connections a stranger has opened, 0 of anybody else."""
    lines = [line for line in log.read_text().splitlines()[:-1] if line.startswith("{")]
    return int(json.loads(lines[-1])["connections"]) if lines else 0


def strange(site: Site, how: str) -> list[Process]:
    """Start a stranger."""
    words = [site.address, "--ca", str(site.files.ca), "--how", how, "--connections", str(CONNECTIONS[how])]
    return [site.start("siege.stranger", how, *words, "--seconds", "100000")]


def join(site: Site, how: str) -> list[Process]:
    """Start a hostile member."""
    if how == "double":
        return [site.client(HONEST[0], state=how)]
    words = [site.address, how, "--how", how, "--ca", str(site.files.ca), *site.key(how)]
    return [site.start("siege.hostile_member", how, *words)]


ROLES: Mapping[str, tuple[Callable[[Site, str], list[Process]], Sequence[str]]] = {
    "stranger": (strange, stranger.ATTACKS),
    "member": (join, (*hostile_member.ATTACKS, "double")),
}


def trained(site: Site, since: int) -> bool:
    """Return whether all honest clients have trained in rounds after that many."""
    lines = Tail(site.folder / "run/clients.jsonl").read()
    return {line["client"] for line in lines if line["round"] > since and "seconds" in line} >= set(HONEST)


def besiege(site: Site, server: Process, role: str, attacks: Sequence[str], seconds: float) -> tuple[str, str, Cost]:
    """Play before, during and after an attack; return what was done, rounds a second as text, and the cost."""
    act, _ = ROLES[role]
    before, usual = observe(site, server, seconds / 2)
    disk = site.written("run")
    hostile = [process for how in attacks for process in act(site, how)]
    for process in hostile:
        _lower(process.popen.pid)
    during, peak = observe(site, server, seconds)
    disk = site.written("run") - disk
    for process in hostile:
        process.kill()
    opened = {how: counted(site.folder / f"{how}.log") for how in attacks}
    last = Tail(site.folder / "run/metrics.jsonl").read()[-1]["round"]
    recovery = site.wait("a round with all honest clients", lambda: trained(site, last))
    after, _ = observe(site, server, max(SETTLE_S, seconds / 2))
    lost = max(0.0, 1 - during / ((before + after) / 2)) * seconds
    rates = ", ".join(f"{each:.1f}" for each in (before, during, after))
    done = ", ".join(f"{how} ({count:,} connections)" if count else how for how, count in opened.items())
    return done, rates, Cost(lost, peak - usual, resident(server) - usual, disk, recovery)


def play(roles: Sequence[str], seconds: float, apart: bool) -> Iterator[tuple[str, str, str, Cost]]:
    """Let strangers and members attack a federation; yield role, attack, rounds a second and cost."""
    with _site() as site:
        server = site.server(len(HONEST))
        for name in HONEST:
            site.client(name)
        site.wait("the first rounds", lambda: site.rounds() > 20)
        for role in roles:
            attacks = ROLES[role][1]
            for group in [[each] for each in attacks] if apart else [attacks]:
                yield role, *besiege(site, server, role, group, seconds / (2 * len(roles)))


def deceive(seconds: float) -> tuple[Cost, list[str]]:
    """Let a server lie to two clients, and then an honest one go on; return the cost and what does not hold."""
    with _site() as site:
        careful = site.client("a", "--min-noise", "4", "--max-changes", str(MOST_CHANGES))
        clients = [careful, site.client("b")]
        with superlink(site.address, site.folder / "lies", site.files) as grid:
            site.wait("two clients", lambda: len(grid.get_nodes()) == len(clients))
            lie(grid, seconds / 4)
            usual, disk = [resident(each) for each in clients], site.written("state")
            done = lie(grid, seconds)
            peak = max(resident(each) - before for each, before in zip(clients, usual, strict=True))
            disk = site.written("state") - disk
        problems = []
        for name, may in (("a", HARMLESS), ("b", HARMLESS | TRUSTING)):
            problems += [f"{name}: {what}" for what, count in done[name].items() if count and what not in may]
        if (sent := done["a"]["a change with noise"]) > MOST_CHANGES:
            problems.append(f"a: {sent} changes")
        if any(ESCAPE[0] in each.log.read_text() for each in clients):
            problems.append("control characters on the terminal")
        site.server(len(clients))
        recovery = site.wait("a round", lambda: site.rounds() > 2)
        kept = max(resident(each) - before for each, before in zip(clients, usual, strict=True))
        return Cost(0.0, peak, kept, disk, recovery), problems


@contextmanager
def _site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="attacks-") as name:
        site = Site(Path(name))
        try:
            yield site
        finally:
            site.close()


def excess(cost: Cost, most: Cost) -> list[str]:
    """Return a line for everything that is beyond its bound."""
    values = [(each.name, getattr(cost, each.name), getattr(most, each.name)) for each in fields(Cost)]
    return [f"{name} {found:.1f}, of {allowed:.1f}" for name, found, allowed in values if found > allowed]


def main(seconds: float, roles: Sequence[str], apart: bool) -> int:
    """Print a line for each role or attack, and what is beyond its bound; return how many of them were."""
    print(f"{machine()}\n| role | attacks | rounds a second before, during, after |", end="")
    print(" seconds of rounds lost | MiB at most, kept, on disk | seconds to recover |\n|" + "---|" * 6, flush=True)
    ports, failed = [role for role in roles if role in ROLES], 0

    def tell(role: str, what: str, rates: str, cost: Cost, problems: list[str]) -> int:
        sizes = f"{cost.peak:.0f}, {cost.kept:.0f}, {cost.disk:.1f}"
        print(f"| {role} | {what} | {rates} | {cost.lost_s:.1f} | {sizes} | {cost.recovery_s:.1f} |", flush=True)
        for problem in problems:
            print(f"{role}: {problem}", flush=True)
        return bool(problems)

    share = seconds / len(roles)
    for role, what, rates, cost in play(ports, share * len(ports), apart) if ports else ():
        failed += tell(role, what, rates, cost, excess(cost, bounds(role, share / 2)))
    if "server" in roles:
        cost, problems = deceive(share)
        failed += tell("server", "lies", "", cost, problems + excess(cost, bounds("server", share)))
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0, help="for all roles (default: %(default)s)")
    parser.add_argument("--role", choices=(*ROLES, "server"), action="append", help="may be repeated (default: all)")
    parser.add_argument("--apart", action="store_true", help="one attack after the other; each takes a role's time")
    args = parser.parse_args()
    sys.exit(bool(main(60 * args.minutes, args.role or (*ROLES, "server"), args.apart)))
