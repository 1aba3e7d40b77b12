"""Clients on a run's benchmark data: their settings, command lines, and local processes."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from hyperbloom.client.settings import ClientSettings
from hyperbloom.common.config import RunConfig
from hyperbloom.common.data import DataSpec
from hyperbloom.common.data.schema import load_schema
from hyperbloom.common.errors import CohortError
from hyperbloom.common.program.device import cores
from hyperbloom.common.program.signals import end_children
from hyperbloom.common.secrecy.keys import make_key, public_pem, write_private_key
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.strategies import find_strategy

LEAVE_TIMEOUT_S = 10  # after the goodbye
KEY = "key.pem"


def client_settings(config: RunConfig, index: int, folder: Path) -> ClientSettings:
    """Return the settings of client `index` that a run starts, virtual or as a process; its state is in `folder`.

    The run's models and sizes are assigned in turn.
    """
    data, strategy = config.data, find_strategy(config.strategy)
    part, parts = config.part(index)
    models = config.models or ((config.model,) if strategy.own_models == "must" else ())
    alike = data.model_dump(include=set(DataSpec.__dataclass_fields__) - {"root"}) | {"backbone": config.backbone}
    root, schema = (Path(each) if each else None for each in (data.root, data.schema_file))
    spec = DataSpec(data.name, root, partition=part, partitions=parts, seed=config.seed, schema=schema, **alike)
    return ClientSettings(
        client_id=f"client-{part}",
        data=spec,
        size=config.sizes[index % len(config.sizes)],
        state_dir=folder / "clients" / f"client-{part}",
        disclose_class_shares=True,  # all clients are on this machine
        disclose_moments=True,
        disclose_counts=True,
        disclose_gain=True,
        model=models[index % len(models)] if models else None,
        disclose="graph" if strategy.asks == "graph" else "types",
    )


def printed_line(connection: Sequence[str], config: RunConfig) -> str:
    """Return the command for other machines, with placeholders NAME and I for what differs between clients.

    If the run has several sizes or models, the command names them all for the user to choose. If the run hands out a
    schema, each client has a TABLE of its own.
    """
    first, table = client_settings(config, 0, Path()), config.data.schema_file
    named = first.data.label or ("COLUMN" if first.data.is_table else None)
    label = ",".join(load_schema(Path(table)).label) if table else named
    line = replace(
        first,
        client_id="NAME",
        data=replace(
            DataSpec("TABLE", label=label) if table else replace(first.data, partition=None, label=label),
            backbone=first.data.backbone and "FOLDER",
        ),
        size="|".join(config.sizes),
        state_dir=None,
        disclose_class_shares=config.options.get("descriptor") == "class-shares",
        disclose_moments=False,
        disclose_counts=False,
        disclose_gain=False,
        model="|".join(dict.fromkeys(config.models)) or (first.model and "MODEL"),
    )
    words = ["flower-client", *connection, *line.to_flags()]
    return shlex.join(words) + ("" if table else f" --partition I/{first.data.partitions}")


def make_keys(settings: Sequence[ClientSettings], folder: Path) -> Path:
    """Make keys for clients in their state folders; return the path of their registry in `folder`.

    A resumed run has keys already, so only missing ones are made.
    """
    registry = ClientRegistry(folder / "clients.json")
    for each in settings[len(registry.clients()) :]:
        key = make_key()
        write_private_key(each.folder / KEY, key)
        registry.add(each.client_id, public_pem(key))
    return registry.path


@contextmanager
def local_clients(settings: Sequence[ClientSettings], connection: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Run clients as processes that share this machine's cores and end with this process.

    The function that this yields raises a `CohortError` if a client could not start.
    """
    threads = max(1, cores() // max(1, len(settings)))
    own = ["--threads", str(threads), "--parent-pid", str(os.getpid())]
    with ExitStack() as stack:
        children: dict[Path, subprocess.Popen[bytes]] = {}
        # Also if one of them cannot be started.
        stack.callback(lambda: end_children([*children.values()], LEAVE_TIMEOUT_S))
        for each in settings:
            each.folder.parent.mkdir(parents=True, exist_ok=True)
            log = each.folder.with_name(f"{each.client_id}.log")
            key = each.folder / KEY
            command = [sys.executable, "-m", "hyperbloom.client", *connection]
            command += [*(["--key", str(key)] if key.exists() else []), *each.to_flags(), *own]
            children[log] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stack.enter_context(log.open("ab")),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        def check() -> None:
            for log, child in children.items():
                if child.poll():
                    last = (log.read_text(errors="replace").strip().splitlines() or ["(its log is empty)"])[-1]
                    raise CohortError(f"{log.stem} ended with code {child.returncode}: {last} (see {log})")

        yield check
