"""The subcommands that make runs, watch them, and export from their folders, and the one that writes a Flower app."""

from datetime import datetime
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import click

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.program.commands import FILE, FOLDER, JSON, Flag, command, group, names
from hyperbloom.server.broker.log import trace
from hyperbloom.server.flags import LISTENING, OWN_CODE, SERIES, TRACK, WEB, set_flag

_RUN = click.Argument(["run"], help="the run's folder", type=FOLDER)


@command(
    "watch",
    click.Argument(["run"], help="the run's folder; with --web also a folder of runs", type=FOLDER),
    Flag("--web", WEB, metavar="[HOST:]PORT"),
    Flag("--once", "say how far the run is, and end", is_flag=True),
    Flag("--json as_json", "with --once: print JSON for programs", is_flag=True),
    example="flower-server watch runs/20260102-030405-pfedhn",
)
def watch(run: Path, web: str | None, once: bool, as_json: bool) -> None:
    """Watch a run from its folder.

    The run may still go on, or be over. The command only reads files, so you can call it on any machine that sees the
    folder, as often as you like. It shows baselines one after the other: on a terminal as the run itself does,
    elsewhere as lines. With --web a browser shows it, or all runs of a folder, until Ctrl-C.
    """
    if web is not None:
        from hyperbloom.server.live.site import serve

        return serve(run, web, lambda line: print(line, flush=True))
    if once or as_json:
        from hyperbloom.server.live.run import how_far

        return print(how_far(run, as_json))
    from rich.console import Console

    from hyperbloom.server.watch.watching import watch

    watch(run, Console())


@command(
    "report",
    click.Argument(["run"], help="the run's folder, or a comparison's", type=FOLDER),
    Flag("--out", "the file to write", type=click.Path(dir_okay=False, path_type=Path), show_default="RUN/report.html"),
    example="flower-server report runs/20260102-030405-pfedhn",
)
def report(run: Path, out: Path | None) -> None:
    """Write a run's report, one HTML file with all figures.

    It can be read without a network. RUN may also be a comparison's folder (`flower-server compare`); the report is
    then of the run that was begun first, with the other strategies of its seed. A run writes its report itself when it
    ends.
    """
    from hyperbloom.server.pages.report import write_report

    print(f"the report is {write_report(run, out)}")


@command("serve", _RUN, OWN_CODE, *LISTENING, example="flower-server serve runs/20260101-120000-odpfl --host 0.0.0.0")
def serve(run: Path, own_code: bool, **listening: Any) -> None:
    """Give a model to every newcomer who describes its data.

    Keeps a trained run of odpfl ready. Newcomers run `flower-client join`; they need neither labels nor training. Each
    gets the model for all, the one written from its descriptor, or a mixture: what the run's novel clients found best.
    Ctrl-C stops the server.
    """
    trace()
    from rich.console import Console

    from hyperbloom.common.config import check
    from hyperbloom.common.models import BACKBONE
    from hyperbloom.server.grids.fleet import Machines, open_for_newcomers
    from hyperbloom.server.newcomers.on_demand import ModelMaker, OnDemandService, check_on_demand
    from hyperbloom.server.runs.trained import read_trained
    from hyperbloom.server.watch.view import print_line

    say = partial(print_line, Console())
    maker = ModelMaker(read_trained(run, check_on_demand, own_code))
    say(maker.offer.expected)
    brings = f"--data WHAT{' --backbone WHERE' if maker.offer.model == BACKBONE else ''}"
    with open_for_newcomers(check(Machines, listening, "the flags"), run / "serve", brings, say, say) as grid:
        OnDemandService(grid, maker, say).serve()


@command(
    "export",
    _RUN,
    Flag("--client", "the model of this client"),
    Flag("--all every", "the models of all clients, a folder each", is_flag=True),
    Flag("--out", "where the folders go", type=FOLDER, show_default="RUN/models"),
    Flag("--class-names", "what the classes are called, in order of the labels", metavar="A,B,..."),
    OWN_CODE,
    example="flower-server export runs/20260101-120000-pfedhn --all --out models",
)
def export(
    run: Path, client: str | None, every: bool, out: Path | None, class_names: str | None, own_code: bool
) -> None:
    """Write clients' personal models from a run folder.

    Each becomes a folder with the weights (safetensors), a torch program, ONNX (with the extra `export`), model.json
    and a model card.
    """
    if (client is None) != every:
        raise ConfigError("expected one of --client NAME and --all")
    from hyperbloom.common.files.export import HAS_ONNX
    from hyperbloom.server.runs.export import Export

    models = Export(run, own_code)
    clients = models.clients(client)
    folders = {each.client_id: (out or run / "models") / each.client_id for each in clients}
    if taken := [folder for folder in folders.values() if folder.exists()]:
        raise ConfigError(f"--out: expected nothing there yet, found {taken[0]}; delete it, or name another folder")
    for folder, files in models.write(clients, folders, tuple(names(class_names))):
        print(f"{folder}: {', '.join(files)}", flush=True)
    if not HAS_ONNX:
        print("no ONNX: pip install 'hyperbloom[export]' brings what it takes")


