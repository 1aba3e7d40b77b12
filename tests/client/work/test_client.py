"""What a client loads, once for each of its settings."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work import evaluation, methods
from hyperbloom.client.work.client import LOADED_CLIENTS, client_for
from hyperbloom.common.data import DataSpec
from hyperbloom.common.errors import DataError, HyperbloomError

from ..conftest import SHARE
from ..orders import Worker, answer, evaluate_order, train_order

MakeWorker = Callable[..., Worker]


def test_data_that_cannot_be_loaded_are_told_before_anything_else(make_worker: MakeWorker) -> None:
    with pytest.raises(DataError, match="found 'nowhere'"):
        make_worker(data=DataSpec("nowhere"))


def test_a_process_loads_the_data_of_the_same_settings_once() -> None:
    settings = ClientSettings("a", SHARE, "cpu")
    worker = client_for(settings)
    assert client_for(ClientSettings("a", SHARE, "cpu")) is worker
    assert client_for(ClientSettings("b", SHARE, "cpu")) is not worker


def test_a_process_keeps_a_limited_number_of_clients_loaded(make_worker: MakeWorker) -> None:
    first = ClientSettings("client-0", SHARE, "cpu", state_dir=make_worker("client-0").state.folder)
    loaded = [client_for(first)]
    answer(loaded[0], train_order("head"))
    for index in range(LOADED_CLIENTS):
        client_for(ClientSettings(f"other-{index}", SHARE, "cpu"))
    loaded.append(client_for(first))
    assert loaded[0] is not loaded[1]
    assert answer(loaded[1], evaluate_order("head")) == answer(loaded[0], evaluate_order("head"))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_is_told_and_the_client_lives_on(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    worker = make_worker()
    twin = Worker(dataclasses.replace(worker.settings, state_dir=worker.state.folder.with_name("twin")))
    expected = twin.answer(train_order("head"))

    def starved(*arguments: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(methods, "train", starved)
        patch.setattr(evaluation, "evaluate", starved)
        with pytest.raises(HyperbloomError, match=r"memory is not enough; lower local\.batch_size"):
            worker.answer(train_order("head"))
        with pytest.raises(HyperbloomError, match="memory is not enough"):
            worker.answer(evaluate_order("head"))
    result = worker.answer(train_order("head"))
    assert result.loss == expected.loss and result.weights is not None and expected.weights is not None
    assert torch.equal(result.weights.values, expected.weights.values)


def test_with_little_memory_examples_lie_on_the_disk_and_the_result_is_the_same(make_worker: MakeWorker) -> None:
    usual = make_worker("usual")
    little = Worker(dataclasses.replace(usual.settings, state_dir=usual.state.folder / "little", low_memory=True))
    before, after = usual.train_data, little.train_data
    assert torch.equal(before.inputs, after.inputs) and before.inputs.stride() == after.inputs.stride()
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert sum(str(little.state.folder) in line and "(deleted)" in line for line in maps) == 3  # train, val, test
    order = train_order("none")
    one, other = (worker.answer(order).weights for worker in (usual, little))
    assert torch.equal(one.values, other.values)
