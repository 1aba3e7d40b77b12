"""The clients as the server sees them: greeted, admitted or refused, given orders, waited for, lost.

Works over any Flower grid through its public methods: `get_nodes`, `push_messages`, `pull_messages`. Where nodes have
keys, the SuperLink calls a node by the name that its key is registered for, and a client must be of that name.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from hyperbloom.common.errors import CohortError, RefusedError, WireError
from hyperbloom.common.messages import UNREADABLE, EvaluateOrder, Greeting, Introduction, Notice, weigh
from hyperbloom.common.signals import uninterrupted
from hyperbloom.strategies.personalised import PersonalisedStrategy
from hyperbloom.strategies.roster import Roster

__all__ = ["Federation", "Traffic"]

NETWORK_ERRORS = (3, 4, 5)  # Flower's codes for a message, a reply or a node that is unavailable
VISIT_EVERY_S = 0.5
GREETING_TTL_S = 120.0
GOODBYE_S = 30.0  # a client in the middle of its training hears the goodbye after it
NOTICE_TTL_S = 600.0
FASTEST_POLL_S, SLOWEST_POLL_S = 0.004, 0.05


@dataclass
class Traffic:
    """Bytes that training has sent to clients and received from them, as `weigh` counts them."""

    down: int = 0
    up: int = 0


class Federation:
    """Nodes come, go and answer; the roster says which client that was.

    Args:
        grid: Flower's grid.
        roster: who is known already (empty for a fresh run).
        on_event: told of everything that happens to a client, in one line.
        watch: called while waiting for clients; raises if waiting has become pointless.
    """

    def __init__(
        self,
        grid: Grid,
        roster: Roster,
        on_event: Callable[[str], None],
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        """Know no node yet."""
        self.grid = grid
        self.roster = roster
        self._on_event = on_event
        self._watch = watch
        # Orders whose replies were announced and do not arrive; only the grid over the network has such replies.
        self._stalled: Callable[[], Set[str]] = getattr(grid, "stalled", frozenset)
        self._strategy: PersonalisedStrategy | None = None
        self._greeting: Greeting | None = None
        self._begun = False
        self._met: set[int] = set()
        self._owners: dict[int, str] = {}  # of the nodes that are here: whose key it is, "" where there are no keys
        self._greetings: dict[str, tuple[int, float]] = {}  # message id -> node, time sent
        self._open: dict[str, tuple[int, float]] = {}  # orders that wait for an answer: message id -> node, time sent
        self._given_up: dict[str, int] = {}  # orders whose answer would be late: message id -> node
        self.late = 0
        """Replies that came after their deadline; they are dropped."""
        self._visited = -VISIT_EVERY_S
        self._traffic = Traffic()

    # ------------------------------------------------------------------ joining

    def gather(self, strategy: PersonalisedStrategy, wanted: int, timeout_s: float) -> None:
        """Wait until `wanted` clients that fit the strategy are live, with no order left to answer.

        Args:
            strategy: decides who fits.
            wanted: number of clients.
            timeout_s: seconds to wait.

        Raises:
            CohortError: too few came in time.
        """
        self._strategy = strategy
        self.greet_for(strategy)
        if self.roster.idle_count >= wanted:
            return
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + timeout_s))
        self._on_event(f"waiting for {wanted - self.roster.idle_count} clients until {until}")
        deadline = time.monotonic() + timeout_s
        while self.roster.idle_count < wanted:
            self._watch()
            self.poll()
            if self.roster.idle_count < wanted and time.monotonic() > deadline:
                names = ", ".join(client.client_id for client in self.roster.live) or "none"
                busy = f"; {len(self.roster.busy)} still work on an earlier round" if self.roster.busy else ""
                raise CohortError(
                    f"{self.roster.idle_count} of {wanted} clients joined within {timeout_s:.0f} s ({names}){busy}. "
                    "Start the others, or set clients to fewer or join_timeout_s to more"
                )
            time.sleep(SLOWEST_POLL_S)

    def greet_for(self, strategy: PersonalisedStrategy) -> None:
        """Ask newcomers what a strategy wants to know; the first one asks for its baselines, too."""
        self._greeting = self._greeting or strategy.greeting()

    def begin(self, strategy: PersonalisedStrategy, known: int) -> None:
        """Hand the clients to a strategy, in order of rows; later ones are handed over as they come.

        Args:
            strategy: gets `joined` for each client from row `known` on, `returned` for those before.
            known: rows that the strategy has state for already.

        Raises:
            RefusedError: a client that is here does not fit this strategy.
        """
        for client in self.roster:
            strategy.check_newcomer(client.about)
            (strategy.joined if client.row >= known else strategy.returned)(client)
        self._strategy, self._begun = strategy, True

    def _visit(self) -> None:
        """Greet nodes that are new, and note which are gone; at most every `VISIT_EVERY_S`."""
        now = time.monotonic()
        if now - self._visited < VISIT_EVERY_S:
            return
        self._visited = now
        self._owners = {node.node_id: node.name for node in self.grid.get_nodes()}
        present = set(self._owners)
        for client in self.roster.live:
            if client.node_id not in present:
                self.roster.leave(client.node_id or 0)
                self._on_event(f"{client.client_id} left")
        self._forget_silent(now, present)
        newcomers = sorted(present - self._met)
        self._met = (self._met & present) | set(newcomers)
        if newcomers:
            assert self._greeting is not None
            greeting = self._greeting.pack()
            messages = [Message(greeting, node, Greeting.type, ttl=GREETING_TTL_S) for node in newcomers]
            ids = self._push(messages)
            self._greetings |= {i: (node, now) for i, node in zip(ids, newcomers, strict=True)}

    def _forget_silent(self, now: float, present: set[int]) -> None:
        """Give up greetings that got no answer in time; such a node is greeted again."""
        for message_id, (node, sent) in list(self._greetings.items()):
            if node not in present or now - sent > GREETING_TTL_S:
                del self._greetings[message_id]
                self._met.discard(node)

    def _welcome(self, replies: Iterable[Message]) -> None:
        """Admit or refuse those who answered a greeting."""
        for reply in replies:
            node, _ = self._greetings.pop(reply.metadata.reply_to_message_id)
            if reply.has_error() and reply.error.code in NETWORK_ERRORS:
                self._met.discard(node)  # the network's fault: greet it again if it is still there
                continue
            try:
                if reply.has_error():
                    raise WireError(f"it cannot say who it is: {reply.error.reason}")
                if reply.metadata.src_node_id != node:
                    raise WireError("the introduction came from another node than was greeted")
                self._admit(node, Introduction.unpack(reply.content))
            except (RefusedError, WireError) as error:
                self._on_event(f"refused node {node}: {error}")
                self._notify([node], "refused", str(error))

    def _admit(self, node: int, about: Introduction) -> None:
        assert self._strategy is not None
        owner = self._owners[node]  # only who is here has been greeted
        if owner and owner != about.client_id:
            raise RefusedError(f"its key is that of {owner}, but it says that it is {about.client_id}")
        self._strategy.check_newcomer(about)
        known, before = len(self.roster), self.roster.examples_of(about.client_id)
        client, moved_from = self.roster.admit(node, about)
        if moved_from is not None:
            self._notify([moved_from], "refused", f"{client.client_id} has joined again from another process")
        if self._begun:
            (self._strategy.joined if client.row >= known else self._strategy.returned)(client)
        came = "joined" if client.row >= known else "is back"
        what = f"{about.train_examples} training examples, size {about.size}"
        if before not in (None, about.train_examples):
            what += f"; {before} before"
        live = self.roster.live_count
        here = "1 client is here" if live == 1 else f"{live} clients are here"
        self._on_event(f"{client.client_id} {came} ({what}); {here}")

    # ------------------------------------------------------------------ orders and replies

    def exchange(self, orders: Iterable[list[Message]], timeout_s: float) -> Iterator[Message]:
        """Send orders, one list after the other, and yield the replies as they come; none is kept here.

        Ends when all have answered, when those who have not are gone or upload nothing of what they announced, or
        after `timeout_s` seconds; what comes later is counted and dropped, and its client is asked again only then.
        Newcomers are greeted meanwhile.
        """
        for some in orders:
            self.send(some)
        deadline, delay = time.monotonic() + timeout_s, FASTEST_POLL_S
        while self._open.keys() - self._stalled() and time.monotonic() < deadline:
            replies = self.poll()
            delay = FASTEST_POLL_S if replies else delay
            while replies:
                yield replies.pop(0)
            if self._open:
                time.sleep(delay)
                delay = min(1.5 * delay, SLOWEST_POLL_S)
        self.give_up(0)

    def send(self, orders: list[Message]) -> None:
        """Send orders; a client is busy until it has answered or is gone."""
        if orders:
            self._traffic.down += _weight_of_training(orders)
            ids, now = self._push(orders), time.monotonic()
            self._open |= {i: (order.metadata.dst_node_id, now) for i, order in zip(ids, orders, strict=True) if i}
            if not all(ids):  # a node has just gone: see which, or it is drawn again and again at once
                self._visited = -math.inf
                self._visit()
            self._note_busy()

    def poll(self) -> list[Message]:
        """Return the replies to open orders that have come; greet and welcome who is new, drop what is late."""
        arrived = self._pull({*self._open, *self._given_up})
        self._welcome([reply for reply in arrived if reply.metadata.reply_to_message_id in self._greetings])
        self._traffic.up += _weight_of_training(arrived)
        replies = [reply for reply in arrived if self._open.pop(reply.metadata.reply_to_message_id, None)]
        for reply in arrived:
            node = self._given_up.pop(reply.metadata.reply_to_message_id, None)
            client = None if node is None else self.roster.on_node(node)
            if client and not reply.has_error():
                self.late += 1
                self._on_event(f"{client.client_id} answered after the deadline; its reply is dropped")
            elif client and reply.error.code == UNREADABLE:
                assert self._strategy is not None
                self._strategy.refuse(client.client_id, WireError(reply.error.reason))
        self._visit()
        self._open = {i: sent for i, sent in self._open.items() if self.roster.on_node(sent[0])}
        self._given_up = {i: node for i, node in self._given_up.items() if self.roster.on_node(node)}
        self._note_busy()
        return replies

    def expects(self, message_id: str) -> bool:
        """Return whether the answer to an order may still come in time."""
        return message_id in self._open

    def give_up(self, timeout_s: float) -> None:
        """Wait no longer for answers to orders that are older than `timeout_s` seconds, or for stalled uploads."""
        now, stalled = time.monotonic(), self._stalled()
        overdue = {i: node for i, (node, sent) in self._open.items() if now - sent >= timeout_s or i in stalled}
        self._given_up |= overdue
        self._open = {i: sent for i, sent in self._open.items() if i not in overdue}

    def take_traffic(self) -> Traffic:
        """Return what has gone to and fro since this was last asked, greetings and evaluations left out."""
        taken, self._traffic = self._traffic, Traffic()
        return taken

    def _note_busy(self) -> None:
        self.roster.busy = {node for node, _ in self._open.values()} | set(self._given_up.values())

    def say_goodbye(self, reason: str, complete: str | None = None) -> None:
        """Tell all clients that the run is over (and which is complete), and wait briefly until they have heard it."""
        nodes = [client.node_id for client in self.roster.live if client.node_id is not None]
        left = self._notify(nodes, "finished", reason, complete)
        deadline = time.monotonic() + GOODBYE_S
        while left and time.monotonic() < deadline:
            left -= {reply.metadata.reply_to_message_id for reply in self._pull(left)}
            left = left if set(self.grid.get_node_ids()) & set(nodes) else set()
            time.sleep(SLOWEST_POLL_S)

    def _notify(self, nodes: list[int], kind: str, reason: str, complete: str | None = None) -> set[str]:
        if not nodes:
            return set()
        content = Notice(kind, reason, complete).pack()
        return set(self._push([Message(content, n, Notice.type, ttl=NOTICE_TTL_S) for n in nodes]))

    def _push(self, messages: list[Message]) -> list[str]:
        # A client that is told of a message waits for the rest of it, and for nothing else: not for the goodbye.
        with uninterrupted():
            return list(self.grid.push_messages(messages))

    def _pull(self, message_ids: set[str]) -> list[Message]:
        """Return what has arrived of these replies and of the answers to greetings."""
        wanted = message_ids | set(self._greetings)
        return list(self.grid.pull_messages(wanted)) if wanted else []


def _weight_of_training(messages: Iterable[Message]) -> int:
    of_training = (m for m in messages if _is_of_training(m.metadata.message_type))
    return sum(weigh(message.content) for message in of_training if message.has_content())


def _is_of_training(kind: str) -> bool:
    """All but evaluations, greetings and last words: also what FedHeNN asks beside its orders to train."""
    return kind.partition(".")[0] != EvaluateOrder.type and kind not in (Greeting.type, Notice.type)
