"""What both programs are made of: click commands with flags in sections, errors in one line, and exit codes.

A `Program` has flags of its own, and a subcommand for each module of its package `commands`. Such a module holds
`command` and imports nothing heavy at its top: `--help` and the shell's completion import all of them.
"""

import importlib
import os
import pkgutil
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.exceptions import Exit

from hyperbloom.common.errors import HyperbloomError
from hyperbloom.common.signals import terminate_as_interrupt

__all__ = ["FILE", "FOLDER", "Command", "Commands", "Flag", "Program", "given", "names", "run_program", "section"]

FILE = click.Path(readable=False, path_type=Path)
FOLDER = click.Path(file_okay=False, readable=False, path_type=Path)


class Flag(click.Option):
    """An option that stands in a section of `--help`."""

    section = "Options"

    def __init__(self, *names: str, **details: Any) -> None:
        """Take what `click.Option` takes, the names one by one."""
        super().__init__(names, **details)


def section(title: str, *flags: Flag) -> list[click.Parameter]:
    """Put flags into a section of `--help`."""
    for flag in flags:
        flag.section = title
    return [*flags]


class _Told(click.Command):
    """Shows flags by section, and tells a HyperbloomError in one line."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags, section by section."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                title = "Arguments" if isinstance(parameter, click.Argument) else Flag.section
                rows.setdefault(getattr(parameter, "section", title), []).append(record)
        for title, some in rows.items():
            with formatter.section(title):
                formatter.write_dl(some)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error that the user can mend becomes a line and an exit code."""
        try:
            return super().invoke(ctx)
        except HyperbloomError as error:
            print(f"{ctx.command_path}: {error}", file=sys.stderr)
            raise Exit(error.exit_code) from None


class Command(_Told):
    """A subcommand. Ctrl-C and SIGTERM end it with code 130."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")
        try:
            with terminate_as_interrupt():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            print(f"{ctx.command_path}: stopped", file=sys.stderr)
            raise Exit(130) from None


class Commands(_Told, click.Group):
    """A command that has subcommands of its own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags, then the commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


class Program(Commands):
    """A program; without a subcommand its own callback runs.

    Args:
        name: of the program.
        package: dotted name of the package whose modules hold the subcommands.
        details: what `click.Group` takes.
    """

    def __init__(self, name: str, package: str, **details: Any) -> None:
        """Import no subcommand yet."""
        settings = {"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100}
        super().__init__(name, invoke_without_command=True, context_settings=settings, **details)
        self.package = package
        self.add_command(_completion)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the package's modules, and `completion`."""
        modules = pkgutil.iter_modules(importlib.import_module(self.package).__path__)
        return sorted([*self.commands, *(module.name for module in modules)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a subcommand; the others are not imported."""
        if cmd_name in self.commands or cmd_name not in self.list_commands(ctx):
            return super().get_command(ctx, cmd_name)
        command: click.Command = importlib.import_module(f"{self.package}.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand; flags of a run before it would have no effect, so they are refused."""
        if not ctx.resilient_parsing and (early := sorted(given(ctx))):
            flag = early[0].replace("_", "-")
            ctx.fail(f"--{flag}: expected no command behind the flags of a run, found {args[0]!r}.")
        return super().resolve_command(ctx, args)


def given(ctx: click.Context) -> set[str]:
    """Return the names of the parameters that the command line itself names, whatever their values."""
    return {name for name in ctx.params if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}


def names(text: str | None) -> list[str]:
    """Return the names in `A,B,C`; none for nothing."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def run_program(program: Program, arguments: Sequence[str] | None = None) -> int:
    """Run a program on the process's own arguments, or on those given, and return its exit code.

    Exit code 2 for wrong usage, that of the error for a HyperbloomError, 130 for Ctrl-C or SIGTERM, 141 if nobody reads
    the output any more (`... | head`).
    """
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    name = str(program.name)
    if wanted := os.environ.get(_variable(name)):
        from click.shell_completion import shell_complete

        return shell_complete(program, {}, name, _variable(name), wanted)
    try:
        with program.make_context(name, list(sys.argv[1:] if arguments is None else arguments)) as ctx:
            code = program.invoke(ctx) or 0
            sys.stdout.flush()
            return int(code)
    except Exit as end:
        return end.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else name
        message = " ".join(error.format_message().split()).rstrip(".")
        print(f"{path}: {message}; see {path} --help", file=sys.stderr)
        return error.exit_code
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


def _variable(name: str) -> str:
    """Return the variable by which the shell asks a program for completions."""
    return f"_{name.upper().replace('-', '_')}_COMPLETE"


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def _completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands in a shell.

    \b
    bash, in ~/.bashrc:              eval "$(flower-server completion bash)"
    zsh, in ~/.zshrc after compinit: eval "$(flower-server completion zsh)"
    fish, in its config.fish:        flower-server completion fish | source

    And the same with flower-client. The shell then asks the program itself, which answers in about 0.1 s.
    """  # noqa: D301 - \b is click's mark for lines to leave as they are
    from click.shell_completion import get_completion_class

    root = ctx.find_root()
    name = str(root.info_name)
    script = get_completion_class(shell)
    assert script is not None
    print(script(root.command, {}, name, _variable(name)).source())
