"""`flower-server`: a whole run in this process, file by file; and everything that its flags may be wrong in."""

import io
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from pydantic import Field
from safetensors import safe_open
from safetensors.torch import load_file

from hyperbloom import __version__
from hyperbloom.client.app import app
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import RunConfig, Section, load_run_config
from hyperbloom.common.data import DATASETS, PARTITIONERS, DataSpec
from hyperbloom.common.models import MODELS
from hyperbloom.common.secrecy.keys import make_key, public_pem, read_private_key
from hyperbloom.common.tasks import TASKS
from hyperbloom.server import cli
from hyperbloom.server.access.certificates import Certificates, init, own_addresses, renew
from hyperbloom.server.access.invitations import Invitations
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.broker import superlink
from hyperbloom.server.cli import flower_server, main
from hyperbloom.server.grids import engine
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.server.grids.inline import InlineGrid
from hyperbloom.server.loop.listener import Listener, RoundReport
from hyperbloom.server.loop.session import Session
from hyperbloom.server.runs.folder import RunFolder, read_run
from hyperbloom.server.watch.tracking import BUILT_IN
from hyperbloom.server.watch.view import TerminalView
from hyperbloom.strategies import STRATEGIES, make_algorithm
from tests.conftest import restored_loggers
from tests.parsing import flags, parse

BRIEF = ["--set", "local.steps=3", "--set", "data.max_train=60", "--set", "hidden_dim=8"]
RUN = ["--engine", "inline", "--clients", "3", "--rounds", "5", "--eval-every", "2", *BRIEF]
OTHER_SHAPE = (
    "init_from: its hypernetwork is of another shape than this run's: size mismatch for heads.M.weight: copying a "
    "param with shape torch.Size([7510, 8]) from checkpoint, the shape in current model is torch.Size([7510, 9])."
)
LOCAL = ["--strategy", "local", "--clients", "3", "--rounds", "1", "--eval-every", "1", "--set", "local.steps=3"]
GRPC = [*LOCAL, "--port", "0"]
OPEN = [*("--insecure", "--insecure", "--host", "0.0.0.0"), "--set", "input_shape=[1,8,8]", "--set", "num_classes=10"]
METRICS = {f"{split}_{figure}" for split in ("val", "test") for figure in ("mean", "std", "worst", "pooled", "loss")}


