"""The live page of a large run: seconds until a browser shows everything.

    python -m benchmarks.live_page [--quick]

It needs Chromium and chromedriver. The named alternative is `flower-server watch`, which reads the same folder for a
terminal.
"""

import io
import json
import shutil
import tempfile
import time
from pathlib import Path

from rich.console import Console

from benchmarks.measure import Comparison, main, timed
from hyperbloom.common.config import RunConfig, dump_run_config
from hyperbloom.common.pages.serving import serve_in_child
from hyperbloom.server.watch.watching import watch


def write_run(folder: Path, clients: int, rounds: int, cohort: int, eval_every: int) -> int:
    """Write the lines of a run that stopped one round before its end; return their bytes."""
    config = RunConfig(strategy="pfedhn", rounds=rounds + 1, clients=clients, cohort=cohort, eval_every=eval_every)
    (folder / "config.yaml").write_text(dump_run_config(config))
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "clients.jsonl").open("w") as lines:
        for number in range(1, rounds + 1):
            line = {"round": number, "seconds": 1.0, "clients": cohort, "elapsed": float(number), "loss": 1 / number}
            accuracy = 90 - 80 / (1 + number / 100)
            scored = {"test_mean": accuracy, "test_worst": accuracy - 10} if number % eval_every == 0 else {}
            metrics.write(json.dumps(line | {"bytes_down": 10**6, "bytes_up": 10**6} | scored) + "\n")
            for each in range(cohort):
                name = f"client-{(number * cohort + each) % clients}"
                lines.write(json.dumps({"round": number, "client": name, "loss": 0.5, "seconds": 0.1}) + "\n")
            for each in range(clients if scored else 0):
                score = {"test_accuracy": int(accuracy) / 100, "test_total": 100, "val_accuracy": 0.5, "val_total": 2}
                lines.write(json.dumps({"round": number, "client": f"client-{each}", **score}) + "\n")
    return sum(path.stat().st_size for path in folder.glob("*.jsonl"))


def in_browser(address: str, last: str) -> float:
    """Return the seconds until the page shows the text `last` in a browser."""
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(flag)
    driver = Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))
    try:
        begin = time.monotonic()
        driver.get(address)
        while last not in driver.find_element("css selector", "[data-part=head]").text:
            time.sleep(0.05)
        return time.monotonic() - begin
    finally:
        driver.quit()


def run(quick: bool = False) -> list[Comparison]:
    """Write a run, open its page twice, and read it for a terminal."""
    clients, rounds, cohort, eval_every = (100, 50, 10, 10) if quick else (10_000, 5_000, 100, 250)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        folder.mkdir()
        size = write_run(folder, clients, rounds, cohort, eval_every)
        with serve_in_child(["hyperbloom.server", "watch", str(folder)], "0") as line:
            address, last = line.split()[-1], f"Round {rounds} of {rounds + 1}"
            visits = [in_browser(address, last) for _ in range(2)]
        seconds = timed(lambda: watch(folder, Console(file=io.StringIO())))
    conditions = (
        f"against flower-server watch, which reads the same for a terminal, without its start; {clients:,} clients, "
        f"{rounds:,} rounds, cohort {cohort}, {size / 1e6:.0f} MB of lines; headless Chromium"
    )
    return [
        Comparison(f"live page, all rounds read{visit}", "s", visits[number], seconds, conditions)
        for number, visit in enumerate(("", ", second visit"))
    ]


if __name__ == "__main__":
    main(run, __doc__)
