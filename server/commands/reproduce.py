"""Run a table of one of the four papers here, and print our numbers beside the paper's.

--list shows the tables, their columns, and what can be run; a column that stands in for data that cannot be had says
so. Called again, what is finished is kept. Full runs take hours to days: --rounds, --seeds, --methods and --set make
them smaller, and what they change is named below the numbers.

exit codes: 0 all that can be run is complete, 2 wrong settings or missing data, 4 a method could not be trained (the
others were), 130 Ctrl-C
"""

import argparse
from pathlib import Path

from hyperbloom.common.config import parse_assignment
from hyperbloom.common.errors import ConfigError
from hyperbloom.server.commands.compare import add_common_arguments

EXAMPLE = "reproduce pfedhn-table1 --column cifar10-50 --root /data --rounds 500 --methods pFedHN,Local"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("table", nargs="?", help="name of a table; see --list")
    parser.add_argument("--list", action="store_true", help="list tables and columns, and what can be run here")
    parser.add_argument("--column", help="column of the table")
    parser.add_argument("--methods", metavar="A,B", help="rows of the table (default: all that there are)")
    parser.add_argument("--seeds", type=int, help="how many, from 0 on (default: the paper's, else 3)")
    parser.add_argument("--rounds", type=int, help="at most so many rounds of each method (default: the paper's)")
    parser.add_argument("--root", help="folder with the data sets' files")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="set a key of every run, such as sizes=[S]"
    )
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """List what there is, or run a column."""
    overrides = dict(parse_assignment(text) for text in args.set)
    if args.root:
        overrides["data.root"] = args.root
    for flag, value in (("--rounds", args.rounds), ("--seeds", args.seeds)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag}: expected 1 or more, found {value}")
    if not args.list and not args.table:
        raise ConfigError("expected a table such as pfedhn-table1, or --list")
    from hyperbloom.server import reproduction
    from hyperbloom.server.paper_tables import load_table, table_names

    if args.list:
        names = [args.table] if args.table else table_names()
        print(reproduction.describe({name: load_table(name) for name in names}, overrides))
        return 0
    table = load_table(args.table)
    column = reproduction.choose_column(table, args.column)
    out = args.out or Path("runs") / f"reproduce-{args.table}-{column}"
    methods = None if args.methods is None else [name.strip() for name in args.methods.split(",") if name.strip()]
    wanted = reproduction.Reproduction(
        args.table, table, column, methods, args.seeds or table.seeds or 3, args.rounds, overrides
    )
    return reproduction.reproduce(wanted, out, args.engine)
