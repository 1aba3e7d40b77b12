"""Entry point of `flower-client` and `python -m hyperbloom.client`."""

from functools import partial

from hyperbloom.client.cli import main
from hyperbloom.common.program.signals import run_program

program = partial(run_program, main)

if __name__ == "__main__":
    program()
