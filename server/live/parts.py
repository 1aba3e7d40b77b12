"""The parts of the live page as HTML. Nothing here reads lines or serves anything."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.gains import of_all
from hyperbloom.common.metrics import axis_of
from hyperbloom.server.live.run import LiveRun
from hyperbloom.server.pages.charts import Series, lines, plane
from hyperbloom.server.pages.embedding_map import flatten_by_pca, read_embeddings
from hyperbloom.server.pages.page import render_blocks
from hyperbloom.server.runs.lines import REPORT, read_gains
from hyperbloom.server.runs.recorded import Member, read_members
from hyperbloom.server.watch.board import Board, Standing

ROWS = 60
"""Most clients in the table: those in trouble first, then those with the least accuracy."""

EVENTS_SHOWN = 40
MAPPED = 2_000
"""Most clients on the map."""


def run_parts(run: LiveRun, name: str) -> Mapping[str, Markup]:
    """Return a run's parts by name."""
    courses = [course for course in run.courses.values() if course.means]
    alone = run.courses.get("local")
    told = read_gains(run.folder)
    members = read_members(run.folder).clients
    novel = {member.name for member in members if run.config.is_novel(member.row)}
    over = alone and alone is not run.main and (alone is not run.current or run.state == "complete")  # as many rounds
    gains = run.main.gains_over(alone) if alone and over else {}
    gains = {who: gain for who, gain in gains.items() if who not in novel}  # alone they have no model
    return render_blocks(
        "live_run.html",
        run=run,
        name=name,
        course=run.main if run.state == "complete" else run.current,
        courses=courses,
        curve=_curve(courses, name) if courses else None,
        clients=_in_order(run.main, gains)[:ROWS],
        gains=gains,
        novel=novel,
        answer=of_all((gain for _, gain in told.values()), run.main.metric) if told else "",
        gaining=sum(gain > 0 for gain in gains.values()),
        in_trouble=sum(not client.well for client in run.main.clients.values() if client.left_out),
        events=list(run.events)[: -EVENTS_SHOWN - 1 : -1],
        map=_map(run, name, members),
        members=members,
        known=max(len(members), len(run.main.clients)),
        has_report=(run.folder / REPORT).is_file(),
    )


def overview_parts(runs: Mapping[str, Path], kept: dict[Path, LiveRun]) -> Mapping[str, Markup]:
    """Return the list of runs as the only part; `kept` holds what has been read of them, from look to look."""
    looked: dict[str, LiveRun | str] = {}
    for name, folder in runs.items():
        try:
            looked[name] = run = kept.get(folder) or kept.setdefault(folder, LiveRun(folder))
            run.look(0.0)  # the rounds alone
        except ConfigError as error:  # such as one of another version
            looked[name] = str(error)
            kept.pop(folder, None)
    return render_blocks("live_runs.html", runs=looked)


def _curve(courses: Sequence[Board], name: str) -> Markup:
    series = [Series(course.name, course.means) for course in courses]
    board = courses[0]
    title = f"Test {board.title} over rounds, mean over clients"
    return lines(f"{name}-curve", title, axis_of(board.metric), series, percent=board.scale.percent)


def _in_order(course: Board, gains: Mapping[str, float]) -> list[tuple[str, Standing]]:
    """Return the clients: those in trouble first, then those that lose most, then those served worst of the others."""

    def key(entry: tuple[str, Standing]) -> tuple[bool, bool, float, str]:
        name, client = entry
        value = gains.get(name, course.scale.sign * (client.accuracy or 0.0))
        return client.well or not client.left_out, name not in gains, value, name

    return sorted(course.clients.items(), key=key)


def _map(run: LiveRun, name: str, members: Sequence[Member]) -> Markup | None:
    """Return the clients' embeddings in a plane, or None without any."""
    embeddings = read_embeddings(run.folder / "hypernetwork.safetensors")
    if embeddings is None or not 2 <= len(embeddings) == len(members) <= MAPPED:
        return None
    points, axes = flatten_by_pca(embeddings)
    accuracy = {each: client.accuracy for each, client in run.main.clients.items() if client.accuracy is not None}
    return plane(f"{name}-map", "Embeddings by PCA", points, members, accuracy, axes, run.main.scale)
