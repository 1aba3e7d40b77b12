"""Several runs with clients that stay: a search and a comparison over clients on machines of their own."""

from pathlib import Path

import pytest

from hyperbloom.server.cli import main
from hyperbloom.server.runs.recorded import read_summary
from tests.processes.conftest import Process, Site
from tests.processes.test_flower_app import stock

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

RUN = ["--set", "clients=2", "--set", "cohort=2", "--set", "data.max_train=60", "--set", "local.steps=5"]
ANYWHERE = ["--set", "input_shape=[1,8,8]", "--set", "num_classes=10"]
SEARCH = [*RUN, "--rounds", "2", "--over", "local.learning_rate=0.0001,0.05"]


def staying(site: Site) -> list[Process]:
    """Start the two clients of a run, each to stay for the next one."""
    own = ("--data", "digits", "--max-train", "60", "--stay")
    return [site.client(f"client-{i}", *own, "--partition", f"{i}/2") for i in range(2)]


def series(site: Site, *flags: str) -> Process:
    """Start a command that makes several runs."""
    return site.start("hyperbloom.server", flags[0], *flags, "--engine", "elsewhere", "--insecure")


def table(folder: Path) -> str:
    """Return what a search has found."""
    return (folder / "tuned.md").read_text()


def test_a_search_over_clients_elsewhere_finds_what_it_finds_with_virtual_ones(site: Site, tmp_path: Path) -> None:
    clients, out = staying(site), tmp_path / "search"
    command = ["tune", *SEARCH, "--port", str(site.port), "--out", str(out)]
    first = series(site, *command)
    first.wait_for("2-0-seed0: ")
    first.wait_for("2-1-seed0: begins")
    first.interrupt()
    assert first.wait() == 130
    assert f"--server 127.0.0.1:{site.port} --insecure --stay --client-id NAME" in first.output
    second = series(site, *command)
    assert second.wait() == 0, second.output
    assert "2-0-seed0: finished before, kept" in second.output
    assert main(["tune", *SEARCH, "--out", str(tmp_path / "virtual")]) == 0
    assert table(out) == table(tmp_path / "virtual")
    assert [client.popen.poll() for client in clients] == [None, None], "they wait for the next run"
    assert all(client.output.count("the run is over; waiting for the next one") >= 2 for client in clients)


def test_a_search_on_a_superlink_that_is_there(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = ["--fleet-api-address", f"127.0.0.1:{site.port}"]
    with stock(tmp_path / "link", "--isolation", "process", *address) as (link, _):
        clients, out = staying(site), tmp_path / "search"
        at = ["--engine", "elsewhere", "--superlink", link.control, "--insecure"]
        assert main(["tune", *SEARCH, *at, "--out", str(out)]) == 0, capsys.readouterr().out
        assert [client.popen.poll() for client in clients] == [None, None]
    assert main(["tune", *SEARCH, "--out", str(tmp_path / "virtual")]) == 0
    assert table(out) == table(tmp_path / "virtual")


def test_a_search_whose_clients_never_come_stops_at_the_first_run(site: Site, tmp_path: Path) -> None:
    short = ["--set", "join_timeout_s=1"]
    search = series(site, "tune", *SEARCH, *short, "--port", str(site.port), "--out", str(tmp_path / "search"))
    assert search.wait() == 4
    assert "2-1-seed0" not in search.output and "Start the others" in search.output


def test_clients_that_leave_in_a_run_are_no_bad_setting(site: Site, tmp_path: Path) -> None:
    """The search would call the setting the worst one, and another one the best."""
    clients, out = staying(site), tmp_path / "search"
    long = [*RUN, "--set", "join_timeout_s=20", "--rounds", "400", "--over", "local.steps=5,6"]
    command = ["tune", *long, "--port", str(site.port), "--out", str(out)]
    search = series(site, *command)
    search.wait_for("400-0-seed0: begins")
    search.wait_for(": round ")
    for client in clients:
        client.interrupt()
    assert search.wait() == 4, search.output
    assert "400-1-seed0" not in search.output and not (out / "tuned.yaml").exists()


def test_a_comparison_over_clients_elsewhere(site: Site, tmp_path: Path) -> None:
    clients, out = staying(site), tmp_path / "compared"
    what = ["compare", "--strategies", "local,fedavg", "--seeds", "2", *RUN, "--set", "rounds=2"]
    compared = series(site, *what, "--port", str(site.port), "--out", str(out))
    assert compared.wait() == 0, compared.output
    assert main([*what, "--out", str(tmp_path / "virtual")]) == 0
    for name in ("local", "fedavg"):
        ours, virtual = (read_summary(folder / f"{name}-seed0")[name] for folder in (out, tmp_path / "virtual"))
        assert ours.metrics == virtual.metrics
        assert (out / f"{name}-seed1/cell.json").exists()
    assert [client.popen.poll() for client in clients] == [None, None]


def test_flags_for_clients_elsewhere_are_refused_where_clients_are_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *SEARCH, "--host", "0.0.0.0", "--out", str(tmp_path / "search")]) == 2
    assert "--host: expected with --engine elsewhere, found --engine inline" in capsys.readouterr().err


