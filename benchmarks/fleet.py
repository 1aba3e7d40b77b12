"""A thousand real connections to one server: seconds a round, memory, and a stampede of joins.

The clients are light: threads without torch, some hundred in a process. Each has a connection and a key of its own,
keeps the secret with which it introduced itself, and answers an order with a stored change of the size of its weights.
So what is left is the server: TLS, signatures, Flower's state, the wire, and the hypernetwork's LeNet for each.

All clients join at once. Then rounds are played with growing cohorts, and a client's share of a round is held against
that in the cohort before it: a ratio of 1 is linear growth.

    python -m benchmarks.fleet [--quick]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import LEASH

if TYPE_CHECKING:
    from benchmarks.measure import Comparison
    from hyperbloom.common.wire.orders import Introduction

PER_PROCESS = 250
READY, GO = "ready", "go"
INTRODUCTION = "introduction.json"
IMAGES = 80
PATIENCE_S = 900.0


def run(quick: bool = False) -> "list[Comparison]":
    return measure(20, [5, 20], 1) if quick else measure(1000, [10, 100, 1000], 3)


def measure(clients: int, cohorts: Sequence[int], rounds: int) -> "list[Comparison]":
    """Let all clients join, and play rounds of each cohort."""
    from benchmarks.federation import LENET_FLOATS, Rounds, run_config, write_images
    from benchmarks.measure import Comparison, timed
    from hyperbloom.common.config import LocalConfig
    from hyperbloom.common.wire.pack import pack
    from hyperbloom.server.access.certificates import init
    from hyperbloom.server.broker.superlink import free_port, superlink

    with tempfile.TemporaryDirectory() as name:
        folder, address = Path(name), f"127.0.0.1:{free_port()}"
        files = init(folder / "certs", [], days=30)
        registry = write_keys(folder, clients)
        about = pack(introduction()).config_records["hyperbloom"]
        (folder / INTRODUCTION).write_text(json.dumps(dict(about)))
        data = write_images(folder / "images.npz", IMAGES, IMAGES)
        config = run_config(data, clients, cohorts[0], LocalConfig(steps=1, batch_size=1))
        config = config.model_copy(update={"join_timeout_s": PATIENCE_S, "round_timeout_s": PATIENCE_S})
        with (
            superlink(address, folder, files, keys=registry) as grid,
            light_clients(address, files.ca, folder, clients) as go,
        ):
            before, cpu = time.perf_counter(), time.process_time()
            go()
            played = Rounds(config, grid, "benchmark")
            seconds, cpu = time.perf_counter() - before, time.process_time() - cpu
            joins = f"{clients:,} light clients, TLS and a key each, joined at once in {seconds:.1f} s"
            joins += f", {cost(cpu, clients)}"
            rows: list[Comparison] = []
            smaller, so_far = [], ""
            for cohort in cohorts:
                played.run.config = played.run.config.model_copy(update={"cohort": cohort})
                played.play()
                cpu = time.process_time()
                shares = [1000 * timed(played.play) / cohort for _ in range(rounds)]
                cpu = time.process_time() - cpu
                each = f"{statistics.median(shares) * cohort / 1000:.3g} s a round, {cost(cpu, rounds * cohort)}"
                if smaller:
                    how = f"{each}; {so_far}; {rounds} rounds each; LeNet of {LENET_FLOATS:,} floats each way; {joins}"
                    name = f"a live client's share of a round, cohort of {cohort:,}"
                    rows.append(Comparison.of(name, shares, smaller, "ms", how))
                smaller, so_far = shares, f"'other' is a cohort of {cohort:,}: {each}"
            played.close()
    return rows


def cost(seconds: float, clients: int) -> str:
    """Return what clients cost the server, which is this process."""
    from benchmarks.scale import resident

    return f"{1000 * seconds / clients:.1f} ms of the server's CPU a client, its memory {resident():,.0f} MiB"


def introduction() -> "Introduction":
    """Return what all clients say of themselves, but for their name and their secret."""
    from hyperbloom.common.wire.orders import Introduction

    return Introduction(
        client_id="",
        token="",
        version="0.1.0",
        size="M",
        input_shape=(3, 32, 32),
        num_classes=10,
        train_examples=IMAGES,
        val_examples=IMAGES,
        test_examples=IMAGES,
        class_shares=(),
        divisor=255.0,
    )


def write_keys(folder: Path, clients: int) -> Path:
    """Write the keys of all clients, as files and as a registry; return the path of the registry."""
    from hyperbloom.common.secrecy.keys import make_key, public_pem, write_private_key
    from hyperbloom.server.access.registry import ClientRegistry

    registry = ClientRegistry(folder / "clients.json")
    for index in range(clients):
        key = make_key()
        write_private_key(folder / f"{index}.pem", key)
        registry.add(f"light-{index}", public_pem(key))
    return registry.path


@contextmanager
def light_clients(address: str, ca: Path, folder: Path, count: int) -> Iterator[object]:
    """Start processes of light clients; yield a function that lets all of them join."""
    command = [*LEASH, sys.executable, "-m", "benchmarks.fleet", "--serve", address, str(ca), str(folder)]
    processes = []
    for first in range(0, count, PER_PROCESS):
        words = [*command, str(first), str(min(first + PER_PROCESS, count))]
        processes.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def go() -> None:
        for process in processes:
            assert process.stdin
            process.stdin.write(f"{GO}\n")
            process.stdin.flush()

    try:
        for process in processes:
            assert process.stdout and process.stdout.readline().strip() == READY
        yield go
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def serve(address: str, ca: Path, folder: Path, first: int, last: int) -> None:
    """Serve as the light clients from `first` to `last` - 1 until this process is ended."""
    from hyperbloom.client.link.server import Link
    from hyperbloom.common.secrecy.keys import read_private_key

    keys = [read_private_key(folder / f"{index}.pem", "") for index in range(first, last)]
    threads = [
        threading.Thread(
            target=live, args=(Link(address, False, ca, key), f"light-{first + index}", folder), daemon=True
        )
        for index, key in enumerate(keys)
    ]
    print(READY, flush=True)
    if sys.stdin.readline().strip() == GO:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def live(link: object, name: str, folder: Path) -> None:
    """Join, and answer all orders with what is stored."""
    import grpc
    from flwr.app import ConfigRecord, Message, RecordDict

    from hyperbloom.client.link.connection import Connection
    from hyperbloom.client.link.internals import RetryInvoker, exponential
    from hyperbloom.client.link.server import Link

    assert isinstance(link, Link)
    about = {**json.loads((folder / INTRODUCTION).read_text()), "client_id": name, "token": os.urandom(16).hex()}
    change: dict[str, object] = {}
    connection = Connection(link, RetryInvoker(exponential, grpc.RpcError, max_tries=None, max_time=None))
    connection.open()
    while True:
        if (order := connection.receive()) is None:
            continue
        record = dict(order.content["hyperbloom"])
        if order.metadata.message_type == "query.greet":
            said = about
        elif order.metadata.message_type == "train":
            if not change:
                change = {"seconds": 0.0, "tensors": record["tensors"], "dtype": record["dtype"]}
                change["values"] = bytes(len(record["values"]))
            said = change
        else:
            said = record
        connection.send(Message(RecordDict({"hyperbloom": ConfigRecord(said)}), reply_to=order))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]))
    else:
        from benchmarks.measure import main

        main(run, __doc__)
