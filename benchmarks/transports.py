"""A live client over HTTP against one over gRPC, at the same SuperLink of Flower's own.

Four `flower-client` processes on a stock `flower-superlink`, whose HTTP API and gRPC API are both up, and our loop on
it (as with `flower-server --superlink`). pFedHN writes a LeNet of 121,182 floats for each, all four in every round, one
local step with one image. In turns. Needs flwr 1.40 or later, whose SuperLink speaks HTTP with clients.

    python -m benchmarks.transports [--quick]
"""

import tempfile
from importlib.metadata import version
from pathlib import Path

from benchmarks.federation import LENET_FLOATS, Rounds, run_config, write_images
from benchmarks.measure import Comparison, main
from benchmarks.supernodes import HTTP, stock_superlink
from hyperbloom.common.config import LocalConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.server.broker.superlink import free_port
from hyperbloom.server.grids.attached import attached
from hyperbloom.server.grids.local_clients import client_settings, local_clients

CLIENTS = 4


def run(quick: bool = False) -> list[Comparison]:
    """Raise a ConfigError for a Flower whose SuperLink has no HTTP for clients."""
    if not HTTP:
        raise ConfigError(
            f"expected flwr 1.40 or later, whose SuperLink speaks HTTP with clients; found {version('flwr')}"
        )
    turns, rounds = (1, 2) if quick else (3, 10)
    times: dict[str, list[float]] = {"http": [], "grpc": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_images(folder / "images.npz", train=80, held_out=40)
        config = run_config(data, CLIENTS, CLIENTS, LocalConfig(steps=1, batch_size=1))
        settings = [client_settings(config, index, folder / "clients") for index in range(CLIENTS)]
        for turn in range(turns):
            for way in times:
                fleet = f"127.0.0.1:{free_port()}"
                with stock_superlink(fleet, folder / f"{way}-{turn}") as api, attached(api) as grid:
                    words = ["--http", "--server", api] if way == "http" else ["--server", fleet]
                    with local_clients(settings, [*words, "--insecure"]):
                        joined = Rounds(config, grid, f"{way}-{turn}")
                        times[way] += [joined.play() for _ in range(1 + rounds)][1:]
                        joined.close()
    conditions = (
        f"against gRPC at the same SuperLink, Flower's own of {version('flwr')}; {CLIENTS} clients, {LENET_FLOATS:,} "
        f"floats each way, 1 local step with 1 image; {len(times['http'])} rounds each, in {turns} turns"
    )
    return [Comparison.of("round over HTTP", times["http"], times["grpc"], "s/round", conditions)]


if __name__ == "__main__":
    main(run, __doc__)
