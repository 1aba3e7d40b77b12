"""Pictures of the report and the live page, in a browser."""

import io
import shutil
from pathlib import Path

import pytest
from PIL import Image

from figures.screens import PICTURES, take_all
from tests.server.recorded import Recording

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("chromedriver") is None, reason="chromium and chromedriver are not installed"),
]


@pytest.mark.slow
def test_each_page_has_a_light_and_a_dark_picture(tmp_path: Path) -> None:
    taken = take_all(Recording(tmp_path / "run").whole(), tmp_path)
    assert [path.stem for path in taken] == [f"{name}{suffix}" for name in PICTURES for suffix in ("", "-dark")]
    brightness = {}
    for path in taken:
        image = Image.open(io.BytesIO(path.read_bytes())).convert("L")
        width, factor, _, _ = PICTURES[path.stem.removesuffix("-dark")]
        assert image.width == width * factor and image.height > 300
        brightness[path.stem] = sum(image.resize((1, 1)).get_flattened_data())
    assert all(brightness[name] > 200 and brightness[f"{name}-dark"] < 60 for name in PICTURES)
