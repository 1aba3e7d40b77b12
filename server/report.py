"""A run's report: one HTML file that needs nothing else, neither a network nor a script. See docs/watching.md."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hyperbloom import __version__
from hyperbloom.common.config import dump_run_config
from hyperbloom.common.errors import HyperbloomError
from hyperbloom.common.storage import write_bytes
from hyperbloom.server import report_figures as figures
from hyperbloom.server.board import amount, duration
from hyperbloom.server.embedding_map import Points, flatten_by_pca, flatten_by_tsne, read_embeddings
from hyperbloom.server.report_data import Course, Member, RunData, read_run_data

if TYPE_CHECKING:
    from hyperbloom.server.mix_and_match import Mixed

__all__ = ["REPORT", "write_report"]

REPORT = "report.html"

BARS = 24
"""Clients up to which each has bars of its own."""

WORST = 8
"""Clients that are named beside a picture of all."""

ROWS = 1_000
"""Clients beyond which the table has the first ones only."""

EVENTS = 200
"""Events that are shown, the last ones."""


def write_report(folder: Path, out: Path | None = None, mix: bool = True, root: Path | None = None) -> Path:
    """Write the report of a run, finished or not, and return where it is.

    Args:
        folder: the run's, or a comparison's.
        out: the file; `report.html` in the run's folder, if None.
        mix: try all heads on all feature extractors, which takes the data and time.
        root: folder with the data set's files; as in the run, if None.

    Raises:
        ConfigError: there is no run, a file of it is damaged, or no round is over.
    """
    run = read_run_data(folder)
    page = _page(run, *_mixed(run, mix, root))
    path = out or run.folder / REPORT
    write_bytes(path, page.encode())
    return path


def _mixed(run: RunData, mix: bool, root: Path | None) -> tuple["Mixed | None", str]:
    """Return the matrix with its names, or why there is none."""
    if not mix:
        return None, "it takes the data and some time; flower-server report computes it"
    from hyperbloom.server.mix_and_match import mix_and_match

    try:
        return mix_and_match(run.folder, run.config, root), ""
    except HyperbloomError as error:
        return None, str(error)


@dataclass(frozen=True)
class _Tile:
    label: str
    value: str
    note: str


def _page(run: RunData, mixed: "Mixed | None", why_not: str) -> str:
    environment = Environment(
        loader=PackageLoader("hyperbloom.server", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    main, members = run.main, sorted(run.members, key=lambda member: _by_number(member.name))
    span = (main.rounds[0]["round"], main.rounds[-1]["round"])
    return environment.get_template("report.html").render(
        version=__version__,
        run=run,
        main=main,
        headline=_headline(run),
        tiles=_tiles(run),
        style_of=figures.style_of,
        curve=figures.accuracy_over_rounds(run.courses) if main.spreads else None,
        bars=len(main.accuracy) <= BARS,
        in_order=figures.clients_in_order(run.courses) if len(main.accuracy) > BARS else None,
        members=members[:ROWS],
        more_members=max(0, len(members) - ROWS),
        worst_off=sorted(main.accuracy, key=lambda name: main.accuracy[name])[:WORST],
        mean_of=lambda course: course.metrics.get("test_mean"),
        **_map(run),
        matrix=figures.matrix(mixed.names, mixed.values) if mixed else None,
        of_last_round=mixed is not None and mixed.of_last_round,
        own_and_others=_own_and_others(mixed.values) if mixed else None,
        mixed_first=len(mixed.names) if mixed and len(mixed.names) < len(members) else 0,
        why_no_matrix=why_not,
        bytes=figures.over_rounds(
            "bytes",
            "Bytes of training per client and round",
            "kB",
            main.rounds,
            {"down": lambda line: _each(line, "bytes_down"), "up": lambda line: _each(line, "bytes_up")},
        ),
        seconds=figures.over_rounds(
            "seconds", "Seconds per round", "seconds", main.rounds, {"round": lambda line: float(line["seconds"])}
        ),
        left_out=sorted(main.left_out.items(), key=lambda pair: (-pair[1].times, pair[0])),
        left_out_chart=figures.left_out_over_rounds(main.left_out_in, *span) if main.left_out_in else None,
        events=run.events[-EVENTS:],
        more_events=max(0, len(run.events) - EVENTS),
        config=dump_run_config(run.config),
        environment=_flat(run.environment),
    )


def _each(line: Mapping[str, Any], key: str) -> float:
    kilobytes: float = line.get(key, 0) / 1e3
    return kilobytes / max(1, int(line["clients"]))


def _headline(run: RunData) -> str:
    """Say in a sentence or two what came out."""
    main, total = run.main, run.config.rounds
    done = main.rounds[-1]["round"]
    how_far = f"After {done} rounds" if run.complete else f"After {done} of {total} rounds"
    if not main.metrics:
        return f"{how_far} of {main.name} nothing has been evaluated yet."
    means = main.metrics
    text = (
        f"{how_far} of {main.name}, {len(main.accuracy)} clients are right on {means['test_mean']:.1f} % of their test "
        f"examples on average, and on {means['test_worst']:.1f} % at worst."
    )
    rival = _best_rival(run.courses)
    if rival is None:
        return text
    gap = means["test_mean"] - rival.metrics["test_mean"]
    word = "ahead of" if gap >= 0 else "behind"
    both = [name for name in main.accuracy if name in rival.accuracy]
    better = sum(main.accuracy[name] > rival.accuracy[name] for name in both)
    return (
        f"{text} That is {abs(gap):.1f} points {word} {rival.name}, the best of the others; "
        f"{better} of {len(both)} clients are better off than with it."
    )


def _best_rival(courses: Sequence[Course]) -> Course | None:
    rivals = [course for course in courses[1:] if course.metrics]
    return max(rivals, key=lambda course: course.metrics["test_mean"], default=None)


def _tiles(run: RunData) -> list[_Tile]:
    main, metrics = run.main, run.main.metrics
    tiles = []
    if metrics:
        tiles.append(_Tile("mean over clients", f"{metrics['test_mean']:.1f} %", f"at round {main.selected}"))
        worst = min(main.accuracy, key=lambda name: main.accuracy[name], default="")
        tiles.append(_Tile("worst client", f"{metrics['test_worst']:.1f} %", worst))
        if "novel_test_mean" in metrics:
            tiles.append(_Tile("novel clients", f"{metrics['novel_test_mean']:.1f} %", "never trained"))
    clients = sum(line["clients"] for line in main.rounds)
    down, up = (sum(line.get(key, 0) for line in main.rounds) for key in ("bytes_down", "bytes_up"))
    seconds = main.seconds
    tiles.append(_Tile("time", duration(seconds), f"{duration(seconds / len(main.rounds))} a round"))
    tiles.append(_Tile("a client's round", amount(down / max(1, clients)), f"down, {amount(up / max(1, clients))} up"))
    left = sum(each.times for each in main.left_out.values())
    tiles.append(
        _Tile("left out", f"{left:,}", f"of {clients + left:,} times that a client was asked" if left else "nobody")
    )
    return tiles


def _by_number(name: str) -> list[tuple[int, str]]:
    """Order names as people do: client-2 before client-10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split("([0-9]+)", name)]


