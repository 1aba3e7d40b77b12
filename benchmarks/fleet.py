"""A thousand real connections to one server: seconds a round, memory, and a stampede of joins.

The clients are light: threads without torch, some hundred in a process. Each has a connection and a key of its own,
keeps the secret with which it introduced itself, and answers an order with a stored change of the size of its weights.
So what is left is the server: TLS, signatures, Flower's state, the wire, and the hypernetwork's LeNet for each.

All clients join at once. Then rounds are played with growing cohorts. The exponent of the growth is that of the
seconds between the two largest cohorts; 1 is linear.

    python -m benchmarks.fleet [--clients 1000] [--cohorts 10,100,1000] [--rounds 3]
"""

import argparse
import json
import math
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
    from hyperbloom.common.wire.orders import Introduction

PER_PROCESS = 250
READY, GO = "ready", "go"
INTRODUCTION = "introduction.json"
IMAGES = 80
PATIENCE_S = 900.0


def main(clients: int, cohorts: Sequence[int], rounds: int) -> list[dict[str, float]]:
    """Print and return a line of figures for each cohort; the first line is of the stampede."""
    from benchmarks.federation import LENET_FLOATS, Rounds, run_config, write_images
    from benchmarks.measure import machine
    from benchmarks.scale import resident
    from hyperbloom.common.config import LocalConfig
    from hyperbloom.common.wire.pack import pack
    from hyperbloom.server.access.certificates import init
    from hyperbloom.server.broker.superlink import free_port, superlink

    print(machine(), flush=True)
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
            figures = [{"clients": clients, "joined": seconds, "cpu_ms": 1000 * cpu / clients, "mib": resident()}]
            print(
                f"{clients:,} clients joined at once in {seconds:.1f} s: {clients / seconds:.0f} a second, "
                f"{1000 * cpu / clients:.1f} ms of the server's CPU each; it takes {resident():.0f} MiB",
                flush=True,
            )
            for cohort in cohorts:
                played.run.config = played.run.config.model_copy(update={"cohort": cohort})
                played.play()
                cpu = time.process_time()
                times = [played.play() for _ in range(rounds)]
                cpu = 1000 * (time.process_time() - cpu) / rounds / cohort
                middle = statistics.median(times)
                figures.append({"cohort": cohort, "seconds": middle, "cpu_ms": cpu, "mib": resident()})
                print(
                    f"cohort {cohort:,}: {middle:.3f} s a round ({min(times):.3f} to {max(times):.3f}), "
                    f"{1000 * middle / cohort:.1f} ms a client, {cpu:.1f} ms of the server's CPU; "
                    f"{LENET_FLOATS:,} floats each way; the server takes {resident():.0f} MiB",
                    flush=True,
                )
            played.close()
    if len(cohorts) > 1:
        small, large = figures[-2:]
        exponent = math.log(large["seconds"] / small["seconds"]) / math.log(large["cohort"] / small["cohort"])
        print(f"exponent of the growth from {small['cohort']:,} to {large['cohort']:,}: {exponent:.2f}")
    return figures


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
    command = [*LEASH, sys.executable, "-m", "benchmarks.fleet", "--serve", address, "--ca", str(ca)]
    processes = []
    for first in range(0, count, PER_PROCESS):
        words = [*command, "--folder", str(folder), "--range", f"{first},{min(first + PER_PROCESS, count)}"]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--cohorts", default="10,100,1000")
    parser.add_argument("--rounds", type=int, default=3)
    for flag in ("--serve", "--range"):
        parser.add_argument(flag, help=argparse.SUPPRESS)
    for flag in ("--ca", "--folder"):
        parser.add_argument(flag, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.ca, args.folder, *map(int, args.range.split(",")))
    else:
        main(args.clients, [int(each) for each in args.cohorts.split(",")], args.rounds)