def test_the_first_client_from_anywhere_decides_nothing_in_a_series_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    anywhere = ["--engine", "elsewhere", "--insecure", "--insecure", "--host", "0.0.0.0"]
    assert main(["tune", *SEARCH, *anywhere, "--out", str(tmp_path / "search")]) == 2
    assert "--host 0.0.0.0: expected input_shape of the run" in capsys.readouterr().err
    assert not (tmp_path / "search").exists(), "so the same command with an input shape begins"


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--certs", "none"], 2, "no certificates in none"),
        (["--insecure", "--certs", "none"], 2, "--insecure: expected alone or not at all, found with --certs"),
        (["--insecure", "--port", "99999"], 2, "Invalid value for '--port': 99999 is not in the range 0<=x<=65535"),
        (
            ["--insecure", "--insecure", *ANYWHERE, "--host", "192.0.2.1"],
            5,
            "--host 192.0.2.1 --port 9092: cannot listen there",
        ),
        (["--insecure", "--superlink", "127.0.0.1:abc"], 2, "--superlink: expected HOST:PORT"),
    ],
)
def test_wrong_flags_of_a_series_are_told_before_it_has_a_folder(
    flags: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *SEARCH, "--engine", "elsewhere", *flags, "--out", str(tmp_path / "search")]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "search").exists()


def test_strategies_that_need_other_clients_are_not_compared_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A client without a network of its own would be refused for good by the second."""
    both = ["compare", "--strategies", "fedavg,ghn,local", *RUN, "--out", str(tmp_path / "out")]
    assert main([*both, "--engine", "elsewhere", "--insecure"]) == 2
    assert "some train every client's own model and some train none" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_clients_elsewhere_need_not_have_the_data_of_the_server(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A LeNet has no place for the server's own digits of 8 x 8 points."""
    lenet = ["tune", *SEARCH, "--set", "model=lenet", "--set", "join_timeout_s=1", "--out", str(tmp_path / "search")]
    assert main(lenet) == 2
    assert main([*lenet, "--engine", "elsewhere", "--insecure", "--port", str(site.port)]) == 4
    assert "Start the others" in capsys.readouterr().err


def test_the_first_start_of_a_series_makes_certificates_and_invites_clients(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYPERBLOOM_CERTS", raising=False)
    short = ["--engine", "elsewhere", "--port", str(site.port), "--set", "join_timeout_s=1"]
    assert main(["tune", *SEARCH, *short, "--out", "search"]) == 4
    assert (tmp_path / "certs/server.pem").is_file() and " --token HB1." in capsys.readouterr().out
