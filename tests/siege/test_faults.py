"""What the siege is made of: a proxy that hangs, cuts and heals, and checks that see what they are for."""

import json
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import LEASH
from siege.faults import CLIENTS, Proxy, Siege


@pytest.fixture
def echo() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def test_a_proxy_forwards_hangs_cuts_and_heals(echo: socket.socket) -> None:
    proxy = Proxy(echo.getsockname()[1])
    near = socket.create_connection(("127.0.0.1", proxy.port), timeout=10)
    far, _ = echo.accept()
    near.sendall(b"one")
    assert far.recv(3) == b"one"
    proxy.hang()
    far.sendall(b"two")
    near.settimeout(0.2)
    with pytest.raises(TimeoutError):
        near.recv(3)
    near.settimeout(10)
    proxy.heal()
    assert near.recv(3) == b"two"
    proxy.cut()
    assert near.recv(1) == b""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as refused, suppress(ConnectionResetError):
        assert refused.recv(1) == b""
    proxy.heal()
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as again:
        again.sendall(b"x")
        with echo.accept()[0] as other:
            assert other.recv(1) == b"x"
    proxy.close()
    near.close()
    far.close()
    echo.close()


@pytest.mark.skipif(not LEASH, reason="needs setpriv of util-linux")
def test_nothing_outlives_whoever_started_it() -> None:
    starts = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); input()"
    words = [sys.executable, "-c", starts, *LEASH, "sleep", "1000"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        status = Path(f"/proc/{int(parent.stdout.readline())}/status")
        while "Name:\tsleep" not in status.read_text():  # setpriv has not become it yet
            time.sleep(0.01)
        parent.kill()
    end = time.monotonic() + 20
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() < end, "it lives on"
        time.sleep(0.01)


def sound(folder: Path, siege: Siege) -> None:
    """Write what a run of four rounds leaves."""
    (folder / "run").mkdir(parents=True)
    lines = [{"round": number, "test_mean": 90.0} for number in range(1, 5)]
    (folder / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run/clients.jsonl").write_text("{}\n")
    clients = [{"client_id": f"c{index}", "row": index} for index in range(CLIENTS)]
    (folder / "run/roster.json").write_text(json.dumps({"clients": clients}))
    for index in range(CLIENTS):
        (folder / f"state/{index}/personal").mkdir(parents=True)
        (folder / f"state/{index}/identity.json").write_text(f"secret {index}")
        head(folder, index, 4, 0)
    siege._look()


def head(folder: Path, index: int, number: int, rewinds: int) -> None:
    save_file({"moment": torch.tensor([number, rewinds])}, folder / f"state/{index}/personal/run.safetensors")


@pytest.fixture
def siege(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Siege:
    """Return a siege of nobody, after whose end all holds."""
    monkeypatch.setattr(Siege, "_start_server", lambda self, *args: None)
    monkeypatch.setattr(Siege, "_start_client", lambda self, index: None)
    siege = Siege(tmp_path, 0, rounds=4)
    sound(tmp_path, siege)
    return siege


def test_a_sound_run_has_no_problems(siege: Siege) -> None:
    siege._check_files()
    head(siege.folder, 0, 2, 1)  # the server went back, and the client with it
    siege._look()
    assert siege.problems == []


def test_every_loss_is_seen(siege: Siege) -> None:
    folder = siege.folder
    head(folder, 0, 3, 0)
    (folder / "state/1/identity.json").write_text("another")
    (folder / "state/2/personal/run.safetensors").unlink()
    lines = (folder / "run/metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "run/metrics.jsonl").write_text("".join([*lines[:2], lines[1], *lines[2:]]))
    (folder / "run/roster.json").write_text(json.dumps({"clients": [{"client_id": "c1", "row": 0}]}))
    siege._check_files()
    for sign in ("c0: head of round 3 after (0, 4)", "c1 has another secret", "c2 has 0 heads", "rounds in", "roster"):
        assert any(sign in problem for problem in siege.problems), (sign, siege.problems)


def test_a_round_without_scores_is_one_in_which_nobody_answered(siege: Siege) -> None:
    folder = siege.folder
    siege.rounds = 10
    lines = [{"round": number, "test_mean": 90.0} for number in range(1, 10)]
    (folder / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"round": 10}]))
    told = [json.dumps({"round": 10, "client": f"c{index}", "refused": "no reply"}) + "\n" for index in range(CLIENTS)]
    (folder / "run/clients.jsonl").write_text("".join(told))
    siege._check_files()
    assert siege.problems == []
    (folder / "run/clients.jsonl").write_text("".join(told[1:]))
    siege._check_files()
    assert siege.problems == ["round 10 was not evaluated, which is told of ['c1', 'c2'] only"]
