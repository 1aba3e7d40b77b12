"""Base of both programs: click commands with flags in sections, one-line errors, and exit codes."""

import os
import select
import sys
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import click
from click.exceptions import Exit

from hyperbloom import __version__
from hyperbloom.common.errors import FULL, DiskError, HyperbloomError
from hyperbloom.common.program.signals import terminate_as_interrupt

FILE = click.Path(readable=False, path_type=Path)
FOLDER = click.Path(file_okay=False, readable=False, path_type=Path)
FILE.name, FOLDER.name = "file", "dir"  # as `--help` shows them


class Flag(click.Option):
    """An option of a command, shown in a section of `--help`."""

    section = "Options"

    def __init__(self, flags: str, text: str, **details: Any) -> None:
        super().__init__(flags.split(), help=text, **details)


JSON = Flag("--json as_json", "print JSON for programs instead", is_flag=True)


def section(title: str, *flags: Flag) -> list[Flag]:
    """Return copies of the flags that `--help` shows in the section `title`."""
    copies = [copy(flag) for flag in flags]
    for each in copies:
        each.section = title
    return copies


class _Told(click.Command):
    """A command that shows its flags by section, and prints an error that a person can mend as one line."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags, section by section."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)):
                rows.setdefault(getattr(parameter, "section", Flag.section), []).append(record)
        for title, some in rows.items():
            with formatter.section(title):
                formatter.write_dl(some)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn a HyperbloomError, and a file that cannot be used, into one line and an exit code."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except (HyperbloomError, OSError) as error:
            full = getattr(error, "errno", None) in FULL
            if not full and not isinstance(error, HyperbloomError) and getattr(error, "filename", None) is None:
                raise
            # A text may come from another machine or an unknown file, and control characters would reach the terminal.
            said = f"{error}; make room, or write elsewhere, and give the command again" if full else str(error)
            text = "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in said)
            print(f"{ctx.command_path}: {text}", file=sys.stderr)
            raise Exit(DiskError.exit_code if full else getattr(error, "exit_code", 2)) from None


class _Command(_Told):
    """A subcommand."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; Ctrl-C and SIGTERM end it with exit code 130."""
        os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")
        try:
            with terminate_as_interrupt():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            print(f"{ctx.command_path}: stopped", file=sys.stderr)
            raise Exit(130) from None


class _Group(click.Group, _Told):
    """A command with subcommands."""


def command(name: str, *params: click.Parameter, example: str = "", epilog: str = "") -> Callable[..., click.Command]:
    """Return a decorator that makes a function of the values of `params` a subcommand; its docstring is the help.

    Such a function should import heavy modules in its body, because every start of a program imports all commands.
    """
    shown = f"\b\nExample:\n  {example}\n\n{epilog}" if example else epilog
    return click.command(name, cls=_Command, params=[*params], epilog=shown)


def group(name: str, text: str, *commands: click.Command, example: str) -> click.Group:
    """Return a command that has only subcommands."""
    return _Group(name, help=text, commands=commands, epilog=f"\b\nExample:\n  {example}")


class Program(_Group):
    """A program with subcommands. Without a subcommand it calls `run` with the context and the values of `flags`.

    `--help` begins with the docstring of `run` and ends with the text in `end`, whose first paragraph is not wrapped.
    """

    def __init__(
        self, name: str, commands: Sequence[click.Command], run: Callable[..., Any], flags: Sequence[Flag], end: Path
    ) -> None:

        @click.pass_context
        def alone(ctx: click.Context, /, **values: Any) -> Any:
            if ctx.invoked_subcommand is None:
                return run(ctx, values)
            if early := given(ctx):
                flag, word = min(early).replace("_", "-"), ctx.invoked_subcommand
                ctx.fail(f"--{flag}: expected no command behind the flags of a run, found {word!r}.")

        settings = {"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100}
        details: dict[str, Any] = {"callback": alone, "params": [*flags], "help": run.__doc__}
        details["epilog"] = "\b\n" + end.read_text(encoding="utf-8")
        super().__init__(name, commands, invoke_without_command=True, context_settings=settings, **details)
        click.version_option(__version__, message="hyperbloom %(version)s")(self)


def given(ctx: click.Context) -> set[str]:
    """Return the names of the parameters that the command line sets."""
    return {name for name in ctx.params if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}


def names(text: str | None) -> list[str]:
    """Return the names in a list such as `A,B,C`; an empty list for None."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def execute(program: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Run a program with `arguments`, by default those of the process, and return its exit code.

    The exit code is 2 for wrong usage, and for what an untested version of a library lacks. It is the error's own
    for a HyperbloomError, 130 for Ctrl-C or SIGTERM, and 141 if the reader of the output has gone (`... | head`).
    """
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    name = str(program.name)
    asked = f"_{name.upper().replace('-', '_')}_COMPLETE"  # by the shell, as click's own `main` reads it
    if asked in os.environ:
        from click.shell_completion import shell_complete

        return shell_complete(program, {}, name, asked, os.environ[asked])
    try:
        with program.make_context(name, list(sys.argv[1:] if arguments is None else arguments)) as ctx:
            return int(program.invoke(ctx) or 0)
    except Exit as end:
        return end.exit_code
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return 141  # rich ends the program where the reader has gone
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else name
        message, whole = " ".join(error.format_message().split()).rstrip("."), error.format_message()
        helps = whole.startswith("Usage:")  # a group without a command
        print(whole if helps else f"{path}: {message}; see {path} --help", file=sys.stderr)
        return error.exit_code
    except (ImportError, AttributeError) as error:
        from hyperbloom.common.program.doctor import check_packages

        if (packages := check_packages()).state == "ok":
            raise
        print(f"{name}: {error}: {packages.found}; {packages.do}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0)):
            raise  # another pipe, such as one to a child process
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the rest at exit
        return 141
