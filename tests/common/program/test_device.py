"""Devices that are there, and those that are not."""

import os
from pathlib import Path

import pytest
import torch

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.program import device
from hyperbloom.common.program.device import pick_device


def test_a_device_that_exists_is_taken() -> None:
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(("cuda", "mps", "device"), [(True, True, "cuda"), (False, True, "cpu"), (False, False, "cpu")])
def test_auto_is_cuda_or_the_cpu(monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, device: str) -> None:
    """MPS, with which nobody has run this, only serves who asks for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert pick_device("auto") == torch.device(device)


@pytest.mark.parametrize("name", ["gpu", "", "cuda:99", "CPU", "cpu:x", "meta", "hpu"])
def test_a_device_that_does_not_exist_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pick_device(name)
    text = str(caught.value)
    assert text.startswith(f"--device: expected auto or a device of this machine, found {name!r} (")
    assert "\n" not in text


@pytest.mark.usefixtures("clean_process")
@pytest.mark.parametrize(
    ("limit", "cores"), [("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("1600000 100000", 8)]
)
def test_torch_takes_no_more_threads_than_its_container_may_use(
    limit: str, cores: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(device, "QUOTA", tmp_path / "cpu.max")
    torch.set_num_threads(16)
    device.limit_threads()
    assert torch.get_num_threads() == 8
    device.QUOTA.write_text(f"{limit}\n")
    device.limit_threads()
    assert torch.get_num_threads() == device.cores() == cores
    device.limit_threads(5)
    assert torch.get_num_threads() == 5
