"""The guided fuzzer needs a package that is not part of the project."""

import sys

import pytest

from siege import fuzz_guided


def test_without_atheris_the_guided_fuzzer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "atheris", None)
    with pytest.raises(SystemExit, match="pip install atheris"):
        fuzz_guided.guided("graph", [])