@dataclass(frozen=True)
class Done:
    """A run that is over."""

    folder: Path
    code: int
    output: str

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a .jsonl file."""
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def json(self, name: str) -> Any:
        """Return the content of a .json file."""
        return json.loads((self.folder / name).read_text())


def execute(folder: Path, *flags: str) -> Done:
    """Run the command in this process."""
    shown = io.StringIO()
    with redirect_stdout(shown), restored_loggers():
        code = main([*flags, "--run-dir", str(folder)])
    client_for.cache_clear()
    return Done(folder, code, shown.getvalue())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    """Return a run of pFedHN and two baselines; no test changes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        patch.setenv("FLWR_LOG_LEVEL", "ERROR")
        yield execute(tmp_path_factory.mktemp("runs") / "first", *RUN, "--baselines", "local,fedavg")


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function from wrong flags to the one line that they are refused with."""

    def start(*flags: str, code: int = 2, engine: str = "inline") -> str:
        folder = tmp_path / "run"
        assert main(["--run-dir", str(folder), "--engine", engine, *flags]) == code
        error = capsys.readouterr().err
        assert error.startswith("flower-server: ")
        assert error.count("\n") == 1
        return error.removeprefix("flower-server: ").rstrip("\n")

    return start


# ---------------------------------------------------------------------- a whole run


def test_the_run_folder_holds_what_is_promised_and_nothing_else(run: Done) -> None:
    assert run.code == 0
    found = {path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*") if path.is_file()}
    clients = {f"clients/client-{index}/identity.json" for index in range(3)}
    run_id = run.json("environment.json")["run_id"]
    clients |= {f"clients/client-{index}/personal/{run_id}-local.safetensors" for index in range(3)}
    clients |= {f"clients/client-{index}/scored/{run_id}-local.safetensors" for index in range(3)}
    assert found - clients == {
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "clients.jsonl",
        "events.jsonl",
        "report.html",
        "hypernetwork.safetensors",
        "hypernetwork-last.safetensors",
        "roster.json",
        "summary.json",
        "server.log",
        "checkpoints/lock",
        "checkpoints/000004.json",  # that the run is complete
        "baselines/local/metrics.jsonl",
        "baselines/local/clients.jsonl",
        "baselines/fedavg/metrics.jsonl",
        "baselines/fedavg/clients.jsonl",
        "baselines/fedavg/hypernetwork.safetensors",
        "baselines/fedavg/hypernetwork-last.safetensors",
    }
    assert clients - found == set()
    assert re.fullmatch(r"first-[0-9a-f]{8}", run_id)


def test_the_configuration_is_that_of_the_flags(run: Done) -> None:
    expected = load_run_config(
        None,
        {
            "clients": 3,
            "rounds": 5,
            "eval_every": 2,
            "local.steps": 3,
            "data.max_train": 60,
            "hidden_dim": 8,
            "baselines": ["local", "fedavg"],
        },
    )
    assert load_run_config(run.folder / "config.yaml", {}) == expected
    assert run.json("environment.json")["seed"] == 0


@pytest.mark.parametrize("where", ["", "baselines/local/", "baselines/fedavg/"])
def test_each_round_is_a_line_with_its_figures(run: Done, where: str) -> None:
    lines = run.lines(where + "metrics.jsonl")
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    for line in lines:
        evaluated = line["round"] in (2, 4, 5)  # every second one, and the last
        told = {"round", "seconds", "elapsed", "clients", "loss", "bytes_down", "bytes_up"}
        assert set(line) == told | (METRICS | {"metric"} if evaluated else set())
        assert line["clients"] == 1
        assert 0 < line["loss"] < 50
        assert not evaluated or 0 <= line["test_worst"] <= line["test_mean"] <= 100


@pytest.mark.parametrize("where", ["", "baselines/local/", "baselines/fedavg/"])
def test_each_client_of_a_round_is_a_line(run: Done, where: str) -> None:
    lines = run.lines(where + "clients.jsonl")
    trained = [line for line in lines if "loss" in line]
    assert [line["round"] for line in trained] == [1, 2, 3, 4, 5]
    assert {line["client"] for line in trained} <= {"client-0", "client-1", "client-2"}
    evaluated = [(line["round"], line["client"]) for line in lines if "test_accuracy" in line]
    assert evaluated == [(number, f"client-{index}") for number in (2, 4, 5) for index in range(3)]
    assert not [line for line in lines if "refused" in line]
    for metrics in (line for line in run.lines(where + "metrics.jsonl") if "test_mean" in line):
        scores = [line for line in lines if line["round"] == metrics["round"] and "test_accuracy" in line]
        each = [100 * line["test_accuracy"] for line in scores]
        assert metrics["test_mean"] == pytest.approx(sum(each) / 3)
        assert metrics["test_worst"] == pytest.approx(min(each))
        right = [line["test_accuracy"] * line["test_total"] for line in scores]
        pooled = 100 * sum(right) / sum(line["test_total"] for line in scores)
        assert metrics["test_pooled"] == pytest.approx(pooled)


def test_all_strategies_draw_the_same_cohorts(run: Done) -> None:
    cohorts = [
        [line["client"] for line in run.lines(where + "clients.jsonl") if "loss" in line]
        for where in ("", "baselines/local/", "baselines/fedavg/")
    ]
    assert cohorts[0] == cohorts[1] == cohorts[2]


def test_the_summary_is_the_round_that_validation_selected(run: Done) -> None:
    summary = run.json("summary.json")
    assert list(summary) == ["pfedhn", "local", "fedavg"]
    for name, where in (("pfedhn", ""), ("local", "baselines/local/"), ("fedavg", "baselines/fedavg/")):
        evaluated = [line for line in run.lines(where + "metrics.jsonl") if "val_mean" in line]
        best = max(evaluated, key=lambda line: (line["val_mean"], -line["round"]))  # the first of equals
        assert summary[name]["round"] == best["round"]
        assert summary[name]["metrics"] == {key: best[key] for key in METRICS}
        scores = [line for line in run.lines(where + "clients.jsonl") if "test_accuracy" in line]
        each = {line["client"]: 100 * line["test_accuracy"] for line in scores if line["round"] == best["round"]}
        assert summary[name]["test_accuracy"] == pytest.approx(each)


def test_the_printed_table_is_the_summary(run: Done) -> None:
    summary = run.json("summary.json")
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in run.output.splitlines() if line.startswith("│")
    ]
    rounds = [f"(round {summary[name]['round']})" for name in ("pfedhn", "local", "fedavg")]
    assert [
        part for line in run.output.splitlines() if "client  " in line for part in re.findall(r"\(.*?\)", line)
    ] == rounds
    by_name = {row[0]: row[1:] for row in cells}
    roster = {client["client_id"]: client["about"] for client in run.json("roster.json")["clients"]}
    for client, about in roster.items():
        accuracies = [f"{each['test_accuracy'][client]:.1f}" for each in summary.values()]
        assert by_name[client] == [str(about["train_examples"]), *accuracies]
    for row, key in (
        ("mean over clients", "test_mean"),
        ("worst client", "test_worst"),
        ("pooled over examples", "test_pooled"),
    ):
        assert by_name[row] == ["", *(f"{each['metrics'][key]:.1f}" for each in summary.values())]
    assert len(cells) == 3 + 3


def test_the_output_says_where_everything_is_and_how_it_went(run: Done) -> None:
    lines = run.output.splitlines()
    assert lines[0] == f"run folder: {run.folder}"
    assert lines[-1] == f"everything is in {run.folder}"
    title = lines.index("test accuracy in percent, at the round that validation selected")
    assert lines[title + 1].startswith("┏")
    assert len([line for line in lines if "joined (60 training examples, size M)" in line]) == 3
    progress = [line for line in lines if re.match(r"(pfedhn|local|fedavg): round [245]/5  accuracy mean ", line)]
    assert len(progress) == 9


def test_the_hypernetwork_loads_and_its_rows_are_the_clients(run: Done) -> None:
    tensors, roster = read_run(run.folder)
    assert tensors["embeddings"].shape == (3, 1)  # int(1 + 3 / 4)
    assert tensors["hypernetwork.heads.M.weight"].shape == (64 * 100 + 100 + 100 * 10 + 10, 8)
    assert [(client.client_id, client.row) for client in roster] == [(f"client-{index}", index) for index in range(3)]
    last = load_file(run.folder / "hypernetwork-last.safetensors")
    assert set(last) == set(tensors)
    assert {name for name in last if name.startswith("momentum.")} == {
        name.replace("hypernetwork.", "momentum.") if name != "embeddings" else "momentum.embeddings"
        for name in last
        if not name.startswith(("momentum.", "hypernetwork.start_", "trained."))
    }
    with safe_open(run.folder / "hypernetwork.safetensors", framework="pt") as file:
        assert file.metadata() == {"round": str(run.json("summary.json")["pfedhn"]["round"])}


def test_the_average_is_kept_by_parameter(run: Done) -> None:
    weights = load_file(run.folder / "baselines/fedavg/hypernetwork.safetensors")
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        "fc1.weight": (100, 64),
        "fc1.bias": (100,),
        "head.weight": (10, 100),
        "head.bias": (10,),
    }


def test_no_secret_leaves_its_client(run: Done) -> None:
    tokens = [run.json(f"clients/client-{index}/identity.json")["secrets"][""]["secret"] for index in range(3)]
    assert len(set(tokens)) == 3
    for path in run.folder.rglob("*"):
        if path.is_file() and path.name != "identity.json":
            content = path.read_bytes()
            assert not any(token.encode() in content for token in tokens), path


def test_a_run_repeats_to_the_bit_from_its_own_configuration(run: Done, tmp_path: Path) -> None:
    again = execute(tmp_path / "again", "--engine", "inline", "--config", str(run.folder / "config.yaml"))
    assert again.code == 0
    assert again.json("summary.json") == run.json("summary.json")
    for name in ("hypernetwork.safetensors", "hypernetwork-last.safetensors"):
        assert (again.folder / name).read_bytes() == (run.folder / name).read_bytes()


# ---------------------------------------------------------------------- from one run to the next


@pytest.mark.parametrize("options", [[], ["--set", "options.freeze=true"]])
def test_a_run_starts_from_another_one_with_the_same_clients_and_new_ones(
    run: Done, tmp_path: Path, options: list[str]
) -> None:
    flags = [*RUN[:2], "--clients", "5", *RUN[4:], "--rounds", "6", "--set", f"init_from={run.folder}", *options]
    done = execute(tmp_path / "next", *flags)
    assert done.code == 0
    before, after = (read_run(folder) for folder in (run.folder, done.folder))
    assert [(c.client_id, c.row) for c in after[1]] == [(f"client-{index}", index) for index in range(5)]
    assert len([line for line in done.output.splitlines() if " is back (" in line]) == 3
    assert after[0]["embeddings"].shape == (5, 1)
    trained = {line["client"] for line in done.lines("clients.jsonl") if "loss" in line}
    moved = [
        name for name in before[0] if name.startswith("hypernetwork.") and not before[0][name].equal(after[0][name])
    ]
    if options:
        assert trained <= {"client-3", "client-4"}
        assert moved == []
        assert torch.equal(after[0]["embeddings"][:3], before[0]["embeddings"])
    else:
        assert trained & {"client-0", "client-1", "client-2"}
        assert "hypernetwork.heads.M.weight" in moved


def test_a_run_that_starts_from_another_one_splits_a_file_as_that_one_did(
    run: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=draw.normal(size=(60, 4)).astype(np.float32), y=np.arange(60) % 2)
    flags = ["--engine", "inline", "--strategy", "pfedhn", "--clients", "2", "--cohort", "1", "--rounds", "1"]
    own = [*flags, "--set", "gains=false", "--data", str(tmp_path / "own.npz")]
    first = execute(tmp_path / "first", *own)
    assert first.code == 0
    start = ["--init-from", str(first.folder), "--seed"]
    assert execute(tmp_path / "next", *own, *start, "0").code == 0
    capsys.readouterr()
    assert execute(tmp_path / "other", *own, *start, "1").code == 2
    assert "seed: expected 0, that of init_from, found 1: another one would test" in capsys.readouterr().err
    digits = [*RUN, "--seed", "1", "--init-from", str(run.folder)]
    assert execute(tmp_path / "digits", *digits).code == 0, "named data sets have one split for all seeds"


def test_a_frozen_run_on_the_clients_that_it_was_trained_with_is_an_evaluation(run: Done, tmp_path: Path) -> None:
    done = execute(tmp_path / "next", *RUN, "--init-from", str(run.folder), "--set", "options.freeze=true")
    assert done.code == 0
    assert [line["clients"] for line in done.lines("metrics.jsonl")] == [0] * 6
    expected = run.json("summary.json")["pfedhn"]["test_accuracy"]
    assert done.json("summary.json")["pfedhn"]["test_accuracy"] == pytest.approx(expected)


def test_what_a_run_starts_from_is_scored_before_it_learns_anything(run: Done, tmp_path: Path) -> None:
    done = execute(tmp_path / "next", *RUN, "--init-from", str(run.folder))
    first, second, *_ = done.lines("metrics.jsonl")
    before = run.json("summary.json")["pfedhn"]["metrics"]
    assert (first["round"], second["round"]) == (0, 1)
    assert "loss" not in first and "loss" in second
    assert {name: first[name] for name in before} == pytest.approx(before)
    assert "before training" in done.output


def test_the_secrets_of_the_run_before_are_taken_over_for_their_owner_only(run: Done, tmp_path: Path) -> None:
    done = execute(tmp_path / "next", *RUN, "--init-from", str(run.folder))
    for index in range(3):
        name = f"clients/client-{index}/identity.json"
        assert done.json(name) == run.json(name)
        assert (done.folder / name).stat().st_mode & 0o777 == 0o600


def test_novel_clients_learn_their_embeddings_under_a_frozen_hypernetwork(run: Done) -> None:
    overrides = {"clients": 3, "rounds": 6, "eval_every": 6, "local.steps": 3, "hidden_dim": 8, "freeze": True}
    config = load_run_config(None, overrides | {"init_from": str(run.folder)})
    specs = [DataSpec(partition=index, partitions=3, max_train=60, seed=1) for index in range(3)]
    settings = [
        ClientSettings(f"novel-{index}", spec, "cpu", state_dir=run.folder.parent / f"novel-{index}")
        for index, spec in enumerate(specs)
    ]
    states: list[Mapping[str, torch.Tensor]] = []
    listener = Listener()
    listener.phase_done = lambda algorithm: states.append(algorithm.state())  # type: ignore[method-assign]
    session = Session(config, InlineGrid(app, [each.to_node_config() for each in settings]), "next", [listener])
    session.run()
    before, _ = read_run(run.folder)
    (after,) = states
    assert [(client.client_id, client.row) for client in session.roster][3:] == [
        (f"novel-{index}", 3 + index) for index in range(3)
    ]
    assert torch.equal(after["embeddings"][:3], before["embeddings"])
    fresh = make_algorithm(config)
    fresh.build(fresh.settle(next(iter(session.roster)).about))
    for client in session.roster:
        fresh.join(client, True)
    assert not torch.equal(after["embeddings"][3:], fresh.state()["embeddings"][3:])
    for name in (name for name in before if name.startswith("hypernetwork.")):
        assert torch.equal(after[name], before[name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["hidden_dim=9"], OTHER_SHAPE),
        (["embedding_dim=2"], "options.embedding_dim: expected 1 of init_from, found 2"),
    ],
)
def test_another_hypernetwork_is_not_started_from(
    run: Done, refused: Callable[..., str], options: list[str], message: str
) -> None:
    flags = [word for option in options for word in ("--set", option)]
    assert refused(*RUN, "--init-from", str(run.folder), *flags) == message


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("fedavg", "init_from: fedavg has no way to start from another run"),
        ("local", "init_from: local has no way to start from another run"),
    ],
)
def test_a_strategy_without_a_state_of_its_own_does_not_start_from_another_run(
    run: Done, refused: Callable[..., str], tmp_path: Path, strategy: str, message: str
) -> None:
    assert refused("--strategy", strategy, "--init-from", str(run.folder)) == message
    assert not (tmp_path / "run").exists()


def test_a_state_without_embeddings_is_refused(run: Done, refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for name in ("roster.json", "baselines/fedavg/hypernetwork.safetensors"):
        (tmp_path / "old" / Path(name).name).write_bytes((run.folder / name).read_bytes())
    assert refused("--init-from", str(tmp_path / "old")) == (
        "init_from: expected a run of pfedhn or pfedhn-pc, found tensors ['fc1.bias', 'fc1.weight', 'head.bias']"
    )
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------- wrong flags

NO_STRATEGY = f"expected one of {', '.join(STRATEGIES)}; or package.module:Class; found 'nothing'"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--strategy nothing", f"strategy: {NO_STRATEGY}"),
        ("--baselines nothing", f"baselines: {NO_STRATEGY}"),
        ("--baselines pfedhn", "baselines: expected names beside pfedhn, each once, found ('pfedhn',)"),
        (
            "--baselines local,fedavg,local",
            "baselines: expected names beside pfedhn, each once, found ('local', 'fedavg', 'local')",
        ),
        ("--model resnet", f"model: expected auto or one of {', '.join(MODELS)}, found 'resnet'"),
        (
            "--split nothing",
            f"data.split: expected one of {', '.join(PARTITIONERS)}, found 'nothing'",
        ),
        ("--set momentun=0.5", "momentun: unknown key in options of pfedhn. Did you mean momentum?"),
        ("--set options.momentum=2", "momentum: expected less than 1, found 2 in options of pfedhn"),
        ("--set local.momentun=0.5", "local.momentun: unknown key in the command line. Did you mean momentum?"),
        ("--set rounds", "--set: expected KEY=VALUE such as local.steps=20, found 'rounds'"),
        ("--cohort 4 --clients 3", "cohort: expected at most clients = 3, found 4"),
        ("--rounds 5 --eval-every 10", "eval_every: expected at most rounds = 5, found 10"),
        ("--rounds 0", "rounds: expected greater than 0, found 0 in the command line"),
        (
            "--model lenet",
            "lenet: expected images (channels, height, width) of at least 16 x 16, found (1, 8, 8); use model: mlp",
        ),
        ("--set sizes=[S,M] --strategy fedavg", "sizes: fedavg averages one architecture, found S, M"),
        ("--set sizes=[S,M] --baselines fedavg", "sizes: fedavg averages one architecture, found S, M"),
        (
            "--set freeze=true",
            "options.freeze: expected init_from to name the run whose hypernetwork to keep",
        ),
        ("--explain nothing", f"--explain: {NO_STRATEGY}"),
        (
            "--set compression=zip",
            (
                "compression: expected none, int8, top-k:SHARE with a share between 0 and 1, or top-k:SHARE+int8, "
                "found 'zip'"
            ),
        ),
        ("--config /nowhere.yaml", "--config: cannot read /nowhere.yaml: No such file or directory"),
    ],
)
def test_a_wrong_flag_is_told_in_one_line_before_anything_is_made(
    refused: Callable[..., str], tmp_path: Path, flags: str, message: str
) -> None:
    assert refused(*flags.split()) == message
    assert not (tmp_path / "run").exists()


def test_plain_text_goes_with_no_certificates(refused: Callable[..., str]) -> None:
    message = refused("--insecure", "--certs", "certs", engine="grpc")
    assert message == "--insecure: expected alone or not at all, found with --certs"


def test_without_certificates_one_line_says_what_to_do(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    how = "flower-server certs init --dir {} --host NAME_OR_IP"
    what = f"make them with `{how}`, or speak plain text on this machine with "
    (tmp_path / "certs").mkdir()
    (tmp_path / "certs/ca.pem").touch()  # one that holds a certificate or a key already is left as it is
    assert refused(engine="grpc") == f"no certificates in certs: {what.format('certs')}--insecure"
    assert refused("--certs", "there", engine="grpc") == f"no certificates in there: {what.format('there')}--insecure"


def test_an_expired_certificate_is_told_before_anything_starts(refused: Callable[..., str], tmp_path: Path) -> None:
    files = init(tmp_path / "certs", [], 30)
    renew(files.folder, [], 0)
    message = refused("--certs", str(files.folder), engine="grpc")
    assert message.startswith(f"{files.server} has expired on ")
    assert message.endswith(f"; make a new one (flower-server certs renew --dir {files.folder})")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::", "gpu-box"])
def test_plain_text_over_a_network_must_be_said_twice(refused: Callable[..., str], host: str) -> None:
    assert refused("--insecure", "--host", host, engine="grpc") == (
        f"--insecure: --host {host} is not loopback, and everyone on the network could read and forge what is sent; "
        "use certificates (docs/security.md), or say --insecure --insecure"
    )


def test_the_inline_engine_needs_no_tls(run: Done) -> None:
    assert run.code == 0  # its flags name neither --insecure nor a certificate


def test_a_folder_with_files_is_not_written_to(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("")
    begin = f"--run-dir: expected a new or empty folder, found files in {tmp_path / 'run'}; name another, or give"
    assert refused().startswith(begin)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious"]


def test_a_run_to_start_from_must_exist(refused: Callable[..., str]) -> None:
    assert refused("--init-from", "/nowhere").startswith(
        "init_from: expected a run folder with hypernetwork.safetensors and roster.json, found /nowhere ("
    )


def test_clients_that_do_not_come_end_the_run_with_four(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "inline_grid", lambda *_: InlineGrid(app, []))
    assert refused("--join-timeout", "0.1", code=4) == (
        "0 of 6 clients joined within 0 s (none). Start the others, or set clients to fewer or join_timeout_s to more"
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (["--data", "nothing"], "found 'nothing'"),
        (["--data", "cifar10", "--root", "/nowhere"], "cifar10 not found; looked at /nowhere/"),
        (["--split", "owner"], "expected data that name their owners, found digits without"),
    ],
)
def test_data_that_are_not_there_are_told_at_once(
    refused: Callable[..., str], tmp_path: Path, data: list[str], reason: str
) -> None:
    assert reason in refused(*data)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("clients", "told"),
    [
        ("4", ["client-0 is budapest", "client-1 is cleveland", "client-2 is long-beach", "client-3 is zurich-basel"]),
        ("2", ["client-0 is budapest, cleveland", "client-1 is long-beach, zurich-basel"]),
    ],
)
def test_a_run_over_owners_says_which_client_is_whose(
    clients: str, told: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*LOCAL, "--engine", "inline", "--data", "heart-disease", "--split", "owner", "--clients", clients]
    assert main([*words, "--run-dir", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[: lines.index(f"run folder: {tmp_path / 'run'}")] == told


def test_a_first_start_with_a_wrong_name_makes_no_certificates(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "found 'pfedhm'" in refused("--strategy", "pfedhm", engine="grpc")
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_ends_with_five(refused: Callable[..., str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused("--insecure", "--port", str(port), code=5, engine="grpc")
    assert message == f"--host 127.0.0.1 --port {port}: cannot listen there: Address already in use"


@pytest.mark.parametrize("flag", ["--web", "--metrics-port"])
def test_a_page_whose_port_is_taken_leaves_no_run_folder(
    refused: Callable[..., str], tmp_path: Path, flag: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert refused(flag, str(port), code=5) == f"{flag} {port}: cannot listen there: Address already in use"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("port", ["70000", "-1", "65536"])
def test_a_port_that_is_none_is_refused(refused: Callable[..., str], port: str) -> None:
    message = refused("--insecure", f"--port={port}", engine="grpc")
    assert message.startswith(f"Invalid value for '--port': {port} is not in the range 0<=x<=65535")


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    done = execute(tmp_path / "a[" / "b]", *LOCAL, "--engine", "inline")
    assert done.output.splitlines()[0] == f"run folder: {tmp_path}/a[/b]"


@pytest.mark.parametrize("count", ["4", "-1"])
def test_more_local_clients_than_clients_are_refused(refused: Callable[..., str], tmp_path: Path, count: str) -> None:
    message = refused("--insecure", "--clients", "3", f"--local-clients={count}", engine="grpc")
    assert message == f"--local-clients: expected 0 to clients = 3, found {count}"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["--port=9311", "--certs=here", "--local-clients=2", "--serve-backbone"])
def test_flags_of_a_network_are_refused_where_there_is_none(
    refused: Callable[..., str], tmp_path: Path, flag: str
) -> None:
    """Who names them believes that something listens, or that clients were started."""
    name = flag.partition("=")[0]
    assert refused(flag, "--clients=2") == f"{name}: expected with --engine grpc, found --engine inline"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["--vectorise", "--no-vectorise"])
def test_clients_of_other_processes_cannot_train_at_once(
    refused: Callable[..., str], tmp_path: Path, flag: str
) -> None:
    message = refused("--insecure", flag, engine="grpc")
    assert message == "--vectorise: expected with --engine inline, found --engine grpc"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine", "inline"], "--superlink: expected with --engine grpc, without --local-clients"),
        (["--local-clients", "2"], "--superlink: expected with --engine grpc, without --local-clients"),
        (
            ["--certs", "{folder}"],
            "--superlink: expected the SuperLink's CA in {folder}/ca.pem (--certs), or --insecure",
        ),
    ],
)
def test_flags_that_do_not_go_with_somebody_elses_superlink_are_refused(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [flag.format(folder=tmp_path) for flag in flags]
    assert main(["--superlink", "10.0.0.5:8000", *flags]) == 2
    assert message.format(folder=tmp_path) in capsys.readouterr().err
    assert main(["--superlink", "10.0.0.5:8000", "--insecure"]) == 2
    assert "--superlink" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("flags", "expected"), [([], None), (["--vectorise"], True), (["--no-vectorise"], False)])
def test_the_engine_is_told_whether_to_train_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], expected: bool | None
) -> None:
    told: list[bool | None] = []

    def noted(config: RunConfig, folder: Path, vectorise: bool | None, train_all: Any) -> InlineGrid:
        told.append(vectorise)
        return inline_grid(config, folder, vectorise, train_all)

    monkeypatch.setattr(engine, "inline_grid", noted)
    assert execute(tmp_path / "run", *LOCAL, "--engine", "inline", *flags).code == 0
    assert told == [expected]


def test_a_virtual_clients_model_that_cannot_be_written_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "moody.py").write_text(
        "import torch\nclass Net(torch.nn.Sequential):\n"
        "    def forward(self, x):\n        return super().forward(x if x.sum() > 0 else -x)\n"
        "def make(shape, classes):\n    return Net(torch.nn.Flatten(), torch.nn.Linear(64, classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    flags = [
        "--engine",
        "inline",
        "--strategy",
        "ghn",
        "--set",
        "models=[moody:make]",
        "--run-dir",
        str(tmp_path / "r"),
    ]
    assert main(flags) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "flower-server: Net: cannot be traced by torch.fx: TraceError: symbolically traced variables"
    )


def test_ctrl_c_ends_with_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "inline_grid", interrupted)
    assert main(["--engine", "inline", "--run-dir", str(tmp_path / "run")]) == 130
    more = f"--resume {tmp_path}/run goes on from its last checkpoint, if any, and says which flags to give again"
    assert capsys.readouterr().err == f"flower-server: stopped; {more}\n"


def test_a_run_that_was_stopped_says_how_to_go_on_with_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the folder that no flag named, and how its clients were served."""

    def interrupted(session: Session) -> NoReturn:
        raise KeyboardInterrupt("SIGTERM")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Session, "run", interrupted)
    assert main(["--insecure", "--port", "0", "--clients", "1", "--cohort", "1"]) == 130
    (folder,) = (tmp_path / "runs").iterdir()
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"flower-server: stopped; --resume runs/{folder.name} --insecure goes on from its last")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--rounds x", "Invalid value for '--rounds': 'x' is not a valid integer"),
        ("--engine mpi", "Invalid value for '--engine': 'mpi' is not one of 'grpc', 'inline'"),
        ("--engin inline", "No such option '--engin'. (Did you mean one of: '--engine', '--explain', '--version'?)"),
        ("--rounds 5 watch x", "--rounds: expected no command behind the flags of a run, found 'watch'"),
    ],
)
def test_flags_that_do_not_parse_are_one_line(capsys: pytest.CaptureFixture[str], flags: str, text: str) -> None:
    assert main(flags.split()) == 2
    assert capsys.readouterr().err == f"flower-server: {text}; see flower-server --help\n"


