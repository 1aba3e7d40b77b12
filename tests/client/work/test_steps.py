"""Recorded steps on a CUDA device, against the same steps one by one."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyperbloom.client.work import sgd, steps
from hyperbloom.client.work.sgd import Flat, FlatPart, Network, train
from hyperbloom.common.data import Examples
from hyperbloom.common.graphs import GraphHypernetwork, Settings
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import ModelSpec, build
from hyperbloom.common.models.adapt import ALL
from hyperbloom.common.tasks import TaskSpec, make_task
from hyperbloom.common.tasks.classification import Classification

from ..orders import train_order
from .test_vectorised import SHAPES, some_examples, three_rounds

ORDER = train_order("none", steps=20, batch_size=5, clip=0.5, weights=None).sgd
HAFL = {f"hafl-{number}": (3, 16, 16) for number in range(4)}
TASKS = {
    "classes": TaskSpec(),
    "balanced": TaskSpec("classification", balanced=True),
    "findings": TaskSpec("multilabel", balanced=True),
    "numbers": TaskSpec("regression", (5.0,) * 4, (2.0,) * 4),
    "masks": TaskSpec("segmentation", balanced=True),
}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Doubting(nn.Linear):
    """A user's own layer, which decides by a value."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return outputs if outputs.abs().max().item() < 1e3 else outputs / 2


def trained(module: nn.Module, name: str, task: TaskSpec, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, float, int]:
    """Train a copy on CUDA; return its weights, its loss, and how often Python took a step."""
    module, data = module.to("cuda", torch.float64), examples(name, task, "cuda")
    taken, backward = list[Tensor](), sgd.backward

    def counted(module: nn.Module, parts: Sequence[Flat], data: Examples, batch: Tensor) -> Tensor:
        taken.append(batch)
        return backward(module, parts, data, batch)

    monkeypatch.setattr(sgd, "backward", counted)
    network = Network(module, FlatPart(module, Layout.of(module)), FlatPart(module, Layout(())))
    loss = train(network, data, ORDER, 7)
    monkeypatch.undo()
    return network.shared.values.cpu(), loss, len(taken)


def examples(name: str, task: TaskSpec, device: str) -> Examples:
    kind = name.partition(":")[0]
    data = some_examples("lenet" if kind in HAFL else kind, 40, torch.float64, device, task)
    if kind in HAFL:
        object.__setattr__(data, "inputs", data.inputs.expand(-1, 3, -1, -1).contiguous())
    return data


def make(name: str) -> nn.Module:
    """Build a network; what is adapted follows a colon."""
    torch.manual_seed(3)
    kind, _, adapt = name.partition(":")
    return build(ModelSpec(kind, "S", HAFL.get(kind) or SHAPES[kind], 4, adapt=adapt or ALL))


ADAPTED = ("lenet:generated:k=4,h=8", "hafl-1:norms", "lenet:bias", "mlp:head")
CASES = [(name, "classes") for name in ("lenet", *HAFL, *ADAPTED)]
CASES += [("unet" if task == "masks" else "mlp", task) for task in TASKS]


