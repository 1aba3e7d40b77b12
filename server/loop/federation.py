"""The clients from the server's side: greeted, admitted or refused, here or away, busy or idle.

Where nodes have keys, the SuperLink names each node after the owner of its key. A client must use that name.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import RecordDict

from hyperbloom import __version__
from hyperbloom.common.errors import CohortError, RefusedError, WireError
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import Failed, Greeting, Introduction, Notice, Order
from hyperbloom.common.wire.pack import shown, unpack_answer
from hyperbloom.server.loop.admission import Admission
from hyperbloom.server.loop.listener import Joined, Refused
from hyperbloom.server.loop.post import Arrival, Failure, Grid, Letter, Pause, Post
from hyperbloom.server.loop.roster import PATIENCE, Roster
from hyperbloom.strategies.exchange import Client

VISIT_EVERY_S = 0.5
GREETING_TTL_S = 120.0
NONE_TRAINS = "too few of the clients that are here can be trained"
GOODBYE_S = 30.0  # a client that is training hears the goodbye afterwards
PATIENT_S = 3.0  # until a person is told why the program does not end
NOTICE_TTL_S = 600.0


class Federation:
    """Follows nodes as they come, leave and answer, and maps them to the clients of the roster.

    Args:
        roster: the known clients (empty for a fresh run).
        on_event: receives one line for each event of a client.
        watch: called while waiting for clients; raises if waiting has become pointless.

    Attributes:
        admission: decides who may join; set before clients are gathered.
        greeting: the question to new nodes; set before clients are gathered.
        late: number of replies that were dropped because they came after their deadline.
    """

    admission: Admission
    greeting: Greeting

    def __init__(
        self, grid: Grid, roster: Roster, on_event: Callable[[str], None], watch: Callable[[], None] = lambda: None
    ) -> None:
        self.grid, self.roster, self.post = grid, roster, Post(grid)
        self.round, self.late = 0, 0
        self._on_event, self._watch = on_event, watch
        self._met: set[int] = set()
        self._owners: dict[int, str] = {}  # owner of each present node's key; "" without keys
        self._refusal = ""  # why the last one was refused
        self._visited = -VISIT_EVERY_S

    @property
    def trusted(self) -> list[Client]:
        """Return the clients that are here and not in quarantine, by row."""
        held = self.roster.conduct.in_quarantine
        return [client for client in self.roster.live if not held(client.client_id, self.round)]

    @property
    def idle(self) -> list[Client]:
        """Return the trusted clients without an open order, by row."""
        busy = self.post.busy
        return [client for client in self.trusted if self.roster.node_of(client) not in busy]

    @property
    def idle_count(self) -> int:
        """Return how many clients are here without an open order."""
        return self.roster.live_count - len(self._busy())

    def _busy(self) -> set[int]:
        return {node for node in self.post.busy if self.roster.on_node(node)}

    def count(self) -> dict[str, int]:
        """Return how many clients are in each state."""
        live, idle, held = self.roster.live_count, self.idle_count, self.roster.conduct.in_quarantine
        return {
            "live": live,
            "idle": idle,
            "busy": live - idle,
            "away": len(self.roster) - live,
            "quarantined": sum(held(client.client_id, self.round) for client in list(self.roster)),
        }

    def gather(self, wanted: int, timeout_s: float, ready: Callable[[], bool] = lambda: True, soon: float = 0) -> None:
        """Wait until `wanted` clients are here, idle and `ready`; after `soon` seconds, if given, one is enough.

        Raises:
            CohortError: too few clients came within `timeout_s` seconds.
        """
        if self.idle_count >= wanted and ready():
            return
        patience, more = min(soon or timeout_s, timeout_s), wanted - self.idle_count
        what = f"waiting for {more} client{'' if more == 1 else 's'}" if more > 0 else f"{NONE_TRAINS}; waiting"
        self._on_event(f"{what} until {time.strftime('%H:%M:%S %Z', time.localtime(time.time() + patience))}")
        start, pause = time.monotonic(), Pause(self.post.wait)
        while self.idle_count < wanted or not ready():
            self._watch()
            for arrival in self.poll():  # no round waits for answers here, so these are late lies
                if isinstance(arrival.content, Failure):
                    self.blame(arrival.letter.about.client.client_id, arrival.content.text)
            closed = getattr(self.grid, "closed", False) and self._met and not self.post.open(Greeting)
            passed, limit = time.monotonic() - start, patience if self.idle_count else timeout_s
            late, within = closed or passed > limit, "" if closed else f" within {int(passed)} s"
            if late and self.idle_count < wanted:
                names = ", ".join(client.client_id for client in self.roster.live) or "none"
                busy = f"; {len(self._busy())} still work on an earlier round" if self._busy() else ""
                busy += f"; {len(new)} connected without an answer" if (new := self.post.open(Greeting)) else ""
                came = f"{self.idle_count} of {wanted} clients joined{within} ({names}){busy}{self._refusal}"
                if not soon or not self.idle_count:
                    what = "" if closed else ". Start the others, or set clients to fewer or join_timeout_s to more"
                    raise CohortError(came + what, reason=Reason.LEFT)
                self._on_event(f"{came}; going on without the others")
                return
            if late and not ready():
                raise CohortError(f"{NONE_TRAINS}, and no other came{within}", reason=Reason.LEFT)
            pause.take()

    def greet_again(self, greeting: Greeting) -> None:
        """Forget all clients, before any of their rows is used, and ask those who are here with another greeting."""
        self.greeting, self._visited = greeting, -VISIT_EVERY_S
        self.post.keep(lambda letter: letter.kind is not Greeting)  # an answer to the old one would be refused
        self.roster.clear()
        self._met.clear()

    def send(self, orders: Sequence[tuple[Client, Order, Any]], ttl: float | None = None) -> list[Letter]:
        """Send orders, each with its client and what to remember of it; return those that the grid accepted."""
        addressed = []
        for client, order, about in orders:
            node = self.roster.node_of(client)
            assert node is not None, "only those who are here get orders"
            addressed.append((node, order, about))
        letters = self.post.send(addressed, self.round, ttl)
        if len(letters) < len(orders):  # find the node that left, or it would be drawn again at once
            self._visited = -VISIT_EVERY_S
            self._visit()
        return letters

    def poll(self) -> list[Arrival]:
        """Return the answers that came in time. Also greet and admit new nodes, and drop late answers.

        A lie is returned even if it is late, because it counts towards its client's quarantine.
        """
        arrived = []
        for arrival in self.post.poll():
            if arrival.letter.kind is Greeting:
                self._welcome(arrival.letter.node, arrival.content)
            elif arrival.late and not arrival.is_lie:
                client = self.roster.on_node(arrival.letter.node)
                if client is not None and not isinstance(arrival.content, Failure):
                    self.late += 1
                    self._on_event(f"{client.client_id} answered after the deadline; its reply is dropped")
            elif arrival.letter.kind is not Notice:
                arrived.append(arrival)
        self._visit()
        return arrived

    def blame(self, name: str, text: str) -> int | None:
        """Count a refused reply against a client; return the last round of the quarantine that it causes, or None."""
        until = self.roster.conduct.failed(name, self.round, lie=True)
        return self._told(name, until, f"another reply was refused for its content ({text})")

    def missed(self, name: str) -> int | None:
        """Count a missed deadline of a client that is here; return the last round of its quarantine, or None.

        Where no other client is left nobody waits for this one, and it does not count.
        """
        if len(self.trusted) < 2:
            return None
        until = self.roster.conduct.failed(name, self.round, lie=False)
        return self._told(name, until, f"{PATIENCE} answers in a row were late; if it is slow, raise round_timeout_s")

    def _told(self, name: str, until: int | None, why: str) -> int | None:
        if until is not None:
            self._on_event(f"{name} is in quarantine until after round {until}: {why}")
        return until

    def _visit(self) -> None:
        """Greet new nodes and record those that left, at most every `VISIT_EVERY_S` seconds."""
        now = time.monotonic()
        if now - self._visited < VISIT_EVERY_S:
            return
        self._visited = now
        self._owners = {node.node_id: node.name for node in self.grid.get_nodes()}
        for client in self.roster.live:
            node = self.roster.node_of(client)
            if node is not None and node not in self._owners:
                self.roster.leave(node)
                self._on_event(f"{client.client_id} left")
        self.post.keep(self._may_answer)
        silent = [letter for letter in self.post.open(Greeting) if now - letter.sent > GREETING_TTL_S]
        self.post.give_up(silent)
        self._met -= {letter.node for letter in silent}  # they are greeted again
        newcomers = sorted(self._owners.keys() - self._met)
        self._met = set(self._owners)
        self.post.send([(node, self.greeting, None) for node in newcomers], ttl=GREETING_TTL_S)

    def _may_answer(self, letter: Letter) -> bool:
        """Return whether an answer may come: not from a node that is gone, nor to the order of a client that moved."""
        asked = letter.kind in (Greeting, Notice) or self.roster.on_node(letter.node) is not None
        return letter.node in self._owners and asked

    def _welcome(self, node: int, content: RecordDict | Failure) -> None:
        """Admit or refuse the client that has answered a greeting."""
        if isinstance(content, Failure) and content.network:
            self._met.discard(node)  # the network failed: greet the node again if it is still there
            return
        try:
            if isinstance(content, Failure):
                raise WireError(f"it cannot say who it is: {content.text}")
            about = unpack_answer(Introduction, content)
            if isinstance(about, Failed):
                begin = "" if about.reason == Reason.UNFIT else "it cannot say who it is: "
                raise WireError(begin + about.text)
            self._admit(node, about)
        except (RefusedError, WireError) as error:
            why, who = shown(str(error)), self._owners.get(node) or f"node {node}"  # it may quote the introduction
            self._refusal = f"; the last one refused was {who}: {why}"
            self._on_event(Refused(f"refused {who}: {why}"))
            self._notify([node], Notice("refused", why))

    def _admit(self, node: int, about: Introduction) -> None:
        owner = self._owners.get(node, "")
        if owner and owner != about.client_id:
            raise RefusedError(f"its key is that of {owner}, but it says that it is {about.client_id}")
        self.admission.check(about, self.roster)
        known = self.roster.find(about.client_id)
        client, moved_from = self.roster.admit(node, about, by_key=bool(owner))
        if moved_from is not None:
            self.post.keep(self._may_answer)
            self._notify([moved_from], Notice("refused", f"{client.client_id} has joined again from another process"))
        self.admission.join(client, known is None)
        what = f"{about.train_examples} training examples, size {about.size}"
        if known and known.about.train_examples != about.train_examples:
            what += f"; {known.about.train_examples} before"
        if about.version != __version__:
            what += f"; version {about.version}, here it is {__version__}"
        live = self.roster.live_count
        here = "1 client is here" if live == 1 else f"{live} clients are here"
        came = "is back" if known else "joined"
        self._on_event(Joined(f"{client.client_id} {came} ({what}); {here}"))

    def say_goodbye(self, reason: str, complete: str | None = None) -> None:
        """Tell all clients that the run is over, and wait up to `GOODBYE_S` seconds until they have heard it."""
        nodes = [node for client in self.roster.live if (node := self.roster.node_of(client)) is not None]
        left = self._notify(nodes, Notice("finished", reason, complete))
        begun, told, pause = time.monotonic(), False, Pause(self.post.wait)
        while self.post.waits_for(left) and (passed := time.monotonic() - begun) < GOODBYE_S:
            self.post.poll()
            if not {node.node_id for node in self.grid.get_nodes()} & set(nodes):
                return
            if passed > PATIENT_S and not told:
                told = True
                limit = f"{GOODBYE_S:.0f} s"
                self._on_event(f"waiting up to {limit} until clients hear that the run is over (Ctrl-C leaves)")
            pause.take()

    def _notify(self, nodes: Sequence[int], notice: Notice) -> list[Letter]:
        return self.post.send([(node, notice, None) for node in nodes], ttl=NOTICE_TTL_S)
