"""What is caught, and what ends the program all the same."""

import pytest

from hyperbloom.common.program.attempt import attempt


def test_an_exception_is_returned_and_an_interrupt_is_raised() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert attempt(int, "7") == 7
    error = attempt(int, "seven")
    assert isinstance(error, ValueError) and "seven" in str(error)
    with pytest.raises(KeyboardInterrupt):
        attempt(interrupted)
