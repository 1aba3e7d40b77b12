"""A run in its folder: begin or resume it, run it over its engine's grid, write the table and the report."""

import errno
import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.serverapp import Grid
from rich.console import Console

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import DiskError, HyperbloomError
from hyperbloom.common.program.device import pick_device
from hyperbloom.server.grids.engine import open_grid
from hyperbloom.server.grids.fleet import Machines, Say, Tell, check_port, log_to, sayer
from hyperbloom.server.loop.listener import Listener, Resume, Selection
from hyperbloom.server.loop.session import Session, check_run
from hyperbloom.server.pages.report import write_report
from hyperbloom.server.runs.checkpoint import locked
from hyperbloom.server.runs.folder import RunFolder, adopt_identities, new_run_folder
from hyperbloom.server.watch.view import TerminalView, results_table, results_title

LARGEST_FOR_REPORT = 100_000_000
"""Most bytes of lines for which a run writes its report at its end; this many take five seconds."""

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


@dataclass(frozen=True)
class Run:
    """A run whose folder is ready; `resume` is the checkpoint to continue from, or None for a new run.

    `grid` is the grid of somebody else's SuperLink, or None to open one.
    """

    recorder: RunFolder
    run_id: str
    resume: Resume | None = None
    grid: Grid | None = None

    def carry_out(
        self, machines: Machines, listeners: Sequence[Listener], say: Say, tell: Tell
    ) -> tuple[Session, dict[str, Selection]]:
        """Run to the end, with the log in the folder. If a HyperbloomError stops the run, record it as an event."""
        folder, config = self.recorder.path, self.recorder.config
        given = nullcontext((self.grid, lambda: None)) if self.grid else None
        opening = given or open_grid(machines, config, folder, say, tell)
        with log_to(folder / "server.log"), opening as (grid, watch):
            session = Session(
                config, grid, self.run_id, [self.recorder, *listeners], watch, self.resume, machines.device
            )
            try:
                return session, session.run()
            except (HyperbloomError, KeyboardInterrupt) as error:
                self.recorder.event(f"the run stopped: {str(error) or 'Ctrl-C'}")
                raise


def begin(folder: Path, config: RunConfig, machines: Machines) -> Run:
    """Write a new run's first files into its folder."""
    run_id = f"{folder.name}-{secrets.token_hex(4)}"
    recorder = RunFolder(folder, config, run_id, machines.record())
    adopt_identities(config, folder)
    return Run(recorder, run_id)


def go_on(folder: Path, config: RunConfig, tell: Tell) -> Run:
    """Take a run back to its last checkpoint. Raise a ConfigError if none is usable."""
    recorder, resume = RunFolder.resume(folder, config, tell)
    return Run(recorder, resume.checkpoint.run_id, resume)


def _check(config: RunConfig, machines: Machines, begins: bool, listens: bool) -> None:
    if begins:
        check_run(config, uses_data_section=bool(machines.local_clients) or machines.engine != "grpc")
    pick_device(machines.device, mps=False)
    if machines.tensorboard:
        from hyperbloom.server.watch.tensorboard import check_tensorboard

        check_tensorboard()
    if listens and machines.engine == "grpc" and machines.port and not machines.superlink:
        check_port(machines.host, machines.port)


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
    """Run a federation in its folder, and show it on a terminal.

    `run_dir` is the folder of a new run (None: a default one; `anew`: with the files of a run that never began), and
    `resume` that of a run to continue. `grid` is of somebody else's SuperLink, whose nodes are the clients.

    Returns:
        the run folder.

    Raises:
        HyperbloomError: the run failed, or the disk is full.
    """
    _check(config, machines, begins=resume is None, listens=grid is None)
    folder = resume or new_run_folder(run_dir, config.strategy, anew=anew)
    view, say = TerminalView(console), sayer(console)
    say(f"run folder: {folder}")
    try:
        with ExitStack() as stack:
            stack.enter_context(locked(folder))
            if resume:
                run = go_on(folder, config, view.event)
                for listener in (run.recorder, view):
                    listener.event(f"going on after {_where(config, run.resume)}")
            else:
                machines = machines.with_port()
                run = begin(folder, config, machines)
            listeners = [view, *more, *_listeners(machines, folder, stack, say)]
            session, results = replace(run, grid=grid).carry_out(machines, listeners, say, view.event)
    except OSError as error:
        if error.errno not in _DISK:
            raise
        raise DiskError(
            f"cannot write to {folder}: {error.strerror}. Nothing is half-written; make room, and go on with "
            f"flower-server --resume {folder}"
        ) from None
    finally:
        view.close()
    say(results_title(results))
    examples = {client.client_id: client.about.train_examples for client in session.roster}
    novel = {client.client_id for client in session.roster if config.is_novel(client.row)}
    console.print(results_table(results, examples, novel))
    for line in run.recorder.privacy_report():
        say(line)
    _write_report(folder, say)
    say(f"everything is in {folder}")
    return folder


def _where(config: RunConfig, resume: Resume | None) -> str:
    assert resume is not None
    name = [config.strategy, *config.baselines][resume.checkpoint.phase]
    return f"round {max(0, resume.checkpoint.progress.round)} of {name}"


def _listeners(machines: Machines, folder: Path, stack: ExitStack, say: Say) -> Iterator[Listener]:
    """Yield the other listeners that the flags ask for; `stack` closes them."""
    if machines.web:
        from hyperbloom.server.live.site import served_beside

        say(stack.enter_context(served_beside(folder, machines.web)))
    if machines.metrics_port:
        from hyperbloom.server.watch.metrics import RunMetrics, served

        metrics = RunMetrics()
        say(f"metrics: {stack.enter_context(served(metrics, machines.metrics_port))}")
        yield metrics
    if machines.tensorboard:
        from hyperbloom.server.watch.tensorboard import TensorBoard

        board = TensorBoard(folder)
        stack.callback(board.close)
        yield board


def _write_report(folder: Path, say: Say) -> None:
    """Write the report if this is quick. An error must not fail a complete run."""
    if sum(path.stat().st_size for path in folder.rglob("*.jsonl")) > LARGEST_FOR_REPORT:
        say(f"its report would take long; flower-server report {folder} writes it")
        return
    with log_to(folder / "server.log"):
        try:
            say(f"report: {write_report(folder)}")
        except Exception as error:
            logging.getLogger(__name__).exception("the report could not be written")
            say(f"the report could not be written ({error}); flower-server report {folder} tries again", "yellow")
