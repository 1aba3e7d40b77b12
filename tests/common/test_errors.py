"""The tree of errors is the one that is drawn, and its exit codes are those that the commands promise."""

import re

import pytest

from hyperbloom.client.cli import flower_client
from hyperbloom.common import errors
from hyperbloom.common.errors import HyperbloomError, attempt
from hyperbloom.server.cli import flower_server

EXIT_CODES = {
    "HyperbloomError": 1,
    "ConfigError": 2,
    "DataError": 2,
    "ModelError": 2,
    "WireError": 1,
    "RefusedError": 3,
    "CohortError": 4,
    "ConnectionFailed": 5,
    "DiskError": 6,
}
ERRORS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, HyperbloomError)
}


def test_every_error_has_the_exit_code_that_scripts_rely_on() -> None:
    assert {name: kind.exit_code for name, kind in ERRORS.items()} == EXIT_CODES


def test_a_wrong_configuration_is_a_value_error() -> None:
    assert issubclass(errors.ConfigError, ValueError)


def test_the_drawing_names_every_error_and_its_exit_code() -> None:
    drawn = re.findall(r"\|-- (\w+)(?:.*\(exit code (\d)\))?", errors.__doc__ or "")
    assert {name for name, _ in drawn} == set(ERRORS) - {"HyperbloomError"}
    assert {name: int(code) for name, code in drawn if code} == {k: v for k, v in EXIT_CODES.items() if v > 1}


def test_the_commands_promise_these_exit_codes() -> None:
    for command, codes in ((flower_server, {0, 1, 2, 4, 5, 6, 130}), (flower_client, {0, 1, 2, 3, 5, 6})):
        _, _, lines = str(command.epilog).partition("exit codes: ")
        assert {int(code) for code in re.findall(r"\d+", lines)} == codes


def test_an_exception_is_returned_and_an_interrupt_is_raised() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert attempt(int, "7") == 7
    error = attempt(int, "seven")
    assert isinstance(error, ValueError) and "seven" in str(error)
    with pytest.raises(KeyboardInterrupt):
        attempt(interrupted)
