"""The live page of a large run: seconds until a browser shows something, and until everything has been read.

    python -m benchmarks.live_page --clients 10000 --rounds 5000 --cohort 100

It needs Chromium and chromedriver. The named alternative is `flower-server watch`, which reads the same folder for a
terminal.
"""

import argparse
import io
import json
import shutil
import tempfile
import time
from pathlib import Path

from rich.console import Console

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


def in_browser(address: str, last: str) -> tuple[float, float]:
    """Return the seconds until the browser's first paint, and until the page shows the text `last`."""
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(flag)
    driver = Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))
    try:
        begin = time.monotonic()
        driver.get(address)
        paint = driver.execute_script("return performance.getEntriesByName('first-contentful-paint')[0].startTime")
        while last not in driver.find_element("css selector", "[data-part=head]").text:
            time.sleep(0.05)
        return paint / 1000, time.monotonic() - begin
    finally:
        driver.quit()


def main() -> None:
    """Write the run, open it twice, and print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("clients", 10_000), ("rounds", 5_000), ("cohort", 100), ("eval-every", 250)):
        parser.add_argument(f"--{name}", type=int, default=default)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        folder.mkdir()
        size = write_run(folder, flags.clients, flags.rounds, flags.cohort, flags.eval_every)
        print(f"{flags.clients} clients, {flags.rounds} rounds, {size / 1e6:.0f} MB of lines")
        with serve_in_child(["hyperbloom.server", "watch", str(folder)], "0") as line:
            for which in ("first visit", "second visit"):
                paint, whole = in_browser(line.split()[-1], f"Round {flags.rounds} of {flags.rounds + 1}")
                print(f"{which}: first paint {paint:.2f} s, all rounds read {whole:.2f} s")
        begin = time.monotonic()
        watch(folder, Console(file=io.StringIO()))
        seconds = time.monotonic() - begin
        print(f"flower-server watch, without starting: {seconds:.2f} s; first paint takes {paint / seconds:.3f} of it")


if __name__ == "__main__":
    main()
