"""Subcommands: `PROGRAM NAME ...` runs the module NAME of the program's package `commands`; to add one, add a module.

Such a module has a docstring (`--help` lists its first line), EXAMPLE (what follows the program's name in an example),
`add_arguments(parser)` and `run(args)`, which returns an exit code, or None for 0. It imports nothing heavy at its top:
every start of the program reads all of them for the list in `--help`.
"""

import argparse
import importlib
import os
import pkgutil
import select
import sys
from collections.abc import Sequence
from types import ModuleType

from hyperbloom.common.errors import HyperbloomError
from hyperbloom.common.signals import terminate_as_interrupt

__all__ = ["add_commands", "list_commands", "run_command"]


def run_command(program: str, package: str, arguments: Sequence[str]) -> int | None:
    """Run the subcommand that the first argument names and return its exit code; None where there are flags only.

    `package` is the dotted name of the package whose modules are the commands. Exit code 2 for an unknown name, that of
    the error for a HyperbloomError, 130 for Ctrl-C or SIGTERM, 141 if nobody reads the output any more (`... | head`).
    """
    if not arguments or arguments[0].startswith("-"):
        return None
    commands = _commands(package)
    command = commands.get(arguments[0])
    if command is None:
        print(f"{program}: expected a flag or one of {', '.join(commands)}; found {arguments[0]!r}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(
        prog=f"{program} {arguments[0]}",
        description=command.__doc__,
        epilog=f"example:\n  {program} {command.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    args = parser.parse_args(arguments[1:])
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")
    try:
        with terminate_as_interrupt():
            code = command.run(args) or 0
            sys.stdout.flush()
            return code
    except HyperbloomError as error:
        print(f"{program} {arguments[0]}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{program} {arguments[0]}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _nobody_reads():  # another pipe, say to a process that was started
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would be flushed at the exit
        return 141


def _nobody_reads() -> bool:
    """Return whether the reader of the output is gone."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0))


def list_commands(program: str, package: str) -> str:
    """Return the commands of a package for `--help`: what each does and an example."""
    lines = [f"commands ({program} NAME --help says more):"]
    for name, command in _commands(package).items():
        lines += [f"  {name}: {(command.__doc__ or '').splitlines()[0]}", f"    {program} {command.EXAMPLE}"]
    return "\n".join(lines) + "\n"


def add_commands(parser: argparse.ArgumentParser, package: str) -> None:
    """Add the commands of a package as subparsers, for tools that read a parser; programs use `run_command`."""
    subparsers = parser.add_subparsers(metavar="COMMAND")
    for name, command in _commands(package).items():
        summary = (command.__doc__ or "").splitlines()[0].replace("%", "%%")
        command.add_arguments(subparsers.add_parser(name, help=summary))


def _commands(package: str) -> dict[str, ModuleType]:
    """Return the commands of a package by name, sorted."""
    modules = pkgutil.iter_modules(importlib.import_module(package).__path__)
    names = sorted(module.name for module in modules)
    return {name.replace("_", "-"): importlib.import_module(f"{package}.{name}") for name in names}