def _map(run: RunData) -> dict[str, Any]:
    """Return what the page says of the embeddings."""
    nothing: dict[str, Any] = {"pca": None, "tsne": None, "classes": [], "scale": None}
    embeddings = read_embeddings(run.folder / "hypernetwork.safetensors")
    if embeddings is None or len(embeddings) != len(run.members) or len(embeddings) < 2:
        return nothing
    members: list[Member] = sorted(run.members, key=lambda member: member.row)
    accuracy = run.main.accuracy
    points, (first, second) = flatten_by_pca(embeddings)
    axes = (f"{first:.0f} % of the variance →", f"↑ {second:.0f} %")
    pca = figures.plane("pca", "Embeddings by PCA", points, members, accuracy, axes)
    flat = flatten_by_tsne(embeddings)
    tsne = None if flat is None else figures.plane("tsne", "Embeddings by t-SNE", flat, members, accuracy, ())
    occurring = {label for member in members for label, share in enumerate(member.shares) if share > 0.005}
    classes = [(label, Markup(figures.class_colour(label))) for label in sorted(occurring)]
    values = list(accuracy.values())
    scale = (min(values), max(values)) if values and not classes else None
    return {"pca": pca, "tsne": tsne, "classes": classes, "scale": scale}


def _own_and_others(values: Points) -> tuple[float, float]:
    """Return the mean accuracy with each client's own feature extractor, and with the others'."""
    own = np.eye(len(values), dtype=bool)
    return float(values[own].mean()), float(values[~own].mean()) if len(values) > 1 else float(values[own].mean())


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", " ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return rows
