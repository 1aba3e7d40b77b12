"""The pictures of pages in `docs/images`, light and dark: the demo's run, its report and its live page, in Chromium.

    python -m figures.screens --out docs/images

It takes a minute, Chromium and chromedriver. `--run RUN` takes the pictures of another run.
"""

import argparse
import base64
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from hyperbloom.common.pages.serving import serve_in_child
from hyperbloom.server.pages.report import write_report

DEMO = "--config examples/demo.yaml --insecure --port 0 --local-clients 6"
"""The flags of `make demo`."""

PICTURES = {
    "demo": (900, 1.5, "h1", "main section"),
    "report": (1240, 1, "h1", "main > section:nth-of-type(2)"),
    "live": (1240, 1, ".kicker", "[data-part=map]"),
}
"""Width of the page in pixels, pixels of the picture for each, and the elements that begin and end the picture."""


def chromium() -> Any:
    """Return a browser without a window."""
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    return Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))


def take(browser: Any, address: str, name: str, scheme: str) -> bytes:
    """Return the picture of a page as PNG; `scheme` is light or dark."""
    width, factor, first, last = PICTURES[name]
    size = {"width": width, "height": 900, "deviceScaleFactor": factor, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(address)
    edges = "const box = name => document.querySelector(name).getBoundingClientRect();"
    top, bottom = browser.execute_script(f"{edges} return [box('{first}').top, box('{last}').bottom]")
    clip = {"x": 0, "y": top - 12, "width": width, "height": bottom - top + 24, "scale": 1}
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    picture, small = Image.open(io.BytesIO(base64.b64decode(taken["data"]))), io.BytesIO()
    picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


def take_all(run: Path, out: Path) -> list[Path]:
    """Write the pictures of a run, and return their paths."""
    report, written = write_report(run).resolve().as_uri(), []
    browser = chromium()
    try:
        with serve_in_child(["hyperbloom.server", "watch", str(run)], "0") as line:
            addresses = {"demo": report, "report": report, "live": line.split()[-1]}
            for name, address in addresses.items():
                for scheme, suffix in (("light", ""), ("dark", "-dark")):
                    path = out / f"{name}{suffix}.png"
                    path.write_bytes(take(browser, address, name, scheme))
                    written.append(path)
    finally:
        browser.quit()
    return written


def main() -> None:
    """Run the demo, unless a run is named, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--run", type=Path)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        run = flags.run or Path(place) / "run"
        if flags.run is None:
            subprocess.run([sys.executable, "-m", "hyperbloom.server", *DEMO.split(), "--run-dir", run], check=True)
        for path in take_all(run, flags.out):
            print(path)


if __name__ == "__main__":
    main()
