"""The available choices: `flower-server --list` and `--explain`."""

import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hyperbloom.common.config import RunConfig, Section
from hyperbloom.common.data import DATASETS, PARTITIONERS
from hyperbloom.common.models import MODELS
from hyperbloom.common.program.plugins import plugin_lines
from hyperbloom.common.tasks import TASKS
from hyperbloom.server.watch.tracking import BUILT_IN as TRACKERS
from hyperbloom.strategies import STRATEGIES, find_strategy


def print_catalogue(console: Console, as_json: bool) -> None:
    """Print strategies, models, data sets, tasks and splits with a line each, and where plug-ins come from; or JSON."""
    found = {
        "strategies": {name: _first_line(kind.__doc__) for name, kind in STRATEGIES.items()}
        | plugin_lines("strategies", STRATEGIES),
        "models": {name: info.description for name, info in MODELS.items()} | plugin_lines("models", MODELS),
        "data sets": {name: info.description for name, info in DATASETS.items()} | plugin_lines("datasets", DATASETS),
        "tasks": {name: _first_line(kind.__doc__) for name, kind in TASKS.items()} | plugin_lines("tasks", TASKS),
        "trackers": {name: f"--track; pip install 'hyperbloom[{name}]' brings it" for name in TRACKERS}
        | plugin_lines("trackers", TRACKERS),
        "splits": {name: partitioner.description for name, partitioner in PARTITIONERS.items()},
    }
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for title, lines in found.items():
        table = Table("", "", box=None, show_header=False, title=title, title_justify="left", title_style="bold")
        for name, text in lines.items():
            table.add_row(escape(name), escape(text))
        console.print(table, "")
    console.print("Clients can also bring data and models of their own: see flower-client --help.")


def print_keys(console: Console, strategy: str) -> None:
    """Print every key of a run, default and meaning, with the options of `strategy`; ConfigError if there is none."""
    kind = find_strategy(strategy, "--explain")
    console.print(f"[bold]{strategy}[/]: {escape(_first_line(kind.__doc__))}\n")
    table = Table("key", "default", "meaning", box=None, pad_edge=False)
    _add_keys(table, RunConfig, "")
    _add_keys(table, kind.options_type, "options.")
    console.print(table)


def _add_keys(table: Table, section: type[Section], prefix: str) -> None:
    for name, field in section.model_fields.items():
        if isinstance(field.default, Section):
            _add_keys(table, type(field.default), f"{prefix}{name}.")
        elif name != "options":
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            shown = "" if default is None else escape(str(default))
            table.add_row(prefix + name, shown, escape(field.description or ""))


def _first_line(text: str | None) -> str:
    return ((text or "").strip().splitlines() or ["(no description)"])[0]
