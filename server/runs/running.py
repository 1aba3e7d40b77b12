"""A run in its folder: begin or resume it, run it over its engine's grid, write the table and the report."""

import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from shlex import quote

from rich.console import Console

from hyperbloom.common.config import RunConfig
from hyperbloom.common.data import data_source
from hyperbloom.common.errors import FULL, DiskError, attempt
from hyperbloom.common.newcomers import best_of, says
from hyperbloom.common.program.device import limit_threads, pick_device
from hyperbloom.common.program.plain import listening_at
from hyperbloom.server.grids.engine import open_grid
from hyperbloom.server.grids.fleet import Machines, Say, check_port, log_to
from hyperbloom.server.grids.local_clients import client_settings
from hyperbloom.server.loop.listener import Listener, Selection
from hyperbloom.server.loop.post import Grid
from hyperbloom.server.loop.session import Session, check_run
from hyperbloom.server.pages.report import write_report
from hyperbloom.server.runs.checkpoint import locked
from hyperbloom.server.runs.folder import RunFolder, adopt_identities, new_run_folder
from hyperbloom.server.watch.tracking import find_tracker, tracked
from hyperbloom.server.watch.view import TerminalView, print_line, print_results

LARGEST_FOR_REPORT = 100_000_000
"""Most bytes of lines for which a run writes its report at its end; this many take five seconds."""


def play(
    folder: Path,
    config: RunConfig,
    machines: Machines,
    resumes: bool,
    view: Listener,
    say: Say,
    more: Sequence[Listener] = (),
    grid: Grid | None = None,
) -> tuple[RunFolder, Session, dict[str, Selection]]:
    """Begin a run in its folder, or take it back to its last checkpoint, and run it to the end.

    The folder is locked meanwhile, and has the log. `view` and `more` receive all that happens. `grid` is the grid of
    somebody else's SuperLink, or None to open one.

    Raises:
        HyperbloomError: the run failed; this is recorded as an event. Or no checkpoint is usable, or the disk is full.
    """
    limit_threads()
    machines = machines.with_port()
    with ExitStack() as stack:
        stack.enter_context(_full_disk_told(folder))
        stack.enter_context(locked(folder))
        resume, run_id = None, f"{folder.name}-{secrets.token_hex(4)}"
        if resumes:
            recorder, resume = RunFolder.resume(folder, config, view.event)
            run_id = resume.checkpoint.run_id
            name = [config.strategy, *config.baselines][resume.checkpoint.phase]
            for listener in (recorder, view):
                listener.event(f"going on after round {max(0, resume.checkpoint.progress.round)} of {name}")
        else:
            recorder = RunFolder(folder, config, run_id, machines.record())
            adopt_identities(config, folder)
        listeners = [recorder, view, *more, *_listeners(machines, folder, stack, say)]
        stack.enter_context(log_to(folder / "server.log"))
        opening = open_grid(machines, config, folder, say, view.event)
        opened, watch = (grid, lambda: None) if grid else stack.enter_context(opening)
        session = Session(config, opened, run_id, listeners, watch, resume, machines.device, recorder.selected_state)
        try:
            return recorder, session, session.run()
        except BaseException as error:  # such as Flower's SystemExit and KeyboardInterrupt, by `flwr stop`
            why = "its process was ended" if isinstance(error, SystemExit) else str(error) or "Ctrl-C, or flwr stop"
            attempt(recorder.event, f"the run stopped: {why}")  # the disk may be full
            error.args = (folder,) if isinstance(error, KeyboardInterrupt) else error.args
            raise


@contextmanager
def _full_disk_told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        on = f"go on with flower-server --resume {quote(str(folder))}, or with the same command if it compares or tunes"
        anew = f"begin again with the same command, after you have deleted {folder}"
        raise DiskError(
            f"cannot write to {folder}: {error.strerror}. Nothing is half-written; make room, and "
            f"{on if any((folder / 'checkpoints').glob('[0-9]*.json')) else anew}"
        ) from None


def run_federation(
    config: RunConfig,
    machines: Machines,
    console: Console,
    run_dir: Path | None,
    anew: bool,
    resume: Path | None,
    grid: Grid | None = None,
    more: Sequence[Listener] = (),
) -> Path:
    """Run a federation in its folder, which is returned, and show it on a terminal.

    `run_dir` is the folder of a new run (None: a default one; `anew`: with the files of a run that never began), and
    `resume` that of a run to continue. `grid` is of somebody else's SuperLink, whose nodes are the clients.

    Raises:
        HyperbloomError: the run failed, or the disk is full.
    """
    if not resume:
        check_run(config, uses_data_section=bool(machines.local_clients) or machines.engine != "grpc")
    pick_device(machines.device)
    for spec in machines.track:
        find_tracker(spec)
    if not resume and machines.engine == "inline":  # missing data are told before there is a folder; others stay open
        source = data_source(first := client_settings(config, 0, Path()).data)
        source.client(first.partition)
        if first.split == "owner":
            for index in range(config.clients):
                one = client_settings(config, index, Path())
                print_line(console, f"{one.client_id} is {', '.join(source.owners(one.data.partition or 0))}")
    if not grid and machines.engine == "grpc":
        machines.prepare(partial(print_line, console))
    for flag, address in {"--web": machines.web, "--metrics-port": machines.metrics_port}.items():
        if address:
            check_port(*listening_at(flag, address), f"{flag} {address}")
    folder = resume or new_run_folder(run_dir, config.strategy, anew=anew)
    view, say = TerminalView(console), partial(print_line, console)
    say(f"run folder: {folder}")
    with tracked(folder, machines.track, say):
        try:
            recorder, session, results = play(folder, config, machines, resume is not None, view, say, more, grid)
        finally:
            view.close()
        examples = {client.client_id: client.about.train_examples for client in session.roster}
        novel = {client.client_id for client in session.roster if config.is_novel(client.row)}
        print_results(console, results, examples, novel)
        metric = next(iter(results.values())).metric
        if told := best_of([each.newcomers for each in results.values()], metric):
            say(says(told, metric))
        for line in recorder.privacy_report():
            say(line)
        _write_report(folder, say)
    say(f"everything is in {folder}")
    return folder


def _listeners(machines: Machines, folder: Path, stack: ExitStack, say: Say) -> Iterator[Listener]:
    """Yield the other listeners that the flags ask for; `stack` closes them."""
    if machines.web:
        from hyperbloom.common.pages.serving import serve_in_child

        say(stack.enter_context(serve_in_child(["hyperbloom.server", "watch", str(folder)], machines.web)))
    if machines.metrics_port:
        from hyperbloom.server.watch.metrics import RunMetrics, served

        metrics = RunMetrics()
        say(f"metrics: {stack.enter_context(served(metrics, machines.metrics_port))}")
        yield metrics


def _write_report(folder: Path, say: Say) -> None:
    """Write the report if this is quick. An error must not fail a complete run."""
    again = f"flower-server report {quote(str(folder))}"
    if sum(path.stat().st_size for path in folder.rglob("*.jsonl")) > LARGEST_FOR_REPORT:
        say(f"its report would take long; {again} writes it")
        return
    with log_to(folder / "server.log"):
        try:
            say(f"report: {write_report(folder)}")
        except Exception as error:
            logging.getLogger(__name__).exception("the report could not be written")
            say(f"the report could not be written ({error}); {again} tries again", "yellow")
