"""Metrics as Prometheus scrapes them, and the dashboard that shows them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from hyperbloom.common.errors import ConfigError, ConnectionFailed
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.exchanges import ReferenceOrder
from hyperbloom.common.wire.orders import TrainResult
from hyperbloom.server.loop.exchange import Evaluated, Outcome
from hyperbloom.server.loop.federation import Federation
from hyperbloom.server.loop.listener import NOTHING_DONE, Checkpoint, Refused, RoundReport
from hyperbloom.server.loop.post import Failure
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.watch.metrics import RunMetrics, served
from hyperbloom.strategies import make_algorithm

from ..conftest import ABOUT
from ..recorded import federation_of, score, some_config

DASHBOARD = Path(__file__).resolve().parents[3] / "deploy/grafana-dashboard.json"


def scrape(url: str) -> dict[str, float]:
    """Return what is exported by HTTP: values by name and labels, as they are written."""
    with urlopen(url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        sample.name + "".join(f" {key}={sample.labels[key]}" for key in sorted(sample.labels)): sample.value
        for family in families
        for sample in family.samples
    }


def some_federation(*names: str) -> Federation:
    """Return a federation of clients that have been admitted."""
    federation = federation_of(Roster())
    for node, name in enumerate(names, start=1):
        federation.roster.admit(node, replace(ABOUT, client_id=name, token=name))
    return federation


def busy_run() -> RunMetrics:
    """Return the metrics of a run with four clients in which something of everything has happened."""
    metrics, federation = RunMetrics(), some_federation(*"abcd")
    federation.roster.leave(4)
    federation.post.send([(2, ReferenceOrder("", Weights(Layout(()), torch.zeros(0))), None)])
    for _ in range(3):
        federation.roster.conduct.failed("c", 1, lie=True)
    federation.round = 2
    metrics.gathering(federation)
    metrics.phase(make_algorithm(some_config(baselines=())), "pfedhn")
    metrics.event(Refused("refused node 7: a client named 'a' is connected"))
    metrics.event("refused nobody")
    refused = {
        "c": Failure(Reason.CONTENT, "tensor fc1: 3 values are not finite"),
        "d": Failure(Reason.NO_REPLY, "no reply"),
        "b": Failure(Reason.MEMORY, "MemoryError: 3 GB"),
    }
    result = TrainResult(0.1, loss=1.0)
    metrics.round_done(RoundReport(1, Outcome({"a": result}, None, refused), 0.3, 0.3, 2, 800, 300))
    evaluation = Evaluated({"a": score(1, 2, 3, 4), "b": score(1, 2, 1, 4)})
    metrics.round_done(RoundReport(2, Outcome({"a": result}, evaluation), 3.0, 3.3, 0, 200, 100))
    return metrics


def test_everything_is_exported_over_http() -> None:
    metrics = busy_run()
    with served(metrics, "0") as url:
        found = scrape(url)
        metrics.checkpoint(Checkpoint("run", 0, NOTHING_DONE, {}, {}, 3, {}))
        saved = scrape(url)["hyperbloom_checkpoint_timestamp_seconds"]
    assert url.startswith("http://127.0.0.1:")
    expected = {
        "hyperbloom_rounds_total strategy=pfedhn": 2,
        "hyperbloom_round strategy=pfedhn": 2,
        "hyperbloom_rounds_planned strategy=pfedhn": 6,
        "hyperbloom_round_seconds_count strategy=pfedhn": 2,
        "hyperbloom_round_seconds_sum strategy=pfedhn": 3.3,
        "hyperbloom_round_seconds_bucket le=0.25 strategy=pfedhn": 0,
        "hyperbloom_round_seconds_bucket le=0.5 strategy=pfedhn": 1,
        "hyperbloom_round_seconds_bucket le=5.0 strategy=pfedhn": 2,
        "hyperbloom_clients state=live": 3,
        "hyperbloom_clients state=idle": 2,
        "hyperbloom_clients state=busy": 1,
        "hyperbloom_clients state=away": 1,
        "hyperbloom_clients state=quarantined": 1,
        "hyperbloom_bytes_total direction=down": 1000,
        "hyperbloom_bytes_total direction=up": 400,
        "hyperbloom_refusals_total reason=content": 1,
        "hyperbloom_refusals_total reason=timeout": 1,
        "hyperbloom_refusals_total reason=memory": 1,
        "hyperbloom_refusals_total reason=join": 1,
        "hyperbloom_refusals_total reason=busy": 0,
        "hyperbloom_late_replies_total": 2,
        "hyperbloom_metric metric=accuracy over=mean split=test strategy=pfedhn": 50,
        "hyperbloom_metric metric=accuracy over=worst split=test strategy=pfedhn": 25,
        "hyperbloom_metric metric=accuracy over=mean split=val strategy=pfedhn": 50,
        "hyperbloom_checkpoint_timestamp_seconds": 0,
    }
    assert {name: found.get(name) for name in expected} == pytest.approx(expected)
    assert saved > 1.7e9


def test_who_is_where_is_what_it_is_when_somebody_asks() -> None:
    metrics, federation = RunMetrics(), some_federation()
    metrics.gathering(federation)
    with served(metrics, "0") as url:
        assert scrape(url)["hyperbloom_clients state=live"] == 0
        federation.roster.admit(1, ABOUT)
        assert scrape(url)["hyperbloom_clients state=live"] == 1


def test_an_evaluation_apart_from_its_round_is_no_round() -> None:
    metrics = busy_run()
    scores = {"a": score(1, 2, 4, 4)}
    metrics.round_done(RoundReport(2, Outcome(evaluation=Evaluated(scores)), 9.0, 3.3))
    assert metrics.registry.get_sample_value("hyperbloom_rounds_total", {"strategy": "pfedhn"}) == 2
    metrics.round_done(RoundReport(3, Outcome(evaluation=Evaluated(scores)), 9.0, 3.3, 0, 200))  # nobody answered
    assert metrics.registry.get_sample_value("hyperbloom_rounds_total", {"strategy": "pfedhn"}) == 3


def test_all_reasons_are_exported_before_anything_happens() -> None:
    metrics = RunMetrics()
    for reason in (*Reason, "join"):
        assert metrics.registry.get_sample_value("hyperbloom_refusals_total", {"reason": str(reason)}) == 0


@pytest.mark.parametrize(("address", "wrong"), [("x", "'x'"), ("0.0.0.0:", "'0.0.0.0:'"), ("70000", "'70000'")])
def test_no_address_is_refused(address: str, wrong: str) -> None:
    with pytest.raises(ConfigError) as caught, served(RunMetrics(), address):
        pass
    assert str(caught.value) == f"--metrics-port: expected PORT or HOST:PORT, found {wrong}"


def test_a_port_that_is_taken_is_told() -> None:
    with served(RunMetrics(), "127.0.0.1:0") as url:
        port = url.split(":")[2].split("/")[0]
        with pytest.raises(ConnectionFailed, match=f"--metrics-port {port}: cannot listen"), served(RunMetrics(), port):
            pass
    with served(RunMetrics(), port):  # it is free again
        pass


def test_the_dashboard_asks_for_nothing_that_is_not_exported() -> None:
    with served(busy_run(), "0") as url:
        found = scrape(url)
    names = {sample.split(" ")[0] for sample in found}
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [variable["query"] for variable in dashboard["templating"]["list"]]
    used = {name for expression in asked for name in re.findall(r"hyperbloom_\w+", expression)}
    assert used <= names
    exported = {name for name in names if not name.endswith("_created")}
    assert exported - used == set(), "exported, and shown nowhere"
    for expression in asked:  # labels and their values are those that there are
        for name, labels in re.findall(r"(hyperbloom_\w+)\{([^}]*)\}", expression):
            for label, values in re.findall(r'(\w+)=~?"([\w|]+)"', labels):
                for value in values.split("|"):
                    of_name = [sample for sample in found if sample.startswith(f"{name} ")]
                    assert any(f" {label}={value}" in sample for sample in of_name) or value == "novel_test"
