"""Prometheus metrics of a run over HTTP: `flower-server --metrics-port`. See docs/watching.md.

The states of clients are read from the roster at each request. Everything else is counted as it happens.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from hyperbloom.common.errors import ConnectionFailed
from hyperbloom.common.program.plain import listening_at
from hyperbloom.common.reasons import Reason
from hyperbloom.server.loop.federation import Federation
from hyperbloom.server.loop.listener import Checkpoint, Listener, Refused, RoundReport
from hyperbloom.strategies.algorithm import Algorithm

BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
"""Seconds of a round: from fast virtual clients to cohorts that wait for a deadline."""


class RunMetrics(Listener):
    """Counts what happens in a run, in a `registry` without the metrics of the process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._strategy = ""
        self.rounds = self._counter("rounds", "rounds that are over", "strategy")
        self.round = self._gauge("round", "the last round that is over", "strategy")
        self.planned = self._gauge("rounds_planned", "rounds of the strategy in all", "strategy")
        self.seconds = Histogram(
            *("hyperbloom_round_seconds", "seconds that a round took, evaluation included", ["strategy"]),
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.clients = self._gauge("clients", "clients by state", "state")
        self.sent = self._counter("bytes", "bytes of training messages", "direction")
        self.left_out = self._counter("refusals", "times that a client was left out or not admitted", "reason")
        self.late = self._counter("late_replies", "replies that came after their deadline")
        what = "metrics of the last evaluation, over clients, shares in percent"
        self.metric = self._gauge("metric", what, "strategy", "metric", "split", "over")
        what = "when the last checkpoint was written, 0 before the first one"
        self.saved = self._gauge("checkpoint_timestamp_seconds", what)
        for direction in ("down", "up"):
            self.sent.labels(direction)
        for reason in [*Reason, "join"]:
            self.left_out.labels(reason)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"hyperbloom_{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"hyperbloom_{name}", what, labels, registry=self.registry)

    def gathering(self, federation: Federation) -> None:
        """Show the states of clients from now on."""
        for state in federation.count():
            self.clients.labels(state).set_function(partial(lambda name: float(federation.count()[name]), state))

    def phase(self, strategy: Algorithm, name: str) -> None:
        """Count for this strategy from now on."""
        self._strategy = name
        self.planned.labels(name).set(strategy.config.rounds)

    def event(self, text: str) -> None:
        """Count clients that are refused."""
        if isinstance(text, Refused):
            self.left_out.labels("join").inc()

    def round_done(self, report: RoundReport) -> None:
        """Count a round. In asynchronous mode, a report of an evaluation alone is not a round."""
        outcome, name = report.outcome, self._strategy
        if outcome.results or report.bytes_down or not outcome.evaluation:
            self.rounds.labels(name).inc()
            self.round.labels(name).set(report.number)
            self.seconds.labels(name).observe(report.seconds)
        self.sent.labels("down").inc(report.bytes_down)
        self.sent.labels("up").inc(report.bytes_up)
        self.late.inc(report.late)
        for refused in outcome.refused.values():
            self.left_out.labels(refused.reason).inc()
        names = outcome.evaluation.names if outcome.evaluation else ()
        metrics = outcome.evaluation.metrics() if outcome.evaluation else {}
        for metric, split, over in product(names, ("val", "test", "novel_test"), ("mean", "worst")):
            value = metrics.get(f"{split}_{over}" if metric == names[0] else f"{split}_{metric}_{over}")
            if value is not None:
                self.metric.labels(name, metric, split, over).set(value)

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Record the time of the checkpoint."""
        self.saved.set(time.time())


@contextmanager
def served(metrics: RunMetrics, address: str) -> Iterator[str]:
    """Serve metrics over HTTP at `[HOST:]PORT`, on loopback without a host; yield the URL.

    Raises:
        ConfigError: the address is invalid.
        ConnectionFailed: the server cannot listen there.
    """
    host, port = listening_at("--metrics-port", address)
    try:
        server, thread = start_http_server(port, host, metrics.registry)
    except OSError as error:
        raise ConnectionFailed(f"--metrics-port {address}: cannot listen there: {error.strerror or error}") from None
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