@needs_cuda
@pytest.mark.parametrize(("name", "task"), CASES)
def test_on_cuda_a_recording_takes_the_steps_that_python_takes(
    name: str, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = trained(make(name), name, TASKS[task], monkeypatch)
    monkeypatch.setattr(steps, "FEWEST", 1000)
    one_by_one = trained(make(name), name, TASKS[task], monkeypatch)
    torch.testing.assert_close(recorded[0], one_by_one[0], rtol=1e-7, atol=1e-7)
    assert recorded[1] == pytest.approx(one_by_one[1], rel=1e-5)
    assert (recorded[2], one_by_one[2]) == (steps.EAGER + 1, ORDER.steps)


class OneDevice(TorchDispatchMode):
    """Refuses what a recording cannot hold: a tensor of another device, and a value that the program reads."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        assert all(each.is_meta for each in tensors), f"{func} has a tensor of another device"
        assert torch.Tag.data_dependent_output not in func.tags, f"{func} reads values"
        return func(*args, **(kwargs or {}))


class NoNumbers(TorchFunctionMode):
    """Refuses tensors made of Python's numbers. They come from the CPU, which `OneDevice` does not see."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.tensor, torch.as_tensor, Tensor.new_tensor), f"{func} copies from the CPU"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "task"), CASES)
def test_a_step_stays_on_its_device_and_reads_no_value(name: str, task: str) -> None:
    """On torch's meta device, which has no values, so that every machine finds a step that cannot be recorded."""
    module, data = make(name).to("meta", torch.float64), examples(name, TASKS[task], "meta")
    assert steps.may_be_recorded(module, data.task)
    network = Network(module, FlatPart(module, Layout.of(module)), FlatPart(module, Layout(())))
    batches, total = torch.zeros(4, 5, dtype=torch.long, device="meta"), torch.zeros((), device="meta")
    sgd.take_steps(network, network.parts, data, ORDER, batches[: steps.EAGER], total)
    with NoNumbers(), OneDevice():
        sgd.take_steps(network, network.parts, data, ORDER, batches[steps.EAGER :], total)


@needs_cuda
def test_on_cuda_a_users_own_network_trains_and_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    assert trained(nn.Sequential(Doubting(6, 4)), "mlp", TASKS["classes"], monkeypatch)[2] == ORDER.steps


@needs_cuda
@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_on_cuda_clients_at_once_are_recorded_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = three_rounds(name, "head", torch.float64, "cuda", steps=20)
    monkeypatch.setattr(steps, "FEWEST", 1000)
    for with_it, without in zip(recorded, three_rounds(name, "head", torch.float64, "cuda", steps=20), strict=True):
        torch.testing.assert_close(with_it, without, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Sequential(nn.Linear(6, 4), nn.ReLU()), True),
        (build(ModelSpec("lenet", "M", (3, 32, 32), 10)), True),
        (nn.Sequential(nn.Linear(6, 4), Doubting(4, 4)), False),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(), nn.MaxPool2d(2), nn.Flatten()), True),
        (nn.BatchNorm1d(4, momentum=None), False),
        (nn.LSTM(4, 4), False),
        (nn.TransformerEncoderLayer(4, 2), False),
        (nn.Linear(1000, 1000), False),
        (GraphHypernetwork((), Settings(latent=8, hidden=4), 0), False),
    ],
    ids=[
        "torch's",
        "ours",
        "a user's own",
        "convolutions",
        "average",
        "lstm",
        "transformer",
        "large",
        "graph hypernetwork",
    ],
)
def test_small_networks_of_known_layers_may_be_recorded(module: nn.Module, expected: bool) -> None:
    assert steps.may_be_recorded(module, make_task(TaskSpec())) is expected


def test_a_users_own_task_is_not_recorded() -> None:
    class Own(Classification):
        """A loss of the user's, which may decide by values."""

    assert not steps.may_be_recorded(nn.Linear(6, 4), Own(TaskSpec()))


def test_elsewhere_every_step_is_taken_in_order() -> None:
    batches, seen = torch.arange(40).view(20, 2), list[Tensor]()
    steps.repeat(seen.append, batches, nn.Linear(2, 2), make_task(TaskSpec()))
    assert torch.equal(torch.stack(seen), batches)


@pytest.mark.usefixtures("clean_process")
@pytest.mark.parametrize(
    ("module", "threads"), [(nn.Linear(2, 2), 1), (nn.Conv1d(2, 2, 1), 3), (nn.Linear(2000, 2000), 3)]
)
def test_small_networks_of_dense_layers_take_their_steps_on_one_thread(module: nn.Module, threads: int) -> None:
    torch.set_num_threads(3)
    seen = list[int]()
    steps.repeat(lambda _: seen.append(torch.get_num_threads()), torch.arange(2), module, make_task(TaskSpec()))
    assert seen == [threads] * 2
    assert torch.get_num_threads() == 3

    def fails(_: Tensor) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        steps.repeat(fails, torch.arange(2), module, make_task(TaskSpec()))
    assert torch.get_num_threads() == 3
