"""A run's report: one self-contained HTML file without scripts. See docs/watching.md."""

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hyperbloom.common.config import dump_run_config
from hyperbloom.common.files.storage import write_bytes
from hyperbloom.common.gains import of_all
from hyperbloom.common.metrics import axis_of, scale_of, title_of
from hyperbloom.common.newcomers import best_of, says
from hyperbloom.common.program.names import by_number
from hyperbloom.server.pages.charts import Series, clients_in_order, lines, plane
from hyperbloom.server.pages.embedding_map import flatten_by_pca, flatten_by_tsne, read_embeddings
from hyperbloom.server.pages.page import render
from hyperbloom.server.pages.report_data import RunData, read_run_data
from hyperbloom.server.pages.score_charts import score_charts
from hyperbloom.server.runs.course import Course
from hyperbloom.server.runs.lines import ADVICE, REPORT, asked
from hyperbloom.server.runs.recorded import flat, read_json, read_summary, sound

BARS = 24
"""Most clients that have bars of their own, and answers that are not folded away."""
WORST = 8
"""Number of clients named beside a picture of all."""
ROWS = 1_000
"""Most clients in the table; it shows the first ones."""
EVENTS = 200
"""Most events shown; these are the last ones."""


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a run, finished or not, and return its path; errors as in `read_run_data`."""
    run = read_run_data(folder)
    path = out or run.folder / REPORT
    with sound(run.folder):
        page = _page(run)
    write_bytes(path, page)
    return path


def _page(run: RunData) -> bytes:
    main, results = run.main, read_summary(run.folder)
    newcomers = best_of([each.newcomers for each in results.values()], run.main.metric)
    members = sorted(run.members.clients, key=lambda member: by_number(member.name))
    rivals = [course for course in run.courses[1:] if course.metrics]
    scale = main.scale
    sign, of = scale.sign, main.accuracy
    rival = max(rivals, key=lambda course: sign * course.metrics["test_mean"], default=None)
    gains = sorted(run.gains.items(), key=lambda pair: by_number(pair[0]))
    of_rival = rival.accuracy if rival else {}
    return render(
        "report.html",
        run=run,
        main=main,
        rival=rival,
        metric=title_of(main.metric),
        scale=scale,
        most=scale.longest(chain(*(each.told.values() for each in run.courses))),
        further=list(_further(main)),
        curves=score_charts(run) if main.counts else [],
        gains=[(name, told.removeprefix(name).lstrip(": "), gain) for name, (told, gain) in gains[:ROWS]],
        fold=len(gains) > BARS,
        of_all=of_all((gain for _, gain in run.gains.values()), main.metric) if run.gains else "",
        advice=read_json(run.folder / ADVICE, None),
        newcomers=says(newcomers, main.metric) if newcomers else "",
        novel={member.name for member in members if run.config.is_novel(member.row)},
        gaps=[sign * (value - of_rival[name]) for name, value in of.items() if name in of_rival],
        left=sum(map(asked, main.rounds)) - main.trained,
        curve=_curve(run) if run.spreads else None,
        in_order=clients_in_order(run.courses) if len(of) > BARS else None,
        members=members[:ROWS],
        worst_off=sorted(of, key=lambda name: sign * of[name])[:WORST],
        **_map(run),
        bytes=lines("bytes", "Bytes of training per client and round", "kB", list(_traffic(main))),
        seconds=_per_round(main, "seconds", {line["round"]: line["seconds"] for line in main.rounds}),
        left_out=sorted(run.left_out.items(), key=lambda pair: (-pair[1].left_out, pair[0])),
        left_out_chart=_per_round(main, "clients left out", run.left_out_in),
        events=run.events[-EVENTS:],
        config=dump_run_config(run.config),
        environment=list(flat(run.environment)),
    )


def _curve(run: RunData) -> Markup:
    """Return the chart of each strategy's mean by round, with the spread over clients of the run's own."""
    scale, metric = run.main.scale, title_of(run.main.metric)
    worst, lower, upper, best = ([(number, each[edge]) for number, each in run.spreads.items()] for edge in range(4))
    series = []
    for course in run.courses:
        dots = []
        if course.selected is not None:
            mean = course.metrics["test_mean"]
            dots = [((course.selected, mean), f"{course.name}: {scale.show(mean)} at round {course.selected}")]
        bands = [(worst, best), (lower, upper)] if course is run.main else []
        series.append(Series(course.name, list(course.curve.items()), bands, dots))
    title, unit = f"Test {metric} over rounds, mean over clients", axis_of(run.main.metric)
    return lines("curve", title, unit, series, percent=scale.percent)


def _further(course: Course) -> Iterator[list[str]]:
    """Yield a row for each metric but the selecting one: its name, mean, worst, pooled, and for how many undefined."""
    found = re.compile(r"test_(.+)_(mean|undefined)")
    names = dict.fromkeys(match[1] for key in course.metrics if (match := found.fullmatch(key)))
    for name in ("", *names):
        start, scale = (f"test_{name}", scale_of(name)) if name else ("test", course.scale)
        values = [course.metrics.get(f"{start}_{key}") for key in ("mean", "worst", "pooled")]
        undefined = course.metrics.get(f"{start}_undefined", 0)
        if names or undefined:
            shown = ["-" if value is None else scale.show(value) for value in values]
            yield [title_of(name or course.metric), *shown, f"{undefined:.0f}" if undefined else ""]


def _per_round(course: Course, what: str, values: Mapping[int, float]) -> Markup:
    points = [(line["round"], values.get(line["round"], 0)) for line in course.rounds]
    return lines(what.replace(" ", "-"), f"{what} by round".capitalize(), what, [Series(what, points)])


def _traffic(course: Course) -> Iterator[Series]:
    for way in ("down", "up"):
        each = ((line["round"], line.get(f"bytes_{way}", 0) / 1e3 / max(1, asked(line))) for line in course.rounds)
        yield Series(way, list(each))


def _map(run: RunData) -> dict[str, Any]:
    embeddings = read_embeddings(run.folder / "hypernetwork.safetensors")
    members, accuracy, scale = run.members.clients, run.main.accuracy, run.main.scale
    if embeddings is None or len(embeddings) != len(members) or len(embeddings) < 2:
        return {"pca": None}
    (points, axes), flat = flatten_by_pca(embeddings), flatten_by_tsne(embeddings)
    return {
        "pca": plane("pca", "Embeddings by PCA", points, members, accuracy, axes, scale),
        "tsne": None if flat is None else plane("tsne", "Embeddings by t-SNE", flat, members, accuracy, (), scale),
    }
