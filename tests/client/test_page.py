"""A site's own page, from the files of its state folder alone."""

import os
import re
from pathlib import Path

import pytest
import torch

from hyperbloom.client.keep.releases import Releases
from hyperbloom.client.keep.sent import Sent
from hyperbloom.client.keep.state import ClientState, Scored
from hyperbloom.client.page import page
from hyperbloom.client.settings import ClientSettings
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.secrecy.noise import epsilon_of


def text_of(folder: Path) -> str:
    """Return the page's text without its tags."""
    body = page(folder).decode().partition("<body>")[2]
    return " ".join(re.sub(r"<[^>]*>", " ", body).split())


def write(folder: Path, **settings: object) -> None:
    """Let a client have answered some orders."""
    own = ClientSettings("ward-7", state_dir=folder, server="gpu:9092", **settings)  # type: ignore[arg-type]
    sent = Sent(own, Releases(own))
    sent.add("query.greet", 100)
    for _ in range(3):
        sent.add("train", 2_000_000)
    sent.add("evaluate", 64, {"total": 53, "metrics": {"accuracy": 0.875, "rmse": 1.5}})
    sent.write()


def test_it_says_what_has_left_and_how_to_leave(tmp_path: Path) -> None:
    write(tmp_path)
    with ClientState(tmp_path).lock():
        told = text_of(tmp_path)
    assert "ward-7 Last trained 20" in told and "gpu:9092 running" in told
    assert "weights or their changes, mean training losses 3 6.0 MB" in told
    assert "6.0 MB 5 answers since" in told  # 6,000,164 bytes
    assert "accuracy 87.5 % on its own 53 test examples" in told and "RMSE 1.5" in told
    assert "Nothing is bounded" in told and "No run has compared this client yet" in told
    assert f"flower-server clients revoke ward-7 , and delete {tmp_path}" in told


def test_a_client_that_runs_can_be_stopped(tmp_path: Path) -> None:
    write(tmp_path)
    with ClientState(tmp_path).lock():
        assert f"kill {os.getpid()}" in text_of(tmp_path)
    told = text_of(tmp_path)  # its number may be that of another process by now, as here
    assert "It is not running" in told and f"kill {os.getpid()}" not in told


def test_the_budget_is_what_the_ledger_counts(tmp_path: Path) -> None:
    write(tmp_path, min_noise=8.0, min_masked=3, max_changes=40)
    (tmp_path / "releases.json").write_text('{"changes": 10, "scores": 0}')
    told = text_of(tmp_path)
    assert "10 of 40 changes made of training examples have left since there is a bound" in told
    assert "0 of 0 scores made of training examples" in told
    so_far, all_of_them = (f"{epsilon_of([8.0] * count, 1e-5):.4g}" for count in (3, 40))
    assert f"noise of 8 times its norm or more: epsilon is at most {so_far} for the 3 that have left" in told
    assert f"and {all_of_them} for all that may with this noise (delta 1e-05)" in told and "no epsilon" not in told
    assert "sums of 3 clients or more" in told
    (tmp_path / "releases.json").write_text("{")
    with pytest.raises(ConfigError, match="nothing leaves until it is restored"):
        page(tmp_path)


def test_a_bound_that_is_none_in_practice_is_computed_at_once(tmp_path: Path) -> None:
    write(tmp_path, min_noise=8.0, max_changes=10**12)
    assert f"and {epsilon_of([8e-6], 1e-5):.4g} for all that may" in text_of(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"kinds": {}}', '{"kinds": [], "limits": 1, "least": 1, "noisy": 1}'])
def test_a_damaged_record_of_what_was_sent_is_none(content: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "sent.json").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(f"no sent.json in {tmp_path}")):
        page(tmp_path)


def test_no_epsilon_is_claimed_for_what_left_without_noise(tmp_path: Path) -> None:
    write(tmp_path, max_changes=40)
    write(tmp_path, min_noise=8.0)
    write(tmp_path, min_noise=4.0)
    told, least = text_of(tmp_path), f"{epsilon_of([4.0] * 6, 1e-5):.4g}"
    assert f"epsilon is at most {least} for the 6 that have left" in told
    assert "3 answers to training orders left without noise: no epsilon covers them" in told


def test_the_gain_is_that_of_the_last_run_which_compared(tmp_path: Path) -> None:
    write(tmp_path)
    state = ClientState(tmp_path)
    for run, gain in (("one", "ward-7: +3.0 points"), ("two", "ward-7: <b>+4.0</b> points"), ("three", "")):
        facts = Scored(
            model="mlp",
            size="M",
            input_shape=(2,),
            num_classes=2,
            round=1,
            private="all",
            task="classification",
            moments=(),
            metrics={},
            total=1,
            gain=gain,
        )
        state.save_scored(run, {"weight": torch.zeros(1)}, facts)
        os.utime(tmp_path / "scored" / f"{run}.safetensors", (len(run), {"one": 1, "two": 2, "three": 3}[run]))
    (tmp_path / "scored" / "damaged.safetensors").write_bytes(b"no tensors")
    content = page(tmp_path).decode()
    assert "ward-7: &lt;b&gt;+4.0&lt;/b&gt; points" in content and "<b>+4" not in content


def test_a_folder_without_a_client_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"no sent.json in {tmp_path}")):
        page(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "7", '{"changes": 1}', '{"changes": "many", "scores": 0}'])
def test_a_damaged_ledger_of_what_left_is_named(content: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "releases.json").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'releases.json'} is damaged: nothing leaves until")):
        page(tmp_path)
