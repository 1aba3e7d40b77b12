"""Everything that is read from elsewhere, fed with what nobody would write: only one kind of error may come out.

A target gets bytes, made from sound ones by mutation, and may raise what its reader documents (a HyperbloomError) and
nothing else. `tests/common/test_fuzz.py` runs all targets briefly, this runs them at random for as long as you like,
and `siege/fuzz_guided.py` lets atheris look for new paths.

    python -m siege.fuzz --minutes 10 [--target graph]

What breaks a target is written to crash-TARGET-DIGEST in the current folder.
"""

import argparse
import hashlib
import io
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import nn

from hyperbloom.common.compression import Codec
from hyperbloom.common.config import RunConfig, load_run_config
from hyperbloom.common.data import DataSpec, load_client_data
from hyperbloom.common.data.schema import read_schema
from hyperbloom.common.errors import HyperbloomError
from hyperbloom.common.graphs import Graph, trace
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.methods import FedProx, Method
from hyperbloom.common.models import ModelSpec, build
from hyperbloom.common.wire.orders import SGD, Introduction, Noise, Scope, Target, TrainOrder, TrainResult
from hyperbloom.common.wire.pack import pack, unpack
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.loop.listener import Checkpoint, Progress, Selection
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.runs.checkpoint import read_resume, write_checkpoint
from hyperbloom.server.runs.folder import read_run

__all__ = ["TARGETS", "mutate", "sound"]

LAYOUT = Layout((("weight", (4, 8)), ("bias", (4,))))
CODECS = ("int8", "top-k:0.1", "top-k:0.25+int8", "top-k:0.9")
ABOUT = Introduction("a", "secret", "0.1.0", "M", (1, 8, 8), 10, 60, 20, 20, ())


def _folder() -> Path:
    return _made()[1]


@cache
def _made() -> tuple[Any, Path]:
    """Return a folder of this process's own, and what deletes it."""
    holder = tempfile.TemporaryDirectory(prefix="fuzz-")
    return holder, Path(holder.name)


def message(content: bytes) -> None:
    """The first byte chooses the message, the rest are its fields as JSON; weights' values are their characters."""
    kind: type[Any] = (TrainOrder, TrainResult, Introduction)[content[0] % 3] if content else TrainResult
    try:
        fields = json.loads(content[1:])
    except (ValueError, RecursionError):
        return
    if not isinstance(fields, dict):
        return
    if isinstance(fields.get("values"), str):
        fields["values"] = fields["values"].encode("latin-1", "replace")
    try:
        record = ConfigRecord(fields, keep_input=False)
    except (TypeError, ValueError, OverflowError):
        return  # Flower takes no such field
    read = unpack(kind, RecordDict({"hyperbloom": record}))
    if isinstance(read, TrainResult) and read.weights is not None:
        read.weights.check(LAYOUT, torch.float32)


def graph(content: bytes) -> None:
    """The text of a client's graph."""
    text = content.decode("utf-8", "surrogateescape")
    read = Graph.from_json(text, 2**28)
    assert Graph.from_json(read.to_json(), 2**28) == read


def method(content: bytes) -> None:
    """The text of a local method."""
    Method.from_json(content.decode("utf-8", "replace"))


def compressed(content: bytes) -> None:
    """The first byte chooses the codec."""
    codec = Codec.parse(CODECS[content[0] % len(CODECS)]) if content else None
    if codec:
        assert codec.decode(content[1:], LAYOUT).shape == (LAYOUT.numel,)


def config(content: bytes) -> None:
    """A run's YAML file."""
    path = _folder() / "run.yaml"
    path.write_bytes(content)
    load_run_config(path, {})


def roster(content: bytes) -> None:
    """A run folder to start from."""
    path = _folder() / "run" / "roster.json"
    _write_run(path.parent)
    path.write_bytes(content)
    read_run(path.parent)


def weights(content: bytes) -> None:
    """The hypernetwork of a run folder to start from."""
    folder = _folder() / "weights"
    _write_run(folder)
    (folder / "hypernetwork.safetensors").write_bytes(content)
    read_run(folder)


