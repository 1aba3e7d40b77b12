"""What there is to choose from: `flower-server --list` and `--explain`."""

from rich.console import Console
from rich.table import Table

from hyperbloom.common.config import RunConfig, Section
from hyperbloom.common.data import DATASETS, PARTITIONERS
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.models import MODELS
from hyperbloom.strategies import STRATEGIES

__all__ = ["print_catalogue", "print_keys"]


def print_catalogue(console: Console) -> None:
    """Print strategies, models, data sets and splits with a line on each."""
    _print(console, "strategies", {name: _first_line(kind.__doc__) for name, kind in STRATEGIES.items()})
    _print(console, "models", {name: info.description for name, info in MODELS.items()})
    _print(console, "data sets", {name: info.description for name, info in DATASETS.items()})
    _print(console, "splits", {name: partitioner.description for name, partitioner in PARTITIONERS.items()})
    console.print("Clients can also bring data of their own: see --data in flower-client --help.")


def print_keys(console: Console, strategy: str) -> None:
    """Print every key of a run, the options of `strategy` included, with default and meaning.

    Raises:
        ConfigError: there is no such strategy.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"--explain: expected one of {', '.join(STRATEGIES)}, found {strategy!r}")
    kind = STRATEGIES[strategy]
    console.print(f"[bold]{strategy}[/]: {_first_line(kind.__doc__)}\n")
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
            table.add_row(prefix + name, "" if default is None else str(default), field.description or "")


def _print(console: Console, title: str, lines: dict[str, str]) -> None:
    table = Table("", "", box=None, show_header=False, title=title, title_justify="left", title_style="bold")
    for name, text in lines.items():
        table.add_row(name, text)
    console.print(table, "")


def _first_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[0]