@command(
    "compare",
    Flag("--strategies", "what to compare; see flower-server --list", required=True, metavar="A,B"),
    Flag("--config", "YAML file of a run; options_by_strategy holds each strategy's own options", type=FILE),
    Flag("--seeds", "how many, from the run's seed on", default=3),
    set_flag("set a key of the run (data.name=x.npz), or one strategy's option (pfedhn.learning_rate=0.05)"),
    *SERIES,
    TRACK,
    JSON,
    example="flower-server compare --strategies pfedhn,fedavg,local --config run.yaml --seeds 3 --out runs/compared",
    epilog="exit codes: 0 all runs are complete, 2 wrong settings, 4 a strategy could not be trained, 130 Ctrl-C",
)
def compare(
    strategies: str, config: Path | None, seeds: int, assignments: tuple[str, ...], out: Path | None, **flags: Any
) -> int:
    """Compare strategies on the same clients, data and seeds.

    Writes one table and one page. Every strategy and seed is an ordinary run folder under --out. Call the command
    again with the same --out to go on: finished runs are kept, and the others are run. You may add strategies and
    seeds; any other change is refused. All clients run on this machine, or with `--engine elsewhere` on theirs, from
    where they join every run. (`flower-server --baselines` compares strategies in one run, with one seed.)
    """
    from hyperbloom.common.config import parse_assignment, read_yaml

    values = read_yaml(config) if config else {}
    overrides = dict(parse_assignment(text) for text in assignments)
    if flags["engine"] == "elsewhere":
        trace()
    # A wrong flag is reported before these imports, which take seconds because of torch and Flower.
    from rich.console import Console

    from hyperbloom.server.compare.comparison import check_cells, joining, open_comparison, plan, run_cells, shared_by
    from hyperbloom.server.compare.table import write_table
    from hyperbloom.server.watch.tracking import find_tracker
    from hyperbloom.server.watch.view import print_line

    engine, track, as_json = flags.pop("engine"), flags.pop("track"), flags.pop("as_json")
    out = out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-compare"
    where = f"{config} or the command line" if config else "the command line"
    cells = plan(out, names(strategies), seeds, values, overrides, where)
    check_cells(cells, engine)
    for spec in track:
        find_tracker(spec)
    told = Console(stderr=as_json, soft_wrap=True, markup=False, highlight=False)
    clients = joining(engine, cells[0].config, out, partial(print_line, told), flags)
    with open_comparison(out, shared_by(cells[0].config, engine), cells), clients as (grid, _):
        going_on = f"the same command with --out {quote(str(out))} goes on where this one stops"
        told.print(f"comparison: {out} ({len(cells)} runs; {going_on})")
        failures = run_cells(cells, engine, Console(stderr=as_json), grid, track)
        table = write_table(out, cells)
    print((out / "comparison.json").read_text() if as_json else f"\n{table}")
    told.print(f"everything is in {out}")
    return failures[0].exit_code if failures else 0


@command(
    "tune",
    Flag("--over", "values to try: local.learning_rate=0.005,0.02; may be repeated", multiple=True, metavar="KEY=A,B"),
    Flag("--config", "YAML file of a run", type=FILE),
    Flag("--rounds", "rounds of the last two settings; default: the run's", type=int),
    Flag("--seeds", "how many, from the run's seed on; the mean counts", type=click.IntRange(1, 1000), default=1),
    set_flag("set a key of the run (data.name=x.npz) or an option of its strategy"),
    *SERIES,
    example="flower-server tune --config run.yaml --over local.learning_rate=0.005,0.02,0.1 --out runs/tuned",
    epilog="exit codes: 0 the best settings are known, 2 wrong settings, 4 no setting could be trained, 130 Ctrl-C",
)
def tune(config: Path | None, assignments: tuple[str, ...], out: Path | None, **flags: Any) -> None:
    """Find the settings that are best on validation examples.

    Successive halving: all combinations of --over are tried for a few rounds, the better half anew for twice as many,
    until two have run all rounds. Without --over, local rates and steps are tried. OUT/tuned.yaml is the best run, for
    `flower-server --config`. Call it again with the same --out to go on. All clients run on this machine, or with
    `--engine elsewhere` on theirs, from where they join every run.
    """
    from hyperbloom.common.config import make_run_config, parse_assignment, read_yaml

    values = read_yaml(config) if config else {}
    given = dict(parse_assignment(text) for text in assignments)
    if flags["engine"] == "elsewhere":
        trace()

    from hyperbloom.server.compare import tuning  # takes seconds, because of torch and Flower

    out = out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-tune"
    where = f"{config} or the command line" if config else "the command line"
    table = tuning.tune(lambda more: make_run_config(values, {**given, **more}, where), out, **flags)
    print(f"\n{table}\nnext: flower-server --config {quote(str(out / 'tuned.yaml'))}")


@command(
    "new",
    click.Argument(["folder"], type=click.Path(path_type=Path), metavar="DIR", help="a new folder, named as the app"),
    Flag("--config", "YAML file with values for the run config", type=FILE),
    set_flag("give a key of the run config this value"),
)
def _new(folder: Path, config: Path | None, assignments: tuple[str, ...]) -> None:
    """Write a Flower app whose run config has every key of a run."""
    from hyperbloom.common.config import load_run_config, parse_assignment
    from hyperbloom.server.flower_project import make_project
    from hyperbloom.strategies import make_algorithm

    run = load_run_config(config, dict(parse_assignment(text) for text in assignments))
    make_algorithm(run)  # refuses wrong options; what files it needs may be on another machine
    make_project(folder, run)
    print(f"wrote {folder}; next: flwr run {quote(str(folder))} --stream --run-config rounds=20")


app = group(
    "app",
    """Make a Flower app.

    It runs on a SuperLink and SuperNodes that are already there, and in Flower's simulation.""",
    _new,
    example="flower-server app new ward-models --set strategy=pfedhn-pc",
)