def checkpoint(content: bytes) -> None:
    """The newest checkpoint of a run to resume."""
    folder = _folder() / "resume"
    with suppress(FileNotFoundError):
        for path in (folder / "checkpoints").iterdir():
            path.unlink()
    _write_checkpoint(folder)
    (folder / "checkpoints" / "000001.json").write_bytes(content)
    read_resume(folder, RunConfig(), lambda text: None)


def registry(content: bytes) -> None:
    """Who may join."""
    path = _folder() / "clients.json"
    path.write_bytes(content)
    ClientRegistry(path).keys()


def npz(content: bytes) -> None:
    """A client's data."""
    path = _folder() / "data.npz"
    path.write_bytes(content)
    load_client_data(DataSpec(str(path)))


def table(content: bytes) -> None:
    """A client's table, and what is proposed for its columns."""
    path = _folder() / "table.csv"
    path.write_bytes(content)
    load_client_data(DataSpec(str(path), label="ill", group="patient"))


def schema(content: bytes) -> None:
    """What a server says that columns mean, and a table that is read by it."""
    read = read_schema(content.decode("utf-8", "replace"), "schema")
    assert read_schema(read.text, "schema") == read
    cells = {"age": ["1", "", "x"], "colour": ["red", "blue", ""], "ill": ["no", "yes", "no"]}
    read.inputs(cells, "table")
    read.labels(cells, "table")


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each
    for each in (message, graph, method, compressed, config, roster, weights, checkpoint, registry, npz, table, schema)
}


@cache
def sound(target: str) -> tuple[bytes, ...]:
    """Return bytes that a target takes."""
    return tuple(_SOUND[target]())


def _messages() -> list[bytes]:
    scope, target, sgd = Scope("r", 1, 0, (1,)), Target("mlp", 10, "none"), SGD(5, 8, 0.1, 0.9, 0.0, 50.0)
    codec, noise = Codec.parse("top-k:0.1"), Noise(1.0, 2.0)
    order = TrainOrder(scope, target, sgd, "delta", method=FedProx(mu=0.1), codec=codec, noise=noise)
    result = TrainResult(0.1, Weights(LAYOUT, torch.linspace(-1, 1, LAYOUT.numel)), 1.0)
    texts = []
    for index, each in enumerate((order, result, ABOUT)):
        fields = dict(pack(each)["hyperbloom"])
        if "values" in fields:
            fields["values"] = bytes(fields["values"]).decode("latin-1")  # type: ignore[arg-type]
        texts.append(bytes([index]) + json.dumps(fields).encode())
    return texts


def _graphs() -> list[bytes]:
    small = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))
    modules = [small, build(ModelSpec("mlp", "S", (1, 8, 8), 10))]
    return [trace(module, (1, 8, 8)).to_json().encode() for module in modules]


def _compressed() -> list[bytes]:
    flat = torch.linspace(-1, 1, LAYOUT.numel)
    codecs = [Codec.parse(name) for name in CODECS]
    return [bytes([index]) + codec.encode(flat, LAYOUT) for index, codec in enumerate(codecs) if codec]


def _write_run(folder: Path) -> None:
    from hyperbloom.common.files.storage import write_json, write_tensors

    known = Roster()
    known.admit(1, ABOUT)
    write_tensors(folder / "hypernetwork.safetensors", {"embeddings": torch.ones(1, 2)}, {})
    write_json(folder / "roster.json", known.to_json())


def _write_checkpoint(folder: Path) -> None:
    best = Selection(2, {"val_mean": 50.0}, {"a": 40.0})
    state = Checkpoint("run", 0, Progress(2, best), {}, Roster().to_json(), 1, {"w": torch.ones(3)})
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, RunConfig(), state, {}, folder / "none.safetensors")


def _checkpoints() -> list[bytes]:
    folder = _folder() / "sound"
    _write_checkpoint(folder)
    return [next((folder / "checkpoints").glob("[0-9]*.json")).read_bytes()]


def _runs(name: str) -> Callable[[], list[bytes]]:
    def read() -> list[bytes]:
        _write_run(_folder() / "sound")
        return [(_folder() / "sound" / name).read_bytes()]

    return read


def _registries() -> list[bytes]:
    from hyperbloom.common.secrecy.keys import make_key, public_pem

    path = _folder() / "sound.json"
    path.unlink(missing_ok=True)
    ClientRegistry(path).add("a", public_pem(make_key()))
    return [path.read_bytes()]


