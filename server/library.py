"""Runs from a program or a notebook: `hyperbloom.run({"strategy": "pfedhn", "rounds": 50}).metrics`."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from hyperbloom.common.config import RunConfig, check, load_run_config, make_run_config
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.gains import Gain
from hyperbloom.server.grids.fleet import Machines
from hyperbloom.server.runs.checkpoint import begun_as
from hyperbloom.server.runs.lines import CLIENTS, METRICS, phase_folder, read_gains, read_lines
from hyperbloom.server.runs.recorded import has_ended, read_config, read_json, read_summary
from hyperbloom.server.runs.running import run_federation

Table = list[dict[str, Any]]
"""Rows with named values: `pandas.DataFrame(table)` makes a data frame of it."""


@dataclass(frozen=True)
class Run:
    """A run in its folder, a path or its text, whoever made it; ConfigError if there is none."""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        read_config(self.folder)

    @property
    def config(self) -> RunConfig:
        """Return the run's configuration."""
        return read_config(self.folder)

    @property
    def metrics(self) -> Table:
        """Return a row per strategy and round: loss, seconds, bytes, and accuracies where there was an evaluation."""
        return self._rows(METRICS)

    @property
    def clients(self) -> Table:
        """Return a row per strategy, round and client: loss or scores (shares from 0 to 1), or why it was left out."""
        return self._rows(CLIENTS)

    @property
    def accuracy(self) -> Table:
        """Return a row per strategy and client: its test score (shares in percent) at the selected round."""
        return [
            {"strategy": name, "round": chosen.round, "client": client, "test_accuracy": accuracy}
            for name, chosen in read_summary(self.folder).items()
            for client, accuracy in chosen.test_accuracy.items()
        ]

    @property
    def report(self) -> "Report":
        """Write the report of what there is so far, and return it; ConfigError if no round is over."""
        from hyperbloom.server.pages.report import write_report

        return Report(write_report(self.folder))

    def client(self, name: str) -> "Client":
        """Return a client of the run; ConfigError if there is none of this name."""
        roster = read_json(self.folder / "roster.json", {"clients": []})["clients"]
        about = {entry["client_id"]: entry["about"] for entry in roster}
        if name not in about:
            raise ConfigError(f"client: expected one of {', '.join(about)}, found {name!r}")
        return Client(self, name, about[name])

    def _rows(self, file: str) -> Table:
        config = self.config
        return [
            {"strategy": name, **line}
            for name in (config.strategy, *config.baselines)
            for line in read_lines(phase_folder(self.folder, config, name) / file)
        ]


@dataclass(frozen=True)
class Client:
    """A client of a run; `about` is what it told when it joined: sizes, shapes, classes."""

    run: Run
    name: str
    about: Mapping[str, Any]

    @property
    def rounds(self) -> Table:
        """Return the client's rows of `run.clients`."""
        return [row for row in self.run.clients if row["client"] == self.name]

    @property
    def accuracy(self) -> dict[str, float]:
        """Return its test score by strategy, shares in percent, at the round that validation selected."""
        return {row["strategy"]: row["test_accuracy"] for row in self.run.accuracy if row["client"] == self.name}

    @property
    def gain(self) -> tuple[str, Gain] | None:
        """Return what the federation gains it, in a sentence and in numbers; None if it has not told (`gains`)."""
        return read_gains(self.run.folder).get(self.name)

    def export(self, out: str | Path, own_code: bool = False) -> Path:
        """Write its personal model into a new folder, and return it; `own_code`: import what the run's folder names.

        Raises:
            ConfigError: the server does not have the model, or the folder cannot be written.
        """
        from hyperbloom.server.runs.export import Export

        models = Export(self.run.folder, own_code)
        ((folder, _),) = models.write(models.clients(self.name), {self.name: Path(out)})
        return folder


@dataclass(frozen=True)
class Report:
    """The report of a run: a page for a browser, which a notebook shows."""

    path: Path

    def _repr_html_(self) -> str:
        page = escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" sandbox="allow-scripts" width="100%" height="700" title="report"></iframe>'


def run(
    config: RunConfig | Mapping[str, Any] | str | Path,
    engine: Literal["inline", "grpc"] = "inline",
    run_dir: str | Path | None = None,
) -> Run:
    """Run a federation on this machine, and return it when it is over.

    Args:
        config: the run: keys and values (`{"strategy": "pfedhn", "local.steps": 20}`), or the path of a YAML file.
        engine: clients in this process, or as processes over gRPC.
        run_dir: folder for all output. If the run has begun there, it goes on. Default: `runs/DATE-STRATEGY`.

    Raises:
        HyperbloomError: the run is described wrongly, or failed.
    """
    if isinstance(config, str | Path):
        config = load_run_config(Path(config), {})
    else:
        values = config.model_dump(exclude_unset=True) if isinstance(config, RunConfig) else config
        config = make_run_config({}, values, "run()")
    processes = {"insecure": 1, "port": 0, "local_clients": config.clients} if engine == "grpc" else {}
    machines = check(Machines, {"engine": engine, **processes}, "run()")
    folder = Path(run_dir) if run_dir else None
    resume = folder if folder and begun_as(config, folder, "run_dir") else None
    if resume and has_ended(resume):
        return Run(resume)
    return Run(run_federation(config, machines, Console(), folder, True, resume))
