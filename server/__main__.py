"""Entry point of `flower-server` and `python -m hyperbloom.server`."""

from typing import NoReturn

from hyperbloom.common.program.signals import run_program
from hyperbloom.server.cli import main


def program() -> NoReturn:
    """Run the command and end the process."""
    run_program(main)


if __name__ == "__main__":
    program()
