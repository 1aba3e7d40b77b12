"""One client ten times slower than the rest: `pfedhn` by rounds against `pfedhn` asynchronously, over gRPC.

A real server and ten real clients on scikit-learn's digits (two to four classes each, the paper's split). A client's
training takes a fifth of a second, the slow one's two seconds: they sleep for what is left of it, so that clients do
not compete for this machine's cores. Both sides train as many client steps, five clients at a time. The ratio is that
of the seconds until the mean test accuracy first is what the run by rounds has at the end, less two points.

    python -m benchmarks.asynchrony [--quick] [--figure docs/asynchronous.png]
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flwr.app import Context, Message

from benchmarks.measure import Comparison, arguments, show
from hyperbloom.common.config import DataConfig, LocalConfig, RunConfig, dump_run_config
from hyperbloom.server.broker.superlink import free_port
from hyperbloom.server.grids.local_clients import client_settings

CLIENTS, COHORT = 10, 5
SECONDS, SLOW_SECONDS = 0.2, 2.0
MARGIN = 2.0
PATIENCE_S = 900.0

Curve = list[tuple[float, float]]
"""Seconds since the start of training, and mean test accuracy in percent."""


def run(quick: bool = False, figure: Path | None = None) -> list[Comparison]:
    rounds = 20 if quick else 160
    with tempfile.TemporaryDirectory() as name:
        sides = {mode: play(Path(name) / str(mode), mode, rounds) for mode in (False, True)}
    if figure:
        draw({mode: curve for mode, (curve, _) in sides.items()}, figure)
    (by_rounds, _), (asynchronous, staleness) = sides[False], sides[True]
    goal = by_rounds[-1][1] - MARGIN
    conditions = (
        f"{CLIENTS} clients, {COHORT} at a time, {rounds * COHORT} client steps of {SECONDS} s, one client's of "
        f"{SLOW_SECONDS} s, against rounds; at the end {asynchronous[-1][1]:.1f} % asynchronously, "
        f"{by_rounds[-1][1]:.1f} % by rounds; "
        f"staleness at most {staleness}; the goal is {goal:.1f} % mean test accuracy"
    )
    return [
        Comparison("asynchronous, to the goal", "s", reached(asynchronous, goal), reached(by_rounds, goal), conditions),
        Comparison("asynchronous, all client steps", "s", asynchronous[-1][0], by_rounds[-1][0], conditions),
    ]


def reached(curve: Curve, goal: float) -> float:
    """Return the seconds at which a curve first reaches an accuracy; infinity if it never does."""
    return next((seconds for seconds, accuracy in curve if accuracy >= goal), float("inf"))


def play(folder: Path, asynchronous: bool, rounds: int) -> tuple[Curve, int]:
    """Run a federation in processes of its own; return its curve and the largest staleness."""
    config = RunConfig(
        gains=False,
        clients=CLIENTS,
        cohort=COHORT,
        rounds=rounds,
        eval_every=max(1, rounds // 20),
        asynchronous=asynchronous,
        local=LocalConfig(learning_rate=0.005, schedule="constant"),
        data=DataConfig(name="digits"),
    )
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_run_config(config))
    port = str(free_port())
    server = [sys.executable, "-m", "hyperbloom.server", "--config", str(folder / "config.yaml"), "--insecure"]
    commands = [[*server, "--port", port, "--run-dir", str(folder / "run")]]
    for index in range(CLIENTS):
        client = [sys.executable, "-m", "benchmarks.asynchrony", "--client"]
        client += [str(SLOW_SECONDS if index == 0 else SECONDS), "--server", f"127.0.0.1:{port}", "--insecure"]
        commands.append([*client, *client_settings(config, index, folder).to_flags(), "--threads", "1"])
    with (folder / "log").open("wb") as log:
        children = [subprocess.Popen(command, stdout=log, stderr=log, env=_environment()) for command in commands]
        try:
            if code := children[0].wait(PATIENCE_S):
                raise RuntimeError(f"the server ended with code {code}: {(folder / 'log').read_text()[-2000:]}")
        finally:
            for child in children:
                child.terminate()
            for child in children:
                child.wait(PATIENCE_S)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    curve = [(line["elapsed"], line["test_mean"]) for line in lines if "test_mean" in line]
    return curve, max(line.get("staleness_max", 0) for line in lines)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}


def client(seconds: float, arguments: list[str]) -> int:
    """Be a `flower-client` whose training takes at least so many seconds."""
    from hyperbloom.client import app as module
    from hyperbloom.client.cli import main

    prompt = module.app

    def slow(message: Message, context: Context) -> Message:
        start = time.perf_counter()
        reply = prompt(message, context)
        if message.metadata.message_type == "train":
            time.sleep(max(0.0, seconds - (time.perf_counter() - start)))
        return reply

    module.app = slow  # type: ignore[assignment]
    return main(arguments)


def draw(curves: dict[bool, Curve], path: Path) -> None:
    """Draw accuracy over wall time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axis = pyplot.subplots(figsize=(7, 4.2), constrained_layout=True)
    for asynchronous, label in ((True, "asynchronous"), (False, "by rounds")):
        axis.plot(*zip(*curves[asynchronous], strict=True), label=label, marker=".")
    axis.set(xlabel="seconds of training", ylabel="mean test accuracy, percent")
    axis.set_title("digits, 10 clients, 5 at a time, one of them 10 times slower: as many client steps", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend()
    canvas.savefig(path, dpi=110)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw accuracy over time")
    flags = parser.parse_args()
    show(lambda: run(flags.quick, flags.figure), flags.record)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        sys.exit(client(float(sys.argv[2]), sys.argv[3:]))
    main()