# ---------------------------------------------------------------------- what flags mean


@pytest.mark.parametrize(
    ("flags", "overrides"),
    [
        ("", {}),
        ("--strategy local --rounds 7 --clients 8 --cohort 2 --seed 3 --eval-every 7 --model mlp", None),
        ("--data mnist --root /d --split iid --max-train 9", None),
        ("--join-timeout 5 --round-timeout 6.5 --init-from runs/1", None),
        ("--local-clients 4", {"clients": 4}),
        ("--local-clients 4 --clients 5", {"clients": 5}),
        ("--baselines local,,fedavg,", {"baselines": ["local", "fedavg"]}),
        ("--set local.steps=9 --set clip=1e-3 --rounds 50", {"local.steps": 9, "clip": 1e-3, "rounds": 50}),
        ("--rounds 50 --set rounds=60", {"rounds": 60}),
    ],
)
def test_flags_become_the_configuration(flags: str, overrides: dict[str, Any] | None) -> None:
    explicit = {
        "--strategy local": {
            "strategy": "local",
            "rounds": 7,
            "clients": 8,
            "cohort": 2,
            "seed": 3,
            "eval_every": 7,
            "model": "mlp",
        },
        "--data mnist": {"data.name": "mnist", "data.root": "/d", "data.split": "iid", "data.max_train": 9},
        "--join-timeout 5": {"join_timeout_s": 5.0, "round_timeout_s": 6.5, "init_from": "runs/1"},
    }
    expected = explicit[" ".join(flags.split()[:2])] if overrides is None else overrides
    assert cli._config(parse(flower_server, flags.split()).params) == load_run_config(None, expected)


