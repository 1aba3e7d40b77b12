"""What tests of newcomers share."""

import pytest

from hyperbloom.common.files import export


@pytest.fixture
def without_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no ONNX file: it takes seconds, and has its own tests."""
    monkeypatch.setattr(export, "HAS_ONNX", False)
