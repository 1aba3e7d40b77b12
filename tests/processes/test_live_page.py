"""The live page in a real browser, beside a real run."""

import base64
import json
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hyperbloom.server.pages.report import write_report
from tests.processes.conftest import Site
from tests.server.recorded import Recording, some_config

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"),
]

QUIET = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"),
)

Until = Callable[[Callable[[], bool], str], None]


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*QUIET, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=ChromeService(str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


def shown(browser: Any, part: str) -> str:
    """Return a part's text as a reader sees it."""
    return str(browser.execute_script(f"return document.querySelector('[data-part={part}]').innerText"))


def sizes(browser: Any) -> list[int]:
    """Return how wide the page is, and how much of it is seen."""
    script = "const root = document.documentElement; return [root.scrollWidth, root.clientWidth]"
    found: list[int] = browser.execute_script(script)
    return found


def test_a_browser_sees_rounds_arrive_and_the_run_does_not_need_the_page(
    site: Site, tmp_path: Path, browser: Any, until: Until
) -> None:
    run = tmp_path / "run"
    args = ["--strategy", "pfedhn", "--rounds", "100000", "--eval-every", "2", "--clients", "2"]
    brief = ["--set", "local.steps=5", "--run-dir", str(run)]
    server = site.server(*args, *brief, "--web", "0", "--local-clients", "1")
    server.wait_for("live page: http://")
    browser.get(server.output.split("live page: ")[1].split()[0])
    until(lambda: "client-0 joined" in shown(browser, "events"), "the page tells of the first client")
    assert "Round 0 of 100000" in shown(browser, "head") and "Nothing has been evaluated yet" in shown(browser, "curve")

    client = site.client("north", "--partition", "1/2")
    until(lambda: "Round 0 of" not in shown(browser, "head"), "rounds arrive without a new request for the page")
    until(lambda: "north" in shown(browser, "clients"), "the table has the client that came later")
    until(lambda: bool(browser.find_elements("css selector", "[data-part=curve] svg path.line")), "the curve is drawn")
    assert "live" in browser.title and browser.get_log("browser") == []

    (child,) = subprocess.run(
        ["pgrep", "--parent", str(server.popen.pid), "--full", "watch .* --web"], capture_output=True, text=True
    ).stdout.split()
    subprocess.run(["kill", "-KILL", child], check=True)
    until(lambda: "does not answer" in browser.find_element("css selector", ".lost").text, "the page says it is lost")
    rounds = (run / "metrics.jsonl").read_text().count("\n")
    until(lambda: (run / "metrics.jsonl").read_text().count("\n") > rounds + 5, "rounds without the page")
    server.interrupt()  # a run of few rounds might be over before the browser has looked
    assert server.wait() == 130, server.output
    assert client.wait() == 0, client.output


def test_a_reader_keeps_place_and_focus_when_news_arrive(
    site: Site, tmp_path: Path, browser: Any, until: Until
) -> None:
    names = [f"client-{number}" for number in range(30)]
    recording = Recording(tmp_path, names=names, config=some_config(baselines=()))
    recording.begin("pfedhn")
    recording.go(2, **{names[0]: "its disk is full, so it could not write what it has learned in this round"})
    for name in names:
        recording.folder.event(f"{name} joined")
    server = site.start("hyperbloom.server", "watch", "watch", str(tmp_path), "--web", "0")
    server.wait_for("live page: ")
    browser.get(server.output.split()[-1])
    browser.execute_script("document.querySelector('[data-part=clients]').style.width = '200px'")  # less than the table
    place = "[...document.querySelectorAll('[data-part=clients] .scroll, .feed')]"
    browser.execute_script(f"{place}[0].scrollLeft = 40; {place}[1].scrollTop = 60; {place}[0].focus()")
    recording.folder.event("one more joined")
    recording.go(4)
    until(lambda: "one more joined" in shown(browser, "events"), "the event is on the page")
    until(lambda: "round 4" in shown(browser, "clients"), "the table is of the last round")
    script = f"return {place}.map(box => [box.scrollLeft, box.scrollTop, box === document.activeElement])"
    assert browser.execute_script(script) == [[40, 0, True], [0, 60, False]]


def test_a_report_on_paper_has_its_bars_though_browsers_print_no_backgrounds(tmp_path: Path, browser: Any) -> None:
    browser.get(write_report(Recording(tmp_path).whole()).as_uri())

    def filled(backgrounds: bool) -> int:
        """Return how many shapes of a PDF have the colour of the first strategy."""
        printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": backgrounds})["data"])
        count = 0
        for stream in re.findall(rb"stream\r?\n(.*?)endstream", printed, re.DOTALL):
            with suppress(zlib.error):  # not a compressed one
                colours = re.findall(rb"([\d.]+) ([\d.]+) ([\d.]+) rg", zlib.decompress(stream))
                count += sum([round(255 * float(part)) for part in colour] == [0x39, 0x49, 0xC4] for colour in colours)
        return count

    assert filled(backgrounds=False) == filled(backgrounds=True) > 3


def test_runs_stand_side_by_side_and_names_are_text(site: Site, tmp_path: Path, browser: Any, until: Until) -> None:
    names = ("<script>document.title='hacked'</script>", "<img src=x onerror=\"document.title='hacked'\">", "c")
    for name in ("one", "two"):
        Recording(tmp_path / "runs" / name, names=names).whole()
    server = site.start("hyperbloom.server", "watch", "watch", str(tmp_path / "runs"), "--web", "0")
    server.wait_for("live page: ")
    browser.get(server.output.split()[-1])
    browser.find_element("partial link text", "side by side").click()

    for width in (1280, 500):
        browser.set_window_size(width, 900)
        # The window has its new size some time after the command; one script sees one layout.
        until(lambda width=width: sizes(browser)[1] in range(width - 100, width + 1), f"a window {width} pixels wide")
        wide, seen = sizes(browser)
        assert wide <= seen, "nothing is wider than the screen"
    assert names[0] in shown(browser, "clients") and names[1] in shown(browser, "clients")
    assert browser.title == "two and one · live" or browser.title == "one and two · live"
    assert len(browser.find_elements("css selector", "[data-changes] svg path.line")) == 4
    assert browser.get_log("browser") == []


def test_a_site_sees_its_own_page_and_a_name_is_text(site: Site, tmp_path: Path, browser: Any, until: Until) -> None:
    args = ["--strategy", "pfedhn-pc", "--rounds", "6", "--clients", "1", "--eval-every", "2", "--set", "gains=true"]
    site.server(*args, "--baselines", "local", "--set", "local.steps=2", "--run-dir", str(tmp_path / "run"))
    client = site.client("north", "--partition", "0/2", "--max-changes", "500", "--stay", "--web", "0")
    client.wait_for("live page: http://")
    address = client.output.split("live page: ")[1].split()[0]

    def told() -> str:
        browser.get(address)
        return str(browser.execute_script("return document.body.innerText"))

    until(lambda: "north: " in told(), "the page has the sentence on what the run gained this site")
    text = told()
    assert "Last trained 20" in text and "\n6 of 500 changes made of training examples" in text
    assert "weights or their changes, mean training losses" in text and "kill " in text
    (child,) = subprocess.run(
        ["pgrep", "--parent", str(client.popen.pid), "--full", "watch .* --web"], capture_output=True, text=True
    ).stdout.split()
    subprocess.run(["kill", "-KILL", child], check=True)
    assert client.popen.poll() is None, "the client does not need its page"
    client.interrupt()
    assert client.wait() == 0, client.output

    ledger = site.folder / "state" / "north" / "sent.json"
    name = "<script>document.title='hacked'</script>"
    ledger.write_text(json.dumps(json.loads(ledger.read_text()) | {"client": name, "server": name}))
    page = site.start("hyperbloom.client", "watch", "watch", "--state-dir", str(ledger.parent))
    page.wait_for("live page: ")
    address = page.output.split()[-1]
    assert name in told() and "not running" in told() and "hacked" not in browser.title.replace(name, "")
    for width in (1280, 500):
        browser.set_window_size(width, 900)
        until(lambda width=width: sizes(browser)[1] in range(width - 100, width + 1), f"a window {width} pixels wide")
        wide, seen = sizes(browser)
        assert wide <= seen, "nothing is wider than the screen"
    assert browser.get_log("browser") == []
