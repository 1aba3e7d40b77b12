"""Entry point of `flower-client` and `python -m hyperbloom.client`."""

from typing import NoReturn

from hyperbloom.client.cli import main
from hyperbloom.common.program.signals import run_program


def program() -> NoReturn:
    """Run the command and end the process."""
    run_program(main)


if __name__ == "__main__":
    program()
