"""Newcomers without torch that send what a real one has sent: the other side of `benchmarks.on_demand`.

    python -m benchmarks.light_newcomers ADDRESS CA FOLDER

reads numbers from the standard input, lets so many newcomers join at once, and prints the seconds that each has waited.
"""

import json
import sys
import threading
import time
from pathlib import Path

import grpc
from flwr.app import ConfigRecord, Message, RecordDict

from hyperbloom.client.link.connection import Connection
from hyperbloom.client.link.internals import RetryInvoker, exponential
from hyperbloom.client.link.server import Link
from hyperbloom.common.secrecy.keys import read_private_key

ANSWERS, DESCRIPTOR = "answers.json", "descriptor"
OFFER, DELIVERY = "query.offer", "query.deliver"

Answers = dict[str, ConfigRecord]


def serve(address: str, ca: Path, folder: Path) -> None:
    """Let newcomers join until the standard input ends. Each takes the next key of `folder`/certs; 0.pem is used."""
    records = json.loads((folder / ANSWERS).read_text())
    records[OFFER]["values"] = (folder / DESCRIPTOR).read_bytes()
    answers = {kind: ConfigRecord(record) for kind, record in records.items()}
    used = 1
    for line in sys.stdin:
        keys = [read_private_key(folder / "certs" / f"{used + index}.pem", "") for index in range(int(line))]
        used += len(keys)
        seconds: list[float] = []
        links = [Link(address, False, ca, key) for key in keys]
        threads = [threading.Thread(target=join, args=(link, answers, seconds)) for link in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(json.dumps(seconds), flush=True)


def join(link: Link, answers: Answers, seconds: list[float]) -> None:
    """Join with a stored descriptor, and append the seconds until the model was here and the server knew it."""
    start = time.perf_counter()
    connection = Connection(link, RetryInvoker(exponential, grpc.RpcError, max_tries=None, max_time=None))
    connection.open()
    kind = ""
    while kind != DELIVERY:
        if (order := connection.receive()) is not None:
            kind = order.metadata.message_type
            connection.send(Message(RecordDict({"hyperbloom": answers[kind]}), reply_to=order))
    seconds.append(time.perf_counter() - start)
    connection.close()


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