def test_the_number_of_local_clients_does_not_win_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("rounds: 30")
    given = parse(flower_server, ["--config", str(tmp_path / "run.yaml"), "--local-clients", "2"])
    assert cli._config(given.params) == RunConfig(rounds=30, eval_every=7)


# ---------------------------------------------------------------------- over the network, without one


def faked_network(monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    """Let the gRPC engine work on virtual clients, and keep what it would have started."""

    @contextmanager
    def fake_superlink(
        address: str, folder: Path, files: Any, tell: Any, keys: Any, backbone: Any
    ) -> Iterator[InlineGrid]:
        assert backbone is None
        started.append((address, files, keys))
        yield inline_grid(load_run_config(None, {"clients": 3, "data.max_train": 60}), folder)

    @contextmanager
    def fake_clients(settings: list[ClientSettings], connection: list[str]) -> Iterator[Any]:
        started.append((len(settings), *connection))
        yield lambda: started.append("watched")

    monkeypatch.setattr(superlink, "superlink", fake_superlink)
    monkeypatch.setattr(engine, "local_clients", fake_clients)


@pytest.mark.parametrize(("key", "other"), [("input_shape", "num_classes=10"), ("num_classes", "input_shape=[1,8,8]")])
def test_beyond_loopback_the_first_client_decides_nothing(
    key: str, other: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*GRPC, *OPEN[:4], "--set", other, "--run-dir", str(tmp_path / "run")]) == 2
    assert f"--host 0.0.0.0: expected {key} of the run, such as --set {key}=" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_line_for_other_machines_is_printed_with_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[Any] = []
    faked_network(monkeypatch, started)
    monkeypatch.setattr(socket, "gethostname", lambda: "big-machine")
    done = execute(tmp_path / "run", *GRPC, *OPEN)
    assert done.code == 0
    port = started[0][0].removeprefix("0.0.0.0:")
    assert int(port) > 0
    assert started[:2] == [(f"0.0.0.0:{port}", None, None), (0, "--server", f"127.0.0.1:{port}", "--insecure")]
    assert "watched" in started
    lines = done.output.splitlines()
    assert "--insecure: everyone on the network can read and forge what is sent" in lines
    place = lines.index("run this on each machine, NAME its own and I from 0 to 2:")
    assert lines[place + 1] == (
        f"  flower-client --server big-machine:{port} --insecure --insecure --client-id NAME --data digits "
        "--partition I/3"
    )


