"""Which cases of a family `make test` runs; `make check` runs them all."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], *few: Any) -> list[Any]:
    """Return the cases for `parametrize`; all but `few` are slow."""
    return [case if case in few else pytest.param(case, marks=pytest.mark.slow) for case in cases]
