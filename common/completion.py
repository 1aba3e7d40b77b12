"""Shell completion of a program, its subcommands included, by shtab."""

import argparse
from pathlib import Path

import shtab

__all__ = ["SHELLS", "completion"]

SHELLS = ("bash", "zsh", "fish")


def completion(parser: argparse.ArgumentParser, shell: str, names: dict[str, list[str]]) -> str:
    """Return the script that makes `shell` complete what `parser` takes.

    Args:
        parser: of the program, with its subcommands as subparsers; changed for the purpose.
        shell: one of SHELLS.
        names: by flag, the values to propose, where the parser itself takes more than these.
    """
    _mark(parser, names)
    return shtab.complete(parser, shell)


def _mark(parser: argparse.ArgumentParser, names: dict[str, list[str]]) -> None:
    """Tell shtab which flags want files and folders, and which names."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                _mark(subparser, names)
        elif action.type is Path:
            folder = action.metavar in ("DIR", "RUN")
            action.complete = shtab.DIRECTORY if folder else shtab.FILE  # type: ignore[attr-defined]
        elif proposed := next((names[flag] for flag in action.option_strings if flag in names), None):
            action.choices = proposed