@pytest.mark.parametrize(
    ("flags", "numbers", "part"),
    [
        (["--local-clients", "1"], "from 1 to 2", "I/3"),
        (["--local-clients", "2"], "= 2", "I/3"),
        (["--local-clients", "1", "--set", "data.parts=9", "--set", "data.first=4"], "from 5 to 6", "I/9"),
    ],
)
def test_the_line_for_other_machines_leaves_out_the_parts_of_local_clients(
    flags: list[str], numbers: str, part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    faked_network(monkeypatch, [])
    done = execute(tmp_path / "run", *GRPC, "--insecure", *flags)
    assert done.code == 0
    lines = done.output.splitlines()
    place = lines.index(f"run this on each machine, NAME its own and I {numbers}:")
    assert lines[place + 1].endswith(f"--partition {part}")


def test_local_clients_need_no_line_and_loopback_no_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[Any] = []
    faked_network(monkeypatch, started)
    done = execute(tmp_path / "run", *GRPC, "--insecure", "--local-clients", "3")
    assert done.code == 0
    address = started[0][0]
    assert address.startswith("127.0.0.1:")
    assert started[:2] == [(address, None, None), (3, "--server", address, "--insecure")]
    assert "flower-client" not in done.output
    assert "--insecure" not in done.output


def test_a_run_that_goes_on_takes_a_free_port_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[Any] = []
    faked_network(monkeypatch, started)
    flags = [*GRPC, "--insecure", "--local-clients", "3"]
    with monkeypatch.context() as until:

        def stop(self: RunFolder, report: RoundReport) -> None:
            if report.number == 2:
                raise KeyboardInterrupt

        until.setattr(RunFolder, "round_done", stop)
        assert main([*flags, "--rounds", "3", "--set", "checkpoint_every=1", "--run-dir", str(tmp_path / "run")]) == 130
    started.clear()
    assert main(["--resume", str(tmp_path / "run"), *flags[-5:]]) == 0
    assert not started[0][0].endswith(":0") and started[1][2] == started[0][0]


def test_a_server_without_a_backbone_hands_out_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--strategy", "fedavg", "--clients", "1", "--insecure", "--port", "0", "--serve-backbone"]
    assert main([*flags, "--run-dir", str(tmp_path / "run")]) == 2
    assert "--serve-backbone: expected the run's backbone: --set backbone=FOLDER" in capsys.readouterr().err


def test_certificates_are_found_and_reach_the_superlink_and_the_clients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[Any] = []
    faked_network(monkeypatch, started)
    files = init(tmp_path / "certs", [], 30)
    monkeypatch.chdir(tmp_path)
    done = execute(tmp_path / "run", *GRPC)
    assert done.code == 0
    found = Certificates(Path("certs"))
    assert started[0][1].folder == found.folder
    assert started[1][3:] == ("--root-certificates", str(found.ca))
    assert started[0][0].startswith("0.0.0.0:")  # with keys, for other machines
    line = re.search(r"flower-client --server (\S+):\d+ --token (HB1\S+) --client-id NAME --data", done.output)
    assert line and line[1] in (*own_addresses(), socket.gethostname())
    assert "the token lets 3 enrol within an hour" in done.output and "forge" not in done.output
    assert [each.uses for each in Invitations(found).all()] == [3]

    started.clear()
    monkeypatch.chdir(tmp_path / "run")
    for name in ("ward-7", "ward-8", "ward-9"):
        ClientRegistry(files.clients).add(name, public_pem(make_key()))
    done = execute(tmp_path / "second", *GRPC, "--certs", str(files.folder))
    assert started[0][1].folder == files.folder
    assert " --client-id NAME --data" in done.output
    assert f"one whose key was added by hand also needs --root-certificates {files.ca} --key FILE" in done.output
    assert "--token" not in done.output


def test_local_clients_get_keys_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[Any] = []
    faked_network(monkeypatch, started)
    files = init(tmp_path / "certs", [], 30)
    done = execute(tmp_path / "run", *GRPC, "--certs", str(files.folder), "--local-clients", "2")
    assert done.code == 0
    own = tmp_path / "run/clients/clients.json"
    assert (started[0][1].folder, started[0][2]) == (files.folder, own)
    assert sorted(ClientRegistry(own).keys().values()) == ["client-0", "client-1"]
    for key, name in ClientRegistry(own).keys().items():
        assert public_pem(read_private_key(tmp_path / "run/clients" / name / "key.pem", name)) == key
    assert not files.clients.exists()


# ---------------------------------------------------------------------- help


def test_help_shows_examples_that_parse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    examples = [line.split() for line in text.splitlines() if line.startswith("      flower-server --")]
    assert len(examples) == 6
    parsed = [parse(flower_server, words[1:]).params for words in examples]
    assert [given["local_clients"] for given in parsed] == [6, 0, 0, 0, 0, 0]
    assert [given["engine"] for given in parsed] == ["grpc", "grpc", "grpc", "inline", "grpc", "grpc"]
    assert parsed[2]["assignments"] == ("local.steps=20",)
    shown = " ".join(text.split())
    assert "examples per client [data.max_train] --dp-clients" in shown
    assert "data set that the clients split among themselves [data.name] [default: digits]" in shown
    for title in (
        "The run:",
        "Machines:",
        "Where to listen:",
        "Commands:",
        "exit codes:",
    ):
        assert title in shown


def test_the_list_names_everything_that_is_registered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    sections: dict[str, dict[str, str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith(" "):
            name, _, description = line.strip().partition("  ")
            list(sections.values())[-1][name] = description.strip()
        elif line.strip() and not line.startswith("Clients"):
            sections[line.strip()] = {}
    expected: dict[str, Mapping[str, object]] = {
        "strategies": STRATEGIES,
        "models": MODELS,
        "data sets": DATASETS,
        "tasks": TASKS,
        "trackers": BUILT_IN,
        "splits": PARTITIONERS,
    }
    assert {title: set(names) for title, names in sections.items()} == {
        title: set(registry) for title, registry in expected.items()
    }
    assert all(len(description) > 10 for names in sections.values() for description in names.values())
    assert sections["data sets"]["digits"] == DATASETS["digits"].description
    assert sections["models"]["lenet"] == MODELS["lenet"].description
    assert main(["--json"]) == 2
    assert capsys.readouterr().err == "flower-server: --json: expected beside --list\n"
    assert main(["--list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {title: set(names) for title, names in told.items()} == {
        title: set(names) for title, names in expected.items()
    }


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_explaining_a_strategy_lists_every_key_with_default_and_meaning(
    capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    assert main(["--explain", strategy]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{strategy}: ")
    rows = {line.split()[0]: line for line in lines[3:] if line}
    expected = {f"options.{name}": field for name, field in STRATEGIES[strategy].options_type.model_fields.items()}
    for section in ("local", "data", "privacy"):
        fields = type(RunConfig.model_fields[section].default).model_fields
        expected |= {f"{section}.{name}": field for name, field in fields.items()}
    expected |= {n: f for n, f in RunConfig.model_fields.items() if n not in ("local", "data", "privacy", "options")}
    assert set(rows) == set(expected)
    for name, field in expected.items():
        assert (field.description or "?") in rows[name]
        if isinstance(field.default, str | int | float):
            assert rows[name].split()[1] == str(field.default)


def test_what_a_plug_in_says_of_itself_is_no_markup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Options(Section):
        way: str = Field("[/x]", description="as in [smith2020]")

    class Cited(STRATEGIES["fedavg"]):  # type: ignore[misc, valid-type]
        """Averages as in [smith2020], in bold [/b]."""

        options: Options

    monkeypatch.setattr("hyperbloom.server.catalogue.find_strategy", lambda name, flag: Cited)
    assert main(["--explain", "cited"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cited: Averages as in [smith2020], in bold [/b]."
    assert ["options.way", "[/x]", "as", "in", "[smith2020]"] in [line.split() for line in lines]


def test_descriptions_name_flags_that_exist() -> None:
    text = " ".join(field.description or "" for field in RunConfig.model_fields.values())
    assert set(re.findall(r"--[a-z-]+", text)) <= flags(flower_server)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hyperbloom {__version__}\n"


def test_the_module_is_the_command_and_a_wrong_key_costs_no_import_of_torch() -> None:
    code = (
        "import atexit, runpy, sys; sys.argv = ['flower-server', '--rounds', '0']\n"
        "atexit.register(lambda: print('torch' in sys.modules, 'flwr' in sys.modules))\n"
        "runpy.run_module('hyperbloom.server', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "False False\n")
    assert done.stderr == "flower-server: rounds: expected greater than 0, found 0 in the command line\n"


def test_output_without_a_terminal_has_no_colours(run: Done) -> None:
    assert "\x1b" not in run.output


# ---------------------------------------------------------------------- advice


COUNTS = ["--clients", "2", "--cohort", "2", "--rounds", "4", "--eval-every", "2"]
BRIEF_ADVICE = ["advise", "--engine", "inline", *COUNTS, *BRIEF[:4]]


@pytest.fixture(scope="module")
def advised(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Return the run of a whole `advise`; no test changes it."""
    return execute(tmp_path_factory.mktemp("advised") / "run", *BRIEF_ADVICE)


def test_the_advice_is_that_of_an_ordinary_run_with_baselines(
    advised: Done, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advised.code == 0
    config = load_run_config(advised.folder / "config.yaml", {})
    assert (config.strategy, config.baselines, config.rounds) == ("local", ("fedavg", "pfedhn"), 4)
    assert config.eval_every == 2
    advice = advised.json("advice.json")
    last = [line for line in advised.lines("baselines/fedavg/clients.jsonl") if "val_accuracy" in line]
    chosen = advised.json("summary.json")["fedavg"]["round"]
    each = [line["val_accuracy"] for line in last if line["round"] == chosen]
    assert advice["scores"]["fedavg"] == pytest.approx(100 * sum(each) / 2)
    lines = advised.output.splitlines()
    start = lines.index(f"advice: {advice['strategy']}")
    assert lines[start + 1 :] == [f"- {line}" for line in advice["says"]]
    assert "class shares of two clients differ by " in advised.output, "clients on this machine disclose them"
    page = (advised.folder / "report.html").read_text()
    assert f"<p>Take {advice['strategy']}.</p>" in page and page.count("<li>") >= len(advice["says"])
    assert main(["advise", str(advised.folder)]) == 0
    assert capsys.readouterr().out.strip().splitlines() == lines[start:]


def test_a_report_without_advice_says_nothing_of_it(run: Done) -> None:
    assert "Which strategy is for these clients?" not in (run.folder / "report.html").read_text()


def test_advice_that_was_stopped_goes_on(advised: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = 0

    def stop(view: TerminalView, report: RoundReport) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 6:  # the second one of fedavg
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TerminalView, "round_done", stop)
        assert execute(tmp_path / "run", *BRIEF_ADVICE).code == 130
    assert not (tmp_path / "run/advice.json").exists()
    assert main(["advise", "--resume", str(tmp_path / "run")]) == 0
    found = json.loads((tmp_path / "run/advice.json").read_text())
    assert found == advised.json("advice.json")


def test_the_advice_of_a_finished_run_with_baselines_is_of_its_strategies(run: Done, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run.folder, tmp_path / "copy"))
    assert main(["advise", str(folder)]) == 0
    assert json.loads((folder / "advice.json").read_text())["scores"].keys() == {"pfedhn", "local", "fedavg"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/x", "--rounds", "3"], "expected either the folder of a finished run or the flags of a new one"),
        (["runs/x"], "expected the folder of a run, found no runs/x/config.yaml"),
        (["--engine", "inline", "--baselines", "no"], "expected one of ditto"),
    ],
)
def test_wrong_words_of_advise_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("flower-server advise: ") and error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--clients 8 --cohort 4", ("local", ("fedavg", "pfedhn"), 40, 4)),
        ("--clients 8", ("local", ("fedavg", "pfedhn"), 100, 10)),  # not longer than the run
        ("--clients 8 --rounds 30", ("local", ("fedavg", "pfedhn"), 30, 3)),
        ("--strategy pfedhn --clients 1", ("pfedhn", ("local", "fedavg"), 20, 2)),
        ("--set hidden_dim=8 --clients 1", ("pfedhn", ("local", "fedavg"), 20, 2)),  # an option says which is meant
        ("--strategy ghn --baselines fedhenn --clients 1", ("ghn", ("fedhenn",), 20, 2)),
        ("--set eval_every=1 --set gains=true --clients 1", ("local", ("fedavg", "pfedhn"), 20, 1)),
    ],
)
def test_a_probe_is_short_and_has_baselines(words: str, expected: tuple[Any, ...]) -> None:
    flags = parse(flower_server, ["advise", *words.split()]).params
    config = cli._config(flags | cli._probe(flags))
    assert (config.strategy, config.baselines, config.rounds, config.eval_every) == expected
    assert config.gains is False
