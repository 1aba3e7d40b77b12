"""`flower-server reproduce`."""

from pathlib import Path

import click

from hyperbloom.common.commands import Command, Flag, names
from hyperbloom.common.errors import ConfigError
from hyperbloom.server.flags import OUT, set_flag

_EPILOG = """\
\b
Example:
  flower-server reproduce pfedhn-table1 --column cifar10-50 --root /data \\
      --rounds 500 --methods pFedHN,Local

exit codes: 0 all that can be run is complete, 2 wrong settings or missing data, 4 a method could not be trained (the
others were), 130 Ctrl-C
"""
_FLAGS: list[click.Parameter] = [
    click.Argument(["table"], required=False, help="name of a table; see --list"),
    Flag("--list", "listed", is_flag=True, help="list tables and columns, and what can be run here"),
    Flag("--column", help="column of the table"),
    Flag("--methods", metavar="A,B", help="rows of the table", show_default="all that there are"),
    Flag("--seeds", type=click.IntRange(1), help="how many, from 0 on", show_default="the paper's, else 3"),
    Flag("--rounds", type=click.IntRange(1), help="at most so many rounds of each method", show_default="the paper's"),
    Flag("--root", metavar="DIR", help="folder with the data sets' files"),
    set_flag("set a key of every run, such as sizes=[S]"),
    *OUT,
]


@click.command("reproduce", cls=Command, params=[*_FLAGS], epilog=_EPILOG)
def command(
    table: str | None,
    listed: bool,
    column: str | None,
    methods: str | None,
    seeds: int | None,
    rounds: int | None,
    root: str | None,
    assignments: tuple[str, ...],
    out: Path | None,
    engine: str,
) -> int:
    """Run a table of a paper, and print our numbers beside it.

    --list shows the tables of the four papers, their columns, and what can be run; it also says where a column stands
    in for data that cannot be had. Call the command again to go on: what is finished is kept. Full runs take hours to
    days. --rounds, --seeds, --methods and --set make them smaller, and the table names what they change.
    """
    from hyperbloom.common.config import parse_assignment

    overrides = dict(parse_assignment(text) for text in assignments)
    if root:
        overrides["data.root"] = root
    if not listed and not table:
        raise ConfigError("expected a table such as pfedhn-table1, or --list")
    from hyperbloom.server import reproduction
    from hyperbloom.server.paper_tables import load_table, table_names

    if listed or not table:
        chosen = [table] if table else table_names()
        print(reproduction.describe({name: load_table(name) for name in chosen}, overrides))
        return 0
    paper = load_table(table)
    column = reproduction.choose_column(paper, column)
    rows = None if methods is None else names(methods)
    wanted = reproduction.Reproduction(table, paper, column, rows, seeds or paper.seeds or 3, rounds, overrides)
    return reproduction.reproduce(wanted, out or Path("runs") / f"reproduce-{table}-{column}", engine)
