"""Processes that train virtual clients: the result of one process, to the bit, and none is left behind."""

import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from safetensors.torch import load_file

from hyperbloom.client.work.client import client_for
from hyperbloom.common.errors import ConfigError, HyperbloomError
from hyperbloom.server.cli import main
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.server.grids.workers import workers
from hyperbloom.server.loop.session import Session
from hyperbloom.server.runs.folder import RunFolder
from tests.server.test_resume import left_behind, make_config


def test_two_processes_give_the_result_of_one_to_the_bit(tmp_path: Path) -> None:
    config = make_config("pfedhn-pc", rounds=2, cohort=4, compression="top-k:0.5")  # a client keeps two parts of state
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, count in (("one", 1), ("two", 2)):
            folder = tmp_path / name
            client_for.cache_clear()
            with workers(count) as train_all:
                grid = inline_grid(config, folder, train_all=train_all if count > 1 else None)
                Session(config, grid, "run", [RunFolder(folder, config, "run")]).run()
    finally:
        torch.set_num_threads(threads)
        client_for.cache_clear()
    one, two = (left_behind(tmp_path / name) for name in ("one", "two"))
    assert one == two
    assert len(load_file(tmp_path / "two" / "hypernetwork.safetensors")) > 5


@pytest.mark.slow
def test_processes_end_with_a_server_that_is_killed() -> None:
    code = (
        "import os, time\n"
        "from hyperbloom.server.grids.workers import workers\n"
        "from flwr.app import Context, Message, RecordDict\n"
        "if __name__ == '__main__':\n"
        "    with workers(1) as train_all:\n"
        "        train_all([(None, Context(1, 2, {}, RecordDict(), {}))])\n"
        "        print(open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read(), flush=True)\n"
        "        time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline().split()
        server.send_signal(signal.SIGKILL)
        assert server.stdout.read() == ""  # it ends when no process holds it any more


@pytest.mark.parametrize("flags", [[], ["--engine", "inline", "--vectorise"]])
def test_workers_need_the_inline_engine(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags, "--insecure", "--workers", "2"]) == ConfigError.exit_code
    assert "--workers: expected with --engine inline and without --vectorise" in capsys.readouterr().err


def test_a_worker_that_is_killed_ends_the_run_in_one_line() -> None:
    with workers(2) as train_all:
        tasks: Any = [(None, Context(1, node, {}, RecordDict(), {})) for node in (2, 3)]
        train_all(tasks)
        multiprocessing.active_children()[0].kill()
        for _ in range(2):
            with pytest.raises(HyperbloomError, match="a worker process has ended, perhaps for lack of memory; go on"):
                train_all(tasks)
