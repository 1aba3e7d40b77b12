"""What a client keeps on its disk: its lock, its secret, its personal parameters."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyperbloom.client.keep.state import ClientState, Scored
from hyperbloom.common.errors import HyperbloomError, RefusedError, WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.program.names import default_state_dir
from hyperbloom.common.wire.orders import Scope


@pytest.fixture
def state(tmp_path: Path) -> ClientState:
    """Return the state of a client that never ran."""
    return ClientState(tmp_path / "state")


LAYOUT = Layout((("weight", (2, 3)), ("bias", (2,))))
VALUES = torch.linspace(-1, 1, LAYOUT.numel) / 3


def scope(run_id: str = "run-1", number: int = 0, resume_points: tuple[int, ...] = ()) -> Scope:
    return Scope(run_id, number, 0, resume_points)


# ---------------------------------------------------------------------- where


def test_the_default_place_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir("ward-7") == tmp_path / "hyperbloom" / "ward-7"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_state_dir("ward-7") == tmp_path / ".local" / "state" / "hyperbloom" / "ward-7"


def test_nothing_is_written_before_it_is_needed(state: ClientState) -> None:
    assert not state.folder.exists()
    assert state.load_personal(scope(), LAYOUT) is None
    assert not state.folder.exists()


SCORED = Scored(
    model="mlp",
    size="M",
    input_shape=(1, 8, 8),
    num_classes=2,
    round=1,
    private="head",
    task="classification",
    moments=(),
    metrics={"accuracy": 0.5},
    total=2,
)


@pytest.mark.parametrize(
    "run_id", ["../run", "/tmp/run", "a/b", "", ".", "..", "r\0", "r\x1b]0;x\7", "r" * 201, "\u00fc" * 101]
)
def test_a_server_cannot_name_a_file_outside(state: ClientState, run_id: str) -> None:
    for call in (
        lambda: state.save_personal(scope(run_id), LAYOUT, VALUES),
        lambda: state.load_personal(scope(run_id), LAYOUT),
        lambda: state.save_scored(run_id, {"weight": VALUES}, SCORED),
        lambda: state.save_residual(scope(run_id), LAYOUT, VALUES),
    ):
        with pytest.raises(WireError, match="run_id: expected the name of a run, found"):
            call()
    assert not state.folder.exists()


# ---------------------------------------------------------------------- the lock


def test_a_second_holder_is_refused_with_the_first_ones_number(state: ClientState) -> None:
    message = (
        f"process {os.getpid()} already runs as this client (state in {state.folder}); "
        "stop it, or choose another --client-id or --state-dir"
    )
    with state.lock():
        for _ in range(2):  # a refusal must not take the lock, nor damage what stands in it
            with pytest.raises(RefusedError, match=f"^{re.escape(message)}$"), ClientState(state.folder).lock():
                raise AssertionError("two holders")


def test_the_lock_is_released_afterwards_also_by_an_error(state: ClientState) -> None:
    with pytest.raises(KeyError), state.lock():
        raise KeyError
    with state.lock():
        assert (state.folder / "lock").read_text() == f" {os.getpid()}"
    with state.lock():
        pass


def test_nobody_else_reads_what_never_leaves(state: ClientState) -> None:
    state.folder.mkdir(mode=0o755)
    with state.lock():
        state.save_personal(scope(), LAYOUT, VALUES)
    assert stat.S_IMODE(state.folder.stat().st_mode) == 0o700


def test_a_longer_number_of_an_earlier_holder_leaves_nothing_behind(state: ClientState) -> None:
    state.folder.mkdir(parents=True)
    (state.folder / "lock").write_text("123456789012345")
    with state.lock():
        assert (state.folder / "lock").read_text() == f" {os.getpid()}"


# What `lock` does, without the seconds that a second process would need to import torch.
HOLDER = """
import os, sys, time
from filelock import lock_descriptor
file = open(sys.argv[1], "a+")
assert lock_descriptor(file.fileno(), blocking=False)
file.truncate(0)
print("", os.getpid(), file=file, end="", flush=True)
print("held", flush=True)
time.sleep(60)
"""


def test_another_process_is_named_and_a_killed_one_holds_no_longer(state: ClientState) -> None:
    state.folder.mkdir(parents=True)
    command = [sys.executable, "-c", HOLDER, str(state.folder / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            with pytest.raises(RefusedError, match=rf"^process {child.pid} already runs as this client"), state.lock():
                pass
        finally:
            child.kill()
    with state.lock():
        assert (state.folder / "lock").read_text() == f" {os.getpid()}"


# ---------------------------------------------------------------------- the secret


def test_the_secret_is_made_once_and_only_for_its_owner(state: ClientState) -> None:
    token = state.token()
    assert re.fullmatch(r"[0-9a-f]{64}", token)
    path = state.folder / "identity.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == {"secrets": {"": {"secret": token, "address": ""}}}
    assert state.token() == token
    assert ClientState(state.folder).token() == token


def test_each_server_has_a_secret_of_its_own_and_keeps_it_when_it_moves_or_has_a_new_ca(state: ClientState) -> None:
    first, second, plain = state.token("CA 1", "one:9092"), state.token("CA 2", "two:9092"), state.token("", "two:9092")
    assert len({first, second, plain}) == 3
    assert state.token("CA 1", "moved:9092") == first
    assert state.token("CA 3", "moved:9092") == first  # whoever stole the CA's key learned nothing of it
    assert state.token("CA 2", "two:9092") == second
    assert state.token("CA 1", "one:9092") not in (first, second, plain)  # it is nobody's any more
    assert state.token("", "anywhere:1") == plain
    assert state.token("CA 4", "anywhere:1") != plain  # which was told in plain text


def test_two_clients_have_two_secrets(tmp_path: Path) -> None:
    assert ClientState(tmp_path / "a").token() != ClientState(tmp_path / "b").token()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"word"', b"{}", b"null", b"\xff\xfe"])
def test_a_damaged_identity_is_not_replaced_but_told(state: ClientState, content: bytes) -> None:
    state.folder.mkdir(parents=True)
    path = state.folder / "identity.json"
    path.write_bytes(content)
    with pytest.raises(HyperbloomError) as caught:
        state.token()
    assert str(caught.value) == (
        "identity.json in the client's state folder is damaged: expected JSON with secrets. Restore it from a backup, "
        "or move it away and ask the server's operator to admit this client anew"
    )
    assert path.read_bytes() == content


# ---------------------------------------------------------------------- personal parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_momentum", [False, True])
def test_personal_parameters_come_back_bit_for_bit(state: ClientState, dtype: torch.dtype, with_momentum: bool) -> None:
    values = torch.randn(LAYOUT.numel, dtype=dtype, generator=torch.Generator().manual_seed(0))
    momentum = -values if with_momentum else None
    state.save_personal(scope(), LAYOUT, values, momentum)
    found = ClientState(state.folder).load_personal(scope(), LAYOUT)
    assert found is not None
    assert found[0].numpy().tobytes() == values.numpy().tobytes()
    assert (found[1] is None) == (momentum is None)
    if momentum is not None and found[1] is not None:
        assert found[1].numpy().tobytes() == momentum.numpy().tobytes()


def test_each_run_has_parameters_of_its_own(state: ClientState) -> None:
    state.save_personal(scope("run-1"), LAYOUT, VALUES)
    state.save_personal(scope("run-2"), LAYOUT, -VALUES)
    assert sorted(path.name for path in (state.folder / "personal").iterdir()) == [
        "run-1.safetensors",
        "run-2.safetensors",
    ]
    found = state.load_personal(scope("run-2"), LAYOUT)
    assert found is not None and torch.equal(found[0], -VALUES)
    assert state.load_personal(scope("run-3"), LAYOUT) is None


@pytest.mark.parametrize("content", [b"", b"garbage that is longer than a header", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_damaged_file_is_told(state: ClientState, content: bytes) -> None:
    state.save_personal(scope(), LAYOUT, VALUES)
    path = state.folder / "personal" / "run-1.safetensors"
    whole = path.read_bytes()
    for damaged in (content, whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(HyperbloomError) as caught:
            state.load_personal(scope(), LAYOUT)
        text = str(caught.value)
        assert text.startswith("personal/run-1.safetensors in the client's state folder is unreadable ("), text
        assert str(state.folder) not in text  # the server reads it
        assert text.endswith("; move it away to start from fresh weights")
    path.write_bytes(whole)
    assert state.load_personal(scope(), LAYOUT)


def test_another_architecture_is_told(state: ClientState) -> None:
    state.save_personal(scope(), Layout((("weight", (2, 4)),)), torch.zeros(8))
    message = "personal/run-1.safetensors in the client's state folder belongs to another architecture; move it away"
    with pytest.raises(HyperbloomError, match=f"^{re.escape(message)} to start from fresh weights$"):
        state.load_personal(scope(), LAYOUT)


def test_a_file_without_values_is_told(state: ClientState) -> None:
    path = state.folder / "personal" / "run-1.safetensors"
    path.parent.mkdir(parents=True)
    save_file({"other": VALUES}, path, {"layout": LAYOUT.digest})
    with pytest.raises(HyperbloomError, match="move it away to start from fresh weights"):
        state.load_personal(scope(), LAYOUT)


def test_saving_is_atomic(state: ClientState, monkeypatch: pytest.MonkeyPatch) -> None:
    state.save_personal(scope(), LAYOUT, VALUES)
    monkeypatch.setattr(os, "fsync", lambda descriptor: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        state.save_personal(scope(), LAYOUT, -VALUES)
    path = state.folder / "personal" / "run-1.safetensors"
    assert torch.equal(load_file(path)["values"], VALUES)
    assert list(path.parent.iterdir()) == [path]


# ---------------------------------------------------------------------- a run that is complete


def test_a_server_that_names_ever_new_runs_does_not_fill_the_disk(
    state: ClientState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hyperbloom.client.keep.state.MOST_RUNS", 3)
    for number in range(3):
        state.save_personal(scope(f"run-{number}"), LAYOUT, torch.zeros(LAYOUT.numel))
        state.save_scored(f"run-{number}", {"weight": VALUES}, SCORED)
    with pytest.raises(HyperbloomError, match="keeps models of 3 runs already"):
        state.save_personal(scope("run-3"), LAYOUT, torch.zeros(LAYOUT.numel))
    with pytest.raises(HyperbloomError, match="keeps models of 3 runs already"):
        state.save_scored("run-3", {"weight": VALUES}, SCORED)
    state.save_scored("run-1", {"weight": VALUES}, SCORED)
    state.save_personal(scope("run-1"), LAYOUT, torch.ones(LAYOUT.numel))
    found = state.load_personal(scope("run-1"), LAYOUT)
    assert found is not None and found[0].sum() == LAYOUT.numel
