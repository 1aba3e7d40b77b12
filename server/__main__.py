"""Entry point of `flower-server` and `python -m hyperbloom.server`."""

from functools import partial

from hyperbloom.common.program.signals import run_program
from hyperbloom.server.cli import main

program = partial(run_program, main)

if __name__ == "__main__":
    program()
