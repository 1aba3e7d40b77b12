"""`flower-client` command lines: the one to print for other machines, and child processes beside this one."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Literal

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import CohortError
from hyperbloom.common.keys import make_key, public_pem, write_private_key
from hyperbloom.server.registry import ClientRegistry
from hyperbloom.strategies import find_strategy

__all__ = ["client_flags", "disclosure", "local_clients", "make_keys", "own_model", "printed_line"]

LEAVE_TIMEOUT_S = 10
KEY = "key.pem"


def client_flags(config: RunConfig) -> list[str]:
    """Return the flags that make a client train on its share of the run's benchmark data set."""
    data = config.data
    flags = ["--data", data.name, "--split", data.split, "--classes-per-client", str(data.classes_per_client)]
    flags += ["--root", data.root] if data.root else []
    flags += ["--alpha", str(data.alpha)] if data.split == "dirichlet" else []
    flags += ["--max-train", str(data.max_train)] if data.max_train else []
    flags += ["--disclose-class-shares"] if config.options.get("descriptor") == "class-shares" else []
    return [*flags, "--data-seed", str(config.seed)]


def own_model(config: RunConfig, index: int) -> str | None:
    """Return the own model of client `index` of those started here, or None if the server chooses the model."""
    names = config.models or ((config.model,) if find_strategy(config.strategy).own_models == "must" else ())
    return names[index % len(names)] if names else None


def disclosure(config: RunConfig) -> Literal["types", "graph"]:
    """Return what the clients started here tell of their own models: what the strategy needs."""
    return "graph" if find_strategy(config.strategy).asks == "graph" else "types"


def printed_line(address: str, security: list[str], config: RunConfig) -> str:
    """Return the line to run on another machine; NAME and I stand for what differs between clients."""
    words = ["flower-client", "--server", address, *security, *client_flags(config)]
    if config.sizes != ("M",):
        words += ["--size", "|".join(config.sizes)]
    if own_model(config, 0) is not None:
        # What is not in the run is for the client's user to fill in, as NAME and I are.
        words += ["--model", "|".join(dict.fromkeys(config.models)) or "MODEL", *_disclosure(config)]
    return f"{shlex.join(words)} --client-id NAME --partition I/{config.part(0)[1]}"


def make_keys(count: int, config: RunConfig, folder: Path) -> Path:
    """Make keys for the first `count` clients, in their folders, and return the registry of them.

    A run that is resumed has them already.
    """
    registry = ClientRegistry(folder / "clients.json")
    for index in range(len(registry.clients()), count):
        key, name = make_key(), f"client-{config.part(index)[0]}"
        write_private_key(folder / name / KEY, key)
        registry.add(name, public_pem(key))
    return registry.path


@contextmanager
def local_clients(
    count: int, address: str, security: list[str], config: RunConfig, folder: Path
) -> Iterator[Callable[[], None]]:
    """Run `count` clients as processes of their own, each with its log and its state under `folder`.

    They share this machine's cores, and end with this process. Sizes on offer are dealt in turn. One
    with a key (`make_keys`) uses it.

    Yields:
        a function that raises a `CohortError` if one of them could not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // max(1, count))
    with ExitStack() as stack:
        children: dict[str, subprocess.Popen[bytes]] = {}
        for index in range(count):
            part, parts = config.part(index)
            name = f"client-{part}"
            log = stack.enter_context((folder / f"{name}.log").open("ab"))
            command = [sys.executable, "-m", "hyperbloom.client", "--server", address]
            key = folder / name / KEY
            command += [*security, *(["--key", str(key)] if key.exists() else [])]
            command += ["--client-id", name, "--partition", f"{part}/{parts}", *client_flags(config)]
            command += ["--state-dir", str(folder / name), "--threads", str(threads), "--parent-pid", str(os.getpid())]
            command += ["--size", config.sizes[index % len(config.sizes)]]
            if (model := own_model(config, index)) is not None:
                command += ["--model", model, *_disclosure(config)]
            children[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            yield lambda: _check(children, folder)
        finally:
            _end(list(children.values()))


def _disclosure(config: RunConfig) -> list[str]:
    """Return the flag without which a client tells too little of its own model for this run."""
    return [] if disclosure(config) == "types" else ["--disclose", disclosure(config)]


def _check(children: Mapping[str, subprocess.Popen[bytes]], folder: Path) -> None:
    for name, child in children.items():
        if child.poll():
            log = folder / f"{name}.log"
            last = (log.read_text(errors="replace").strip().splitlines() or ["(its log is empty)"])[-1]
            raise CohortError(f"{name} ended with code {child.returncode}: {last} (see {log})")


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    """Wait for clients that have heard the goodbye; end the others."""
    for child in _after_a_while(children):
        child.terminate()
    for child in _after_a_while(children):
        child.kill()
        child.wait()


def _after_a_while(children: list[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    """Return the processes that still run after `LEAVE_TIMEOUT_S`, which all of them share."""
    deadline = monotonic() + LEAVE_TIMEOUT_S
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=max(0.0, deadline - monotonic()))
    return [child for child in children if child.poll() is None]