def _arrays() -> list[bytes]:
    found = []
    for compress in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        compress(file, x=np.zeros((20, 4), np.float32), y=np.arange(20) % 2)
        found.append(file.getvalue())
    return found


_SCHEMA = b"""{"label": ["ill"], "classes": ["no", "yes"], "columns": [
    {"name": "age", "kind": "number", "mean": 1.0, "std": 2.0, "missing": ["x"]},
    {"name": "colour", "kind": "category", "words": ["red", "blue"]}]}"""

_SOUND: dict[str, Callable[[], list[bytes]]] = {
    "message": _messages,
    "graph": _graphs,
    "method": lambda: [FedProx(mu=0.1).model_dump_json().encode()],
    "compressed": _compressed,
    "config": lambda: [b"strategy: pfedhn\nlocal: {steps: 5}\nsizes: [S, M]\noptions:\n  hidden_dim: 8\n"],
    "roster": _runs("roster.json"),
    "weights": _runs("hypernetwork.safetensors"),
    "checkpoint": _checkpoints,
    "registry": _registries,
    "npz": _arrays,
    "table": lambda: [
        b"age,patient,ill\n" + b"".join(b"%d,%d,%d\n" % (each, each // 2, each % 3) for each in range(30))
    ],
    "schema": lambda: [_SCHEMA],
}

_PIECES = [
    *(b"", b"null", b"true", b"-1", b"0", b"1e999", b"9" * 30, b"NaN", b'""', b"{}", b"[]", b'{"a": [1]}'),
    *(b"\xff", b"\x00", b"\\u0000", b"[" * 2000, b'"a"', b"0.5", b"1" * 5000, b"\xed\xa0\x80", b": ", b"&a [*a]"),
]


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Return sound bytes after a few changes: of a byte, of a piece, or of a value if they are JSON."""
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(content) + 1)
        choice = rng.randrange(6)
        if choice == 0 and content:
            content = content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]
        elif choice == 1:
            content = content[:place] + rng.choice(_PIECES) + content[place:]
        elif choice == 2:
            content = content[:place] + content[place + rng.randint(1, 20) :]
        elif choice == 3:
            content = content[:place]
        else:
            content = _mutate_json(content, rng)
    return content


def _mutate_json(content: bytes, rng: random.Random) -> bytes:
    """Put another value in place of one of those in a JSON text, behind a byte or at the start."""
    for start in (0, 1):
        try:
            tree = {"": json.loads(content[start:])}
        except (ValueError, RecursionError):
            continue
        places: list[tuple[Any, Any]] = []

        def walk(value: Any, places: list[tuple[Any, Any]]) -> None:
            keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
            for key in keys:
                places.append((value, key))
                walk(value[key], places)

        walk(tree, places)
        holder, key = rng.choice(places)
        other = rng.choice(places)
        values = [None, True, -1, 0, 10**30, 1.5, float("inf"), "", "x", [], {}, [[]], other[0][other[1]]]
        if rng.random() < 0.2 and key != "":
            del holder[key]
        else:
            holder[key] = json.loads(json.dumps(rng.choice(values)))
        return content[:start] + json.dumps(tree.get("")).encode()
    return content


def attempt(target: str, content: bytes) -> Exception | None:
    """Return what a target raises beside the errors that it may raise."""
    try:
        TARGETS[target](content)
    except HyperbloomError:
        return None
    except Exception as error:
        return error
    return None


def run(minutes: float, targets: list[str], seed: int) -> int:
    """Take the targets in turn until the time is over; returns how many inputs broke one."""
    rng, end, tried, broken = random.Random(seed), time.monotonic() + 60 * minutes, 0, 0
    while time.monotonic() < end:
        for target in targets:
            for _ in range(50):
                content, tried = mutate(rng.choice(sound(target)), rng), tried + 1
                error = attempt(target, content)
                if error is not None:
                    broken += 1
                    path = Path(f"crash-{target}-{hashlib.sha256(content).hexdigest()[:12]}")
                    path.write_bytes(content)
                    print(f"{target}: {type(error).__name__}: {str(error)[:120]} ({path})", flush=True)
    print(f"{tried} inputs, {broken} broke their target")
    return broken


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=list(TARGETS), action="append")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.exit(bool(run(args.minutes, args.target or list(TARGETS), args.seed)))
