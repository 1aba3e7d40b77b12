"""A site's own page: `flower-client --web`, and `flower-client watch`. Made from the state folder alone, read-only."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import safetensors
from rich.filesize import decimal
from safetensors import SafetensorError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hyperbloom.client.keep.releases import RELEASES, read_releases
from hyperbloom.client.keep.sent import CHANGES, TRAINING, read_sent
from hyperbloom.common.errors import ConfigError, attempt
from hyperbloom.common.files.storage import claim
from hyperbloom.common.metrics import scale_of, title_of
from hyperbloom.common.pages.page import templates
from hyperbloom.common.pages.serving import HEADERS, read_only, serve_at
from hyperbloom.common.secrecy.noise import epsilon_of

DELTA = 1e-5
"""Delta of the guarantee that is shown, as docs/privacy.md has it."""


def page(folder: Path) -> bytes:
    """Return the page of the client with this state folder; ConfigError if there is none, or its ledger is damaged."""
    ledger, counts = read_sent(folder), attempt(read_releases, folder)
    if not ledger:
        raise ConfigError(f"expected the state folder of a client that has joined, found no sent.json in {folder}")
    if isinstance(counts, Exception):
        raise ConfigError(f"{folder / RELEASES} is damaged: nothing leaves until it is restored from a backup")
    limits = ledger["limits"]
    noisy = (ledger["least"], ledger["noisy"]), (limits["noise"], limits["changes"])
    template = templates("hyperbloom.client").get_template("client.html")
    return template.render(
        ledger=ledger,
        folder=folder.resolve(),
        running=attempt(_is_running, folder) is True,
        now=time.time(),
        trained=max((each[2] for kind, each in ledger["kinds"].items() if kind in TRAINING), default=None),
        budget=[(kind, counts[kind], limits[kind]) for kind in counts if limits[kind] is not None],
        epsilons=[
            f"{epsilon_of([noise / math.sqrt(count)], DELTA):.4g}" if noise and count else "0" for noise, count in noisy
        ],
        plain=sum(each[0] for kind, each in ledger["kinds"].items() if kind in CHANGES) - ledger["noisy"],
        gain=_gain(folder),
        delta=DELTA,
        moment=lambda seconds: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)),
        **{"amount": decimal, "scale_of": scale_of, "title_of": title_of},
    ).encode()


def _is_running(folder: Path) -> bool:
    """Return whether a process runs as this client, which then holds the folder's lock."""
    with (folder / "lock").open("r+") as file:
        return not claim(file)


def _gain(folder: Path) -> str:
    """Return what the federation gained this client over training alone in the last run that compared it, or ''."""
    for path in sorted((folder / "scored").glob("*.safetensors"), key=lambda path: -path.stat().st_mtime):
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                if gain := json.loads(file.metadata()["facts"])["gain"]:
                    return str(gain)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError):
            continue
    return ""


def serve(folder: Path, address: str, say: Callable[[str], None]) -> None:
    """Serve the page at `[HOST:]PORT`, on loopback without a host, until Ctrl-C; errors as of `page` and `serve_at`."""
    page(folder)

    async def front(request: Request) -> Response:
        return Response(page(folder), headers=HEADERS, media_type="text/html")

    serve_at(address, lambda host: read_only([Route("/", front)], host), say)
