"""What a command line means, found out without running it."""

from collections.abc import Iterator, Sequence

import click


def parse(program: click.Command, words: Sequence[str]) -> click.Context:
    """Return what `program WORDS` would run with; a click.UsageError says what is wrong with it."""
    left = list(words)
    while isinstance(program, click.Group) and left and not left[0].startswith("-"):
        name = left.pop(0)
        found = program.get_command(click.Context(program), name)
        if found is None:
            raise click.UsageError(f"{program.name} has no {name}")
        program = found
    return program.make_context(program.name, left)


def flags(program: click.Command) -> set[str]:
    """Return a command's flags."""
    return {flag for parameter in program.params for flag in (*parameter.opts, *parameter.secondary_opts)}


def commands(program: click.Command) -> Iterator[click.Command]:
    """Yield a command and all below it."""
    yield program
    if isinstance(program, click.Group):
        ctx = click.Context(program)
        for name in program.list_commands(ctx):
            command = program.get_command(ctx, name)
            assert command is not None
            yield from commands(command)
