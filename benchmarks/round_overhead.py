"""Round time over gRPC: `flower-client` processes under our loop against stock SuperNodes under Flower's.

Four clients, pFedHN writing a LeNet of 121,182 floats for each, all four in every round; local training is one SGD step
with one image, so what is left is the round itself. Both sides serve the same app on the same data, and are driven by
the same algorithm; only one side runs at a time, in turns:

* ours: `flower-client` (model and data stay loaded), the SuperLink in the server's process, `Post`;
* other: `flower-supernode` (a process per message), a `flower-superlink`, `Grid.send_and_receive` (3 s between polls).

A round is timed from writing the orders to the hypernetwork's step. The first round of each turn is not counted. For
our side the CPU of a client's round is told: of the server, the hypernetwork's own work apart, and of the client.

    python -m benchmarks.round_overhead [--quick]
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import Message
from flwr.superlink.grid import HttpGrid

from benchmarks.federation import LENET_FLOATS, Rounds, run_config, write_images
from benchmarks.measure import Comparison, children, cpu_seconds, main
from benchmarks.supernodes import HTTP, stock_superlink, supernodes
from hyperbloom.common.config import LocalConfig, RunConfig
from hyperbloom.server.broker.superlink import free_port, superlink
from hyperbloom.server.grids.attached import Attached, attached
from hyperbloom.server.grids.live import LiveGrid
from hyperbloom.server.grids.local_clients import client_settings, local_clients
from hyperbloom.strategies.hypernetworks.learner import HypernetworkLearner
from hyperbloom.strategies.pfedhn import PFedHN

CLIENTS = 4

Clients = Callable[[RunConfig, str, Path], AbstractContextManager[object]]


def run(quick: bool = False) -> list[Comparison]:
    turns, ours_per_turn, stock_per_turn = (1, 5, 1) if quick else (3, 10, 2)
    ours: list[float] = []
    stock: list[float] = []
    cpu = Cpu()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_images(folder / "images.npz", train=80, held_out=40)
        config = run_config(data, CLIENTS, CLIENTS, LocalConfig(steps=1, batch_size=1))
        for turn in range(turns):
            address = f"127.0.0.1:{free_port()}"
            with superlink(address, folder / "server") as grid:
                ours += _turn(grid, _live, config, address, folder, f"ours-{turn}", ours_per_turn, cpu)
            address = f"127.0.0.1:{free_port()}"
            with stock_superlink(address, folder / f"stock-{turn}") as api, attached(api) as grid:
                at = api if HTTP else address
                stock += _turn(grid, supernodes, config, at, folder, f"stock-{turn}", stock_per_turn)
    conditions = (
        f"{CLIENTS} clients on this machine, {LENET_FLOATS:,} floats each way, 1 local step with 1 image; "
        f"{len(ours)} rounds of ours, {len(stock)} stock, in {turns} turns; CPU of a client's round in ours: "
        f"{cpu.per_round('server', len(ours)):.1f} ms server ({cpu.per_round('learner', len(ours)):.1f} ms of them the "
        f"hypernetwork), {cpu.per_round('clients', len(ours)):.1f} ms client"
    )
    return [Comparison.of("round over gRPC", ours, stock, "s/round", conditions)]


class Cpu:
    """CPU seconds of our side's rounds: the server's, those of them for the hypernetwork, and all clients'."""

    def __init__(self) -> None:
        self.spent = {"server": 0.0, "learner": 0.0, "clients": 0.0}

    def per_round(self, part: str, rounds: int) -> float:
        """Return milliseconds for one client's round."""
        return 1000 * self.spent[part] / rounds / CLIENTS

    def watch(self, learner: HypernetworkLearner) -> None:
        """Count what the learner's two functions take."""
        for name in ("generate", "update"):
            setattr(learner, name, self._counted(getattr(learner, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            before = time.process_time()
            try:
                return function(*given)
            finally:
                self.spent["learner"] += time.process_time() - before

        return call

    def play(self, joined: Rounds, rounds: int) -> list[float]:
        """Play rounds and count."""
        pids = children(os.getpid())
        server, clients = time.process_time(), sum(map(cpu_seconds, pids))
        times = [joined.play() for _ in range(rounds)]
        self.spent["server"] += time.process_time() - server
        self.spent["clients"] += sum(map(cpu_seconds, pids)) - clients
        return times


def _turn(
    grid: LiveGrid,
    clients: Clients,
    config: RunConfig,
    address: str,
    folder: Path,
    run_id: str,
    rounds: int,
    cpu: Cpu | None = None,
) -> list[float]:
    """Start one side's clients, play, end them."""
    with clients(config, address, folder / "clients"):
        joined = Rounds(config, grid, run_id)
        post = joined.run.federation.post
        try:
            if clients is supernodes:
                post.grid = _FlowersWay(stock_grid(grid), config.round_timeout_s)  # type: ignore[assignment]
            joined.play()
            if cpu is None:
                return [joined.play() for _ in range(rounds)]
            assert isinstance(joined.run.algorithm, PFedHN)
            cpu.watch(joined.run.algorithm.learner)
            return cpu.play(joined, rounds)
        finally:
            post.grid = grid
            joined.close()


class _FlowersWay:
    """Flower's own exchange, which blocks until all have answered, behind the two calls that a `Post` makes."""

    def __init__(self, grid: HttpGrid, timeout_s: float) -> None:
        self._grid, self._timeout_s = grid, timeout_s
        self._replies: list[Message] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        orders = list(messages)
        self._replies += self._grid.send_and_receive(orders, timeout=self._timeout_s)
        return [order.metadata.message_id for order in orders]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies, self._replies = self._replies, []
        return replies


def _live(config: RunConfig, address: str, folder: Path) -> AbstractContextManager[object]:
    settings = [client_settings(config, index, folder) for index in range(config.clients)]
    return local_clients(settings, ["--server", address, "--insecure"])


def stock_grid(grid: LiveGrid) -> HttpGrid:
    """Return Flower's own grid over the connection of an attached one, for the same run."""
    superlink = grid._superlink
    assert isinstance(superlink, Attached)
    twin = HttpGrid(token="held by the connection")
    twin._client, twin._run = superlink._client, SimpleNamespace(run_id=superlink.run_id)  # type: ignore[assignment]
    return twin


if __name__ == "__main__":
    main(run, __doc__)
